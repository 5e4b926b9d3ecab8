"""Settings: precedence, origins, refusals."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mesh.config import Config, client_host, flatten, is_loopback, load_config
from mesh.config.problems import meanings
from mesh.errors import BadValue, UnknownKey
from mesh.paths import default_config_file


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith(("HEARTHNET_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "some.toml"
    file.write_text(text)
    return file


def test_defaults_are_the_specification_s_but_for_the_number_of_answers_at_once() -> None:
    loaded = load_config()
    mesh = loaded.config.distributed
    assert (mesh.enabled, mesh.backend) == (None, "small_model_layered")
    assert (mesh.max_shards_per_request, mesh.max_concurrent_pipelines) == (16, 8)
    assert (mesh.shard_health_timeout_seconds, mesh.activation_dtype) == (30, "fp16")
    assert (mesh.fallback_to_local, mesh.allow_self_as_shard) == (True, False)
    assert (mesh.host.serve_shards, mesh.host.shard_eviction_idle_seconds) == (None, 600)
    assert mesh.host.shard_max_vram_mb == 20000
    assert loaded.config.api_is_loopback
    assert loaded.config.state_dir.is_absolute()
    assert loaded.file is None
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.origins.keys() == flatten(loaded.config).keys()


def test_flag_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(
        tmp_path,
        """
        name = "from-file"
        port = 1
        api_port = 1
        [research.distributed_inference]
        enabled = false
        max_shards_per_request = 2
        host.kv_tokens = 4096
        """,
    )
    monkeypatch.setenv("HEARTHNET_PORT", "2")
    monkeypatch.setenv("HEARTHNET_API_PORT", "2")
    nested = "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__MAX_SHARDS_PER_REQUEST"
    monkeypatch.setenv(nested, "3")
    loaded = load_config({"api_port": 3, "name": None}, file=file)
    config, origins = loaded.config, loaded.origins
    assert (config.name, config.port, config.api_port) == ("from-file", 2, 3)
    mesh = config.distributed
    assert (mesh.enabled, mesh.max_shards_per_request, mesh.host.kv_tokens) == (False, 3, 4096)
    assert origins["name"] == str(file)
    assert origins["port"] == "HEARTHNET_PORT"
    assert origins["api_port"] == "--api-port"
    assert origins["research.distributed_inference.max_shards_per_request"] == nested
    assert origins["research.distributed_inference.host.kv_tokens"] == str(file)
    assert origins["dtype"] == "default"
    assert loaded.file == file


def test_modelexpress_variables_count_below_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_METADATA_BACKEND", "kubernetes")
    monkeypatch.setenv("MX_METADATA_NAMESPACE", "kavin")
    monkeypatch.setenv("MX_REDIS_PORT", "6380")
    loaded = load_config()
    section = loaded.config.coordination
    assert (section.store, section.namespace) == ("kubernetes", "kavin")
    assert section.redis_url == "redis://127.0.0.1:6380/0"
    assert loaded.origins["coordination.store"] == "MX_METADATA_BACKEND"
    assert loaded.origins["coordination.redis_url"] == "MX_REDIS_HOST, MX_REDIS_PORT"
    monkeypatch.setenv("HEARTHNET_COORDINATION__STORE", "memory")
    assert load_config().config.coordination.store == "memory"
    monkeypatch.setenv("MX_METADATA_NAMESPACE", "Not A Name")
    with pytest.raises(BadValue, match=r"coordination\.namespace \(from MX_METADATA_NAMESPACE\)"):
        load_config()


def test_file_is_found_by_variable_and_default_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    default = default_config_file()
    assert default.is_relative_to(tmp_path)
    default.parent.mkdir(parents=True)
    default.write_text("port = 5")
    assert load_config().config.port == 5
    monkeypatch.setenv("HEARTHNET_CONFIG", str(written(tmp_path, "port = 6")))
    assert load_config().config.port == 6
    assert load_config(file=default).config.port == 5
    with pytest.raises(BadValue, match="no configuration file"):
        load_config(file=tmp_path / "missing.toml")


def test_lists_from_variables_are_comma_separated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTHNET_MODEL", "builtin, /models/x=y")
    monkeypatch.setenv("HEARTHNET_LAYERS", "0-3,none")
    monkeypatch.setenv("HEARTHNET_THREADS", "4")
    config = load_config().config
    assert config.model == ("builtin", "/models/x=y")
    assert config.layers == ("0-3", "none")
    assert config.threads == 4


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("port", "x", "valid integer"),
        ("port", 65536, "less than or equal to 65535"),
        ("model", ["=x"], "PATH=ID"),
        ("model", ["/x="], "PATH=ID"),
        ("layers", ["7-3"], "ends before it begins"),
        ("layers", ["all"], "LO-HI"),
        ("peer", ["host"], "HOST:PORT"),
        ("peer", ["host:0"], "HOST:PORT"),
        ("dtype", "int8", "'auto', 'fp32', 'bf16' or 'fp16'"),
        ("device", "cpu,gpu", "'gpu' is no device"),
        ("threads", "many", "'auto'"),
        ("threads", 0, "greater than or equal to 1"),
        ("name", "a\x1b", "printable"),
        ("name", "", "at least 1"),
        ("api_host", "attic.local", "IP address"),
        ("api_key", "short", "at least 16"),
        ("api_key", "k" * 15 + "é", "at least 16"),
        ("log_level", "loud", "'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_bad_values_name_key_source_and_reason(key: str, value: Any, why: str) -> None:
    with pytest.raises(BadValue) as refused:
        load_config({key: value})
    assert refused.value.param == key
    assert f"{key} (from --{key.replace('_', '-')})" in refused.value.message
    assert why in refused.value.message
    assert refused.value.fix


def test_a_bad_value_is_told_with_what_is_allowed() -> None:
    with pytest.raises(BadValue) as refused:
        load_config({"device": "tpu"})
    assert "cpu:LO-HI (these cores), cuda, cuda:N and mps" in refused.value.fix


def test_each_bad_value_is_its_own_key_s(tmp_path: Path) -> None:
    host = "[research.distributed_inference.host]\n"
    slow, few = 'transfer_mb_per_second = "fast"\n', "kv_tokens = -5\n"
    for text, key, why, other in (
        (host + few + slow, "kv_tokens", "greater than or equal to 16", "valid number"),
        (host + slow, "transfer_mb_per_second", "valid number", "equal to 16"),
    ):
        with pytest.raises(BadValue) as refused:
            load_config(file=written(tmp_path, text))
        assert refused.value.param == f"research.distributed_inference.host.{key}"
        assert why in refused.value.message
        assert other not in refused.value.message


def test_number_of_layer_ranges_must_fit() -> None:
    assert load_config({"model": ["a", "b"], "layers": ["0-1"]}).config.layers == ("0-1",)
    with pytest.raises(BadValue, match="3 layer ranges for 2 models"):
        load_config({"model": ["a", "b"], "layers": ["0-1", "2-3", "4-5"]})


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("prot = 1", "prot", "port"),
        (
            "[research.distributed_inference]\nenabeld = true",
            "research.distributed_inference.enabeld",
            "research.distributed_inference.enabled",
        ),
        (
            "[research.distributed_inference.host]\nkv_token = 1",
            "research.distributed_inference.host.kv_token",
            "research.distributed_inference.host.kv_tokens",
        ),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(
    tmp_path: Path, text: str, key: str, nearest: str
) -> None:
    file = written(tmp_path, text)
    with pytest.raises(UnknownKey) as refused:
        load_config(file=file)
    assert refused.value.message == f"{file} sets {key}, which is no setting."
    assert refused.value.fix == f"Did you mean {nearest}?"


@pytest.mark.parametrize("text", ["xyz = 1", "[xyz]\nport = 1"])
def test_where_nothing_is_near_an_unknown_key_all_are_named(tmp_path: Path, text: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(UnknownKey) as refused:
        load_config(file=file)
    assert refused.value.message == f"{file} sets xyz, which is no setting."
    assert refused.value.fix.startswith("There are: state_dir, name, model, layers,")
    assert refused.value.fix.endswith(" coordination, policy, research.")


def test_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTHNET_STAT_DIR", "/x")
    with pytest.raises(UnknownKey, match="HEARTHNET_STAT_DIR") as refused:
        load_config()
    assert refused.value.fix == "Did you mean HEARTHNET_STATE_DIR?"


@pytest.mark.parametrize("text", ["port =", "research = 3", "\udcff"])
def test_broken_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "some.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadValue) as refused:
        load_config(file=file)
    assert str(file) in refused.value.message


def test_config_is_frozen_and_reads_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTHNET_PORT", "7")
    config = Config(state_dir=Path("~/x"))
    assert config.port == 8421
    assert config.state_dir == Path.home() / "x"
    with pytest.raises(ValidationError):
        config.port = 1  # type: ignore[misc]


def test_every_setting_is_documented() -> None:
    said = meanings(Config)
    assert said.keys() == flatten(Config()).keys()
    assert "" not in said.values()


def test_client_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert client_host() is None
    monkeypatch.setenv("HEARTHNET_HOST", "http://attic:8420")
    assert client_host() == "http://attic:8420"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_addresses(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example", ""])  # noqa: S104
def test_other_addresses(host: str) -> None:
    assert not is_loopback(host)


MESH = Path(__file__).parent.parent / "mesh"


def sentences(about: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Every text with a space in it, and its file, of files that say anything `about` it."""
    for path in MESH.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source if about.search(source) else "")):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield str(path.relative_to(MESH)), node.value


def test_texts_name_only_settings_that_exist() -> None:
    keys = set(flatten(Config()))
    sections = {key.rpartition(".")[0] for key in keys if "." in key}
    sections |= {section.partition(".")[0] for section in sections}
    roots = "|".join(sorted({section.partition(".")[0] for section in sections}))
    named = re.compile(rf"(?<![\w./])(?:{roots})(?:\.[a-z_]+)+(?![\w(])")
    found = {(match[0], file) for file, text in sentences(named) for match in named.finditer(text)}
    assert ("jobs.wall_seconds", "interventions/jobs/queue/working.py") in found
    assert {(key, file) for key, file in found if key not in keys | sections} == set()
