"""A file of settings with one key changed: everything else stays as somebody wrote it."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from mesh.config import Config, flatten, read_as
from mesh.config.editing import replace_file, with_value, without_key
from mesh.errors import BadValue, ConfigError, UnknownKey
from tests.full_disk import file_size_limit

FILE = Path("/somewhere/config.toml")
WRITTEN = """\
# my node
name = "attic"   # upstairs
port = 1

[research.distributed_inference]   # the mesh
enabled = false
host.kv_tokens = 4096 # big

[routing]
mix_formats = true

# the end
"""
COMMENTS = [line[line.index("#") :] for line in WRITTEN.splitlines() if "#" in line]


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith(("HEARTHNET_", "XDG_", "MX_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "was", "becomes"),
    [
        ("port", "9000", "port = 1\n", "port = 9000\n"),
        ("name", "my node", '"attic"   # upstairs', '"my node"   # upstairs'),
        ("peer", "a:1,b:2", "port = 1\n", 'port = 1\npeer = ["a:1", "b:2"]\n'),
        ("peer", '["a:1"]', "port = 1\n", 'port = 1\npeer = ["a:1"]\n'),
        ("threads", "4", "port = 1\n", "port = 1\nthreads = 4\n"),
        ("routing.mix_formats", "false", "formats = true", "formats = false"),
        ("routing.keep_first", "2", "# the end\n", "# the end\nkeep_first = 2\n"),
        ("research.distributed_inference.host.kv_tokens", "64", "4096 # big", "64 # big"),
        (
            "research.distributed_inference.host.max_memory", "50 %",
            "4096 # big\n", '4096 # big\nhost.max_memory = "50 %"\n',
        ),
        ("deployments.replan_seconds", "30", "# the end\n",
         "# the end\n\n[deployments]\nreplan_seconds = 30\n"),
    ],
)  # fmt: skip
def test_a_value_is_set_and_nothing_else(key: str, value: str, was: str, becomes: str) -> None:
    draft, settings = with_value(FILE, WRITTEN, key, value)
    assert draft == WRITTEN.replace(was, becomes)
    assert settings.origins[key] == str(FILE)
    again, _ = with_value(FILE, draft, key, value)
    assert again == draft


def test_every_setting_can_be_set_to_what_it_is_and_taken_out_again() -> None:
    before = read_as(FILE, WRITTEN)
    for key, value in flatten(Config()).items():
        if value is None or key in tomllib.loads(WRITTEN) or value == []:
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        text = ",".join(value) if isinstance(value, list) else text
        draft, settings = with_value(FILE, WRITTEN, key, text)
        assert flatten(settings.config)[key] == value, key
        others = flatten(before.config) | {key: value}
        assert flatten(settings.config) == others
        assert all(comment in draft for comment in COMMENTS)
        back, settings = without_key(FILE, draft, key)
        assert settings.origins[key] == "default"
        assert "# my node\n" in back


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("prot", "1", "Did you mean port"),
        ("routing", "x", "is a section of settings"),
        ("port", "99999", "less than or equal to 65535"),
        ("threads", "many", "threads"),
        ("research.distributed_inference.host.max_memory", "lots", "is neither GiB"),
        ("api_tls_key", "/a.pem", "api_tls_cert is not"),
    ],
)
def test_what_up_would_refuse_is_refused(key: str, value: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        with_value(FILE, WRITTEN, key, value)


def test_a_value_behind_a_variable_is_checked_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTHNET_PORT", "5")
    with pytest.raises(BadValue, match="port"):
        with_value(FILE, WRITTEN, "port", "99999")
    draft, settings = with_value(FILE, WRITTEN, "port", "7")
    assert "port = 7\n" in draft
    assert settings.origins["port"] == "HEARTHNET_PORT"


def test_what_is_not_set_cannot_be_unset() -> None:
    with pytest.raises(BadValue, match="does not set api_port: its value is from default"):
        without_key(FILE, WRITTEN, "api_port")
    with pytest.raises(UnknownKey):
        without_key(FILE, WRITTEN, "nothing")
    draft, _ = without_key(FILE, WRITTEN, "research.distributed_inference.host.kv_tokens")
    assert draft == WRITTEN.replace("host.kv_tokens = 4096 # big\n", "")


@pytest.mark.parametrize("broken", ["port = ", "routing = 1", "port = 'x'\n"])
def test_a_broken_file_is_named_and_stays(broken: str) -> None:
    with pytest.raises(ConfigError):
        with_value(FILE, broken, "routing.keep_first", "1")


def test_a_broken_value_is_mended_by_setting_it() -> None:
    draft, _ = with_value(FILE, "port = 'x' # mine\n", "port", "1")
    assert draft == "port = 1 # mine\n"


def test_the_file_is_replaced_in_one_step_with_its_mode_and_its_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.toml", tmp_path / "config.toml"
    real.write_text("port = 1\n")
    real.chmod(0o640)
    link.symlink_to(real)
    with pytest.raises(BadValue, match="changed by somebody else"):
        replace_file(link, "port = 2\n", "port = 0\n")
    assert real.read_text() == "port = 1\n"
    replace_file(link, "port = 2\n", "port = 1\n")
    assert link.is_symlink()
    assert (real.read_text(), real.stat().st_mode & 0o777) == ("port = 2\n", 0o640)
    new = tmp_path / "new" / "config.toml"
    replace_file(new, "port = 3\n", None)
    assert new.stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in tmp_path.iterdir()) == ["config.toml", "new", "real.toml"]


def test_a_full_disk_leaves_the_file_and_says_what_helps(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("port = 1\n")
    with file_size_limit(4), pytest.raises(BadValue, match="File too large") as refused:
        replace_file(file, "port = 2\n", "port = 1\n")
    assert refused.value.fix == "Free some room on that disk; the file is as it was."
    assert file.read_text() == "port = 1\n"
