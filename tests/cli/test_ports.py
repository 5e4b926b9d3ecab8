"""What `hearthnet up` asks before it makes anything: whether it could start."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path

import psutil
import pytest

from mesh.cli.ports import require_free
from mesh.cli.starting import require_device, require_there
from mesh.cli.up import found_first_hearth, leave_running, prepare
from mesh.config import Config
from mesh.errors import AlreadyRunning, BadValue, MeshError, ModelNotFound, PortInUse
from mesh.identity.api_keys import ApiKeys
from mesh.paths import StatePaths
from mesh.runtime import sole_start, sole_use


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def config(tmp_path: Path, **more: object) -> Config:
    fields = {"port": 0, "api_port": 0, "interface": ("127.0.0.1",), **more}
    return Config(state_dir=tmp_path / "state", **fields)  # type: ignore[arg-type]


def test_a_taken_port_is_named_with_its_flag(tmp_path: Path, taken: int) -> None:
    for field, flag in (("port", "--port"), ("api_port", "--api-port")):
        with pytest.raises(PortInUse, match=f"Port {taken} on 127.0.0.1") as refused:
            require_free(config(tmp_path, **{field: taken}))
        assert f"{flag} (0" in refused.value.fix
    with pytest.raises(PortInUse, match=r"on 0\.0\.0\.0"):
        require_free(config(tmp_path, port=taken, interface=("lo",)))
    with pytest.raises(PortInUse, match=r"on 0\.0\.0\.0"):
        require_free(config(tmp_path, port=taken, interface=()))


def test_one_port_for_both_is_refused_and_a_free_one_stays_free(tmp_path: Path, taken: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    for _ in range(2):
        require_free(config(tmp_path, port=free))
    with pytest.raises(PortInUse):
        require_free(config(tmp_path, port=free, api_port=free))


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match=r"192\.0\.2\.1"):
        require_free(config(tmp_path, interface=("192.0.2.1",)))
    with pytest.raises(BadValue, match=r"has no address 2001:db8::1 now"):
        require_free(config(tmp_path, api_host="2001:db8::1"))
    with pytest.raises(BadValue, match=r"has no address 2001:db8::1 now"):  # `hearthnet restart`
        require_there(config(tmp_path, api_host="2001:db8::1"))


def test_an_address_that_belongs_to_an_interface_is_taken(tmp_path: Path) -> None:
    rows = psutil.net_if_addrs().values()
    found = [r.address for row in rows for r in row if r.address.startswith("fe80::")]
    if not found:
        pytest.skip("no interface has a link-local address")
    require_free(config(tmp_path, api_host=found[0]))


@pytest.mark.parametrize("api_host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 - is refused
@pytest.mark.parametrize(
    ("wrong", "refusal"),
    [
        ({}, PortInUse),
        ({"interface": ("eth99",)}, BadValue),
        ({"model": ("/nonexistent",)}, ModelNotFound),
        ({"model": ("nosuch",)}, ModelNotFound),
        ({"layers": ("900-912",)}, BadValue),
        ({"device": "cuda" if sys.platform == "darwin" else "mps"}, BadValue),
    ],
)
def test_a_first_start_that_cannot_succeed_makes_nothing(
    tmp_path: Path,
    taken: int,
    api_host: str,
    wrong: dict[str, object],
    refusal: type[MeshError],
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted = config(tmp_path, **{"port": 0 if wrong else taken, "api_host": api_host, **wrong})
    paths = StatePaths(wanted.state_dir).create()
    with pytest.raises(refusal):
        prepare(wanted, paths)
    assert not paths.hearth.exists()
    assert not paths.identity_key.exists()
    assert not [*paths.events_dir.glob("*")]
    assert not ApiKeys.load(paths.api_keys).keys
    assert "code" not in "".join(capsys.readouterr())


def test_where_a_node_runs_already_that_is_what_is_said(tmp_path: Path, taken: int) -> None:
    wanted = config(tmp_path, port=taken)
    paths = StatePaths(wanted.state_dir).create()
    with sole_use(paths), pytest.raises(AlreadyRunning):
        prepare(wanted, paths)


def test_a_hearth_is_founded_once_whoever_comes_between(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = config(tmp_path)

    class Overtaken(StatePaths):
        """Of one who has seen no hearth when another founds it."""

        has_looked = False

        @property
        def hearth(self) -> Path:
            if Overtaken.has_looked:
                return super().hearth
            Overtaken.has_looked = True
            prepare(wanted, StatePaths(self.root))
            return self.root / "was not there"

    prepare(wanted, Overtaken(StatePaths(wanted.state_dir).create().root))
    assert "".join(capsys.readouterr()).count("recovery code") == 1


def test_one_command_at_a_time_starts_a_daemon(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path / "state").create()
    with sole_start(paths):
        with sole_use(paths):
            pass  # as the daemon that it starts
        with pytest.raises(AlreadyRunning, match="just starting"):
            leave_running(["--no-such-option"], paths)
    with sole_use(paths), pytest.raises(AlreadyRunning), sole_start(paths):
        pass


def test_a_device_that_cannot_be_there_is_refused(tmp_path: Path) -> None:
    for device, platform in (("cuda", "linux"), ("cuda:1", "darwin"), ("mps", "linux")):
        with pytest.raises(BadValue, match=f"no device {device}") as refused:
            require_device(device, platform, tmp_path)
        assert "--device auto" in refused.value.fix
    for device in ("auto", "cpu"):
        require_device(device, "linux", tmp_path)
    (tmp_path / "nvidia0").touch()
    for device, platform in (("cuda:0", "linux"), ("mps", "darwin")):
        require_device(device, platform, tmp_path)
    with pytest.raises(BadValue, match="it has cuda:0"):
        require_device("cuda:7", "linux", tmp_path)
    (tmp_path / "nvidia0").rename(tmp_path / "kfd")  # that of AMD does not say how many
    require_device("cuda:7", "linux", tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_hearth_whose_recovery_code_cannot_be_shown_is_not_founded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = StatePaths(tmp_path / "state").create()
    fresh = config(tmp_path)
    with (
        pytest.raises(OSError, match="No space left"),
        Path("/dev/full").open("w") as full,
        redirect_stderr(full),
    ):
        found_first_hearth(fresh, paths)
    assert not paths.hearth.exists()
    capsys.readouterr()
    found_first_hearth(fresh, paths)
    assert "recovery code (shown once" in capsys.readouterr().err
    assert paths.hearth.exists()
