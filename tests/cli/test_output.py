"""Exit codes, stripping and the key of an open API, without a process."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mesh import errors
from mesh.cli.options import running_daemon
from mesh.cli.output import one_line, print_table, report
from mesh.cli.status import print_accounts, print_models, print_peers, print_ready
from mesh.cli.up import make_first_key
from mesh.client import locate
from mesh.config import Config
from mesh.identity.api_keys import ApiKeys, Scope
from mesh.identity.recovery import recovery_key
from mesh.paths import StatePaths
from mesh.runtime import DaemonRecord, read_daemon, sole_use
from mesh.terminal_text import printable
from tests.cli.conftest import COMMAND
from tests.discovery.test_peering import free_ports
from tests.other_users import ANNA, as_user


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.InternalError, 1),
        (errors.Busy, 1),
        (errors.BadValue, 2),
        (errors.UnknownKey, 2),
        (errors.BadRequest, 2),
        (errors.NotRunning, 3),
        (errors.ModelNotFound, 4),
        (errors.NoRoute, 5),
        (errors.CacheFull, 5),
        (errors.Unauthorized, 6),
        (errors.ExperimentalDisabled, 6),
        (errors.PairingRejected, 6),
        (errors.UntrustedPeer, 6),
        (errors.PeerRefused, 6),
        (errors.TokenRejected, 6),
    ],
)
def test_exit_codes(
    kind: type[errors.MeshError], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(kind("It broke\x1b[2J\nbadly.", fix="Mend it.")) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: It broke[2J badly. [{kind.code}]\nfix:   Mend it.\n"


def test_bugs_are_reported_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(ZeroDivisionError("oops")) == 1
    assert "oops" in (err := capsys.readouterr().err)
    assert "--debug" in err
    assert "Traceback" not in err


def test_control_characters_are_stripped() -> None:
    text = "a\x00\x07\x1b[31m\r\x7f\x9b\u202e\u2066b\tc\nd"
    assert printable(text) == "a[31mb\tc\nd"
    assert one_line(text) == "a[31mb c d"


def test_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("A", "LONG"), [("wide", 1), (None, "")])
    assert capsys.readouterr().out == "A     LONG\nwide  1\n-     -\n"


def test_a_model_that_cannot_be_asked_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"total_layers": 8, "missing": [], "context": None, "nodes": []}
    why = {"tiny": None, "slow": "loading", "far": "not held here (--model)"}
    print_models(
        [{**row, "id": name, "runnable": not said, "reason": said} for name, said in why.items()]
    )
    assert capsys.readouterr().out == (
        "MODEL  LAYERS  STATE                    CONTEXT  NODES\n"
        "tiny   8       ready                    -        -\n"
        "slow   8       loading                  -        -\n"
        "far    8       not held here (--model)  -        -\n"
    )


def test_accounts_are_told_in_plain_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    events = {"held": 2, "limit": 100_000, "together": 2, "total": None}
    stored = {"held": 916, "limit": 64 << 20, "together": 916, "total": None}
    one = {"kind": "peer", "name": "b" * 52, "node": "beta", "refused": 0}
    resources = {"events_stored": events, "event_bytes_stored": stored}
    reports = [{"where": "the daemon", "principals": [{**one, "resources": resources}]}]
    print_accounts(reports)
    assert capsys.readouterr().out == ""
    print_accounts(reports, everything=True)
    said = "2 of 100,000 events stored, under 0.01 of 64 MiB of events stored"
    assert said in capsys.readouterr().out
    resources["streams"] = {"held": 1, "limit": 8, "together": 1, "total": 8}
    print_accounts(reports)
    assert "the daemon  1 of 8 streams" in capsys.readouterr().out


def test_who_serves_a_model_that_is_ready_is_told_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    workers = [{"layers": "0-5", "holder": "a" * 52}, {"layers": "6-11", "holder": "z" * 52}]
    picture = {"node": {"id": "a" * 52, "name": "attic"}, "peers": []}
    print_ready({"model_name": "toy", "workers": workers}, picture)
    assert capsys.readouterr().out == "ready: toy 0-5 on attic\nready: toy 6-11 on zzzzzz\n"


def test_open_api_gets_one_key_that_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = StatePaths(tmp_path / "state").create()
    assert stat.S_IMODE(paths.root.stat().st_mode) == 0o700
    ports = dict(zip(("port", "api_port"), free_ports(2), strict=True))
    opened = {"state_dir": paths.root, "api_host": "0.0.0.0", **ports}  # noqa: S104 - not served
    make_first_key(Config(state_dir=paths.root), paths)
    make_first_key(Config(**opened, api_key="c" * 20), paths)
    assert not paths.api_keys.exists()
    make_first_key(Config(**opened), paths)
    shown = re.search(r"hn_\S+", capsys.readouterr().err)
    assert shown is not None
    assert stat.S_IMODE(paths.api_keys.stat().st_mode) == 0o600
    assert shown[0] not in paths.api_keys.read_text()
    first = ApiKeys.load(paths.api_keys).verify(shown[0])
    assert not first.allows(Scope.ADMIN)
    make_first_key(Config(**opened), paths)
    assert capsys.readouterr().err == ""
    assert [key.id for key in ApiKeys.load(paths.api_keys).keys] == [first.id]


def test_record_is_private_and_dies_with_its_process(tmp_path: Path) -> None:
    file = tmp_path / "daemon.json"
    assert read_daemon(file) is None
    record = DaemonRecord.for_this_process(
        api_url="http://127.0.0.1:1", api_port=1, port=2, api_key="secret"
    )
    record.write(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_daemon(file) == record
    # The same process id, started at another time: a process that came later.
    for other in (
        replace(record, create_time=record.create_time - 60),
        DaemonRecord(record.pid, psutil.Process().create_time() - 60, "http://127.0.0.1:1", 1, 2),
        replace(record, boot="another"),
    ):
        other.write(file)
        assert read_daemon(file) is None
    for text in ("", "[]", "{}", '{"pid": 1}', "\x00"):
        file.write_text(text)
        assert read_daemon(file) is None


def test_what_another_user_started_is_not_said_to_be_absent(tmp_path: Path) -> None:
    """As after `sudo hearthnet up`: to start one more here, or nothing to stop, would be wrong."""
    paths = StatePaths(tmp_path / "state").create()
    DaemonRecord.for_this_process(
        api_url="http://127.0.0.1:1", api_port=1, port=2, api_key=None
    ).write(paths.runtime_file)
    if os.geteuid() == 0:
        with as_user(ANNA) as anna:
            anna.submit(_refused, paths).result()
    else:
        paths.root.chmod(0)
        try:
            _refused(paths)
        finally:
            paths.root.chmod(0o700)


def _refused(paths: StatePaths) -> None:
    with pytest.raises(errors.FileRefused, match="not for this user"):
        locate(None, paths.root, None)
    with pytest.raises(errors.FileRefused, match="not for this user"):
        running_daemon(paths, "There is nothing to stop")
    with pytest.raises(errors.BadValue) as taken:
        paths.create()
    assert "`sudo`" in taken.value.fix


def test_a_peer_that_never_answered_is_listed_by_its_address(
    capsys: pytest.CaptureFixture[str],
) -> None:
    address = "192.0.2.7:8421"
    row = {"id": None, "name": address, "address": address, "state": "unreachable", "rtt_ms": None}
    print_peers([{**row, "shards": []}])
    assert capsys.readouterr().out.splitlines()[1].split() == [
        address, "-", "unreachable", "-", "-", address, "-",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("verdict", "state"), [("healthy", "up"), ("suspect", "suspect"), ("lost", "lost")]
)
def test_a_peer_that_is_silent_is_not_said_to_be_up(
    verdict: str, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"id": None, "name": "attic", "address": "a:1", "state": "up", "rtt_ms": None}
    print_peers([{**row, "verdict": verdict, "shards": []}])
    assert capsys.readouterr().out.splitlines()[1].split()[2] == state


def test_of_forty_nodes_the_one_that_is_lost_comes_first_and_not_all_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [f"n{number:02}" for number in range(40)]
    row = {"id": None, "address": "a:1", "rtt_ms": None, "state": "up", "shards": []}
    lost = {"n31": {"verdict": "lost"}, "n17": {"state": "unreachable"}}
    rows = [{**row, "name": name, **lost.get(name, {})} for name in reversed(names)]
    print_peers([{**row, "name": "b", "state": "other hearth"}, *rows])
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert shown == ["n17", "n31", *(name for name in names if name not in lost), "b"]
    model = {"id": "m", "total_layers": 8, "reason": None, "context": 4096, "rests_at": None}
    print_models([{**model, "nodes": names}])
    assert "n00, n01, n02, n03, n04, n05 and 34 more" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says by its clock when it booted")
def test_a_daemon_is_found_after_the_wall_clock_was_set(tmp_path: Path) -> None:
    file = tmp_path / "daemon.json"
    DaemonRecord.for_this_process(
        api_url="http://127.0.0.1:1", api_port=1, port=2, api_key=None
    ).write(file)
    # All that a step of the clock changes there: /proc says the boot an hour later.
    statistics = tmp_path / "stat"
    statistics.write_text(
        re.sub(
            r"(?m)^btime (\d+)$",
            lambda line: f"btime {int(line[1]) + 3600}",
            Path("/proc/stat").read_text(),
        )
    )
    look = (
        "import pathlib, sys; from mesh.runtime import read_daemon;"
        " print(read_daemon(pathlib.Path(sys.argv[1])) is not None)"
    )
    step = f'mount --bind "{statistics}" /proc/stat && exec "$@"'
    command = ["unshare", "--mount", "--map-root-user", "--user", "bash", "-c", step, "bash"]
    probe = subprocess.run([*command, "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no mounts here: {probe.stderr.decode().strip()}")
    said = subprocess.check_output([*command, sys.executable, "-c", look, str(file)], text=True)
    assert said.strip() == "True"


def _sleeper(code: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import signal, time; {code}; print(1, flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.parametrize(
    ("code", "timeout", "ended_by"),
    [("pass", "20", signal.SIGTERM), ("signal.signal(15, signal.SIG_IGN)", "0.2", signal.SIGKILL)],
)
def test_down_stops_the_daemon(
    tmp_path: Path, environment: dict[str, str], code: str, timeout: str, ended_by: int
) -> None:
    with _sleeper(code) as process:
        started = psutil.Process(process.pid).create_time()
        record = DaemonRecord(process.pid, started, "http://127.0.0.1:1", 1, 2)
        record.write(tmp_path / "daemon.json")
        command = [*COMMAND, "down", "--state-dir", str(tmp_path), "--timeout", timeout]
        # Nobody reaps the child before `down` has seen it go.
        finished = subprocess.run(command, env=environment, capture_output=True, check=False)
        assert process.wait(20) == -ended_by
    assert finished.returncode == 0, finished.stderr
    assert (b"killing it" in finished.stderr) == (ended_by == signal.SIGKILL)


@pytest.mark.parametrize(
    "command", [["up"], ["up", "--detach"], ["join", "abc", "--peer", "127.0.0.1:1"]]
)
def test_a_state_directory_in_use_is_left_alone(
    tmp_path: Path, environment: dict[str, str], command: list[str]
) -> None:
    paths = StatePaths(tmp_path / "state").create()
    with sole_use(paths):  # as by a daemon that has not come as far as its record
        finished = subprocess.run(
            [*COMMAND, *command, "--state-dir", str(paths.root)],
            env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert finished.returncode == 1
    assert "just starting, joining or stopping" in finished.stderr
    assert "already_running" in finished.stderr
    assert not paths.identity_key.exists()


@pytest.mark.parametrize(
    "command", [["up"], ["up", "--detach"], ["join", "amber-river-42", "--peer", "127.0.0.1:1"]]
)
def test_a_state_directory_that_cannot_be_one_is_refused(
    tmp_path: Path, environment: dict[str, str], command: list[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    for place, why in (("file", "File exists"), ("file/below", "Not a directory")):
        finished = subprocess.run(
            [*COMMAND, *command, "--state-dir", str(tmp_path / place)],
            env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert finished.returncode == 2
        assert why in finished.stderr
        assert "[bad_value]" in finished.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_the_lock_ends_with_its_block_and_with_its_process(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path / "state").create()
    code = (
        "from pathlib import Path; from mesh.paths import StatePaths\n"
        "from mesh.runtime import sole_use\n"
        f"with sole_use(StatePaths(Path({str(paths.root)!r}))):\n"
        "    print(1, flush=True); input()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(errors.AlreadyRunning), sole_use(paths):
            pass
        holder.kill()
        holder.wait(20)
        with sole_use(paths):
            pass
        with sole_use(paths), pytest.raises(errors.AlreadyRunning), sole_use(paths):
            pass


@pytest.mark.slow
def test_a_detached_daemon_that_takes_its_time_is_waited_for(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    impatient = "from mesh.cli import detached, main; detached._PATIENCE_S = 0.0; main.main()"
    state = ["--state-dir", str(tmp_path / "state")]
    (tmp_path / "state").mkdir()
    stale, fresh = (tmp_path / "state" / f"api-keys.json.{n}" for n in ("0badcafe", "1badcafe"))
    for draft in (stale, fresh):
        draft.write_text("of a writer that was killed")
    os.utime(stale, (0, 0))
    (here := tmp_path / "here").mkdir()
    for name in ("mesh.py", "random.py"):
        (here / name).write_text("raise RuntimeError('a file of somebody else')")
    free = ["--port", "0", "--api-port", "0", "--interface", "127.0.0.1", "--layers", "none"]
    try:
        finished = subprocess.run(
            [sys.executable, "-P", "-c", impatient, "up", "--detach", *free, *state],
            env=environment, capture_output=True, text=True, timeout=60, check=False, cwd=here,
        )  # fmt: skip
        assert finished.returncode == 0
        founded, up, holding = finished.stdout.splitlines()[:3]
        assert founded.startswith("founded ")
        assert up.startswith("hearthnet is up")
        assert holding.startswith("it serves no layers (--layers none)")
        assert finished.stderr.count("still starting") == 1
        assert (stale.exists(), fresh.exists()) == (False, True)
        # The recovery code is on the screen and nowhere else.
        (code,) = re.findall(r"recovery code .*: ((?:[0-9A-Z]{4}-){6}[0-9A-Z]{4})", finished.stderr)
        files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if code.encode() in path.read_bytes()]
        assert recovery_key(code)
        again = subprocess.run(
            [*COMMAND, "up", "--detach", *free, *state],
            env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (again.returncode, len(again.stderr.splitlines())) == (1, 2)
        assert "[already_running]" in again.stderr
        log = StatePaths(tmp_path / "state").daemon_log.read_text()
        assert "already" not in log, "another one was started"
        asked = [*COMMAND, "run", "builtin", "hello", "--max-tokens", "1", *state]
        assert subprocess.run(asked, env=environment, timeout=60, check=False).returncode == 0
        shutil.rmtree(here)
        anew = subprocess.run(
            [*COMMAND, "restart", *state], env=environment, timeout=60, check=False
        )
        assert anew.returncode == 0, "from where it was started is gone"
    finally:
        down = [*COMMAND, "down", *state]
        assert subprocess.run(down, env=environment, timeout=60, check=False).returncode == 0


def test_detached_daemon_that_fails_says_why(tmp_path: Path, environment: dict[str, str]) -> None:
    state = tmp_path / "state"
    founds_nothing = {"HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__ENABLED": "false"}
    finished = subprocess.run(
        [*COMMAND, "up", "--detach", "--state-dir", str(state), "--model", "/nonexistent"],
        env=environment | founds_nothing,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode not in {0, 3}
    assert "error: " in finished.stderr
    assert "/nonexistent" in finished.stderr
    assert not (state / "daemon.json").exists()
    assert os.listdir(state / "logs") == ["daemon.log"]  # noqa: PTH208 - names only


def test_in_windows_the_command_says_where_it_runs_before_it_imports_what_is_not_there() -> None:
    script = "import sys; sys.platform, sys.modules['fcntl'] = 'win32', None"
    run = [sys.executable, "-c", f"{script}; from mesh.cli.entry import main; main()"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.returncode, "WSL 2" in done.stderr) == (1, True)
