"""`hearthnet service`, with systemd's real manager of a user, in a namespace made for it."""

from __future__ import annotations

import os
import plistlib
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from mesh.cli.service_managers import LaunchAgent, Service
from mesh.paths import StatePaths
from mesh.runtime import read_daemon
from tests.cli.conftest import COMMAND
from tests.waiting import wait_until

SYSTEMD = "/lib/systemd/systemd"
NAMESPACE = f"""\
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system || exit 9
umount -R /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup || exit 9
mkdir -p /sys/fs/cgroup/hearthnet-test && echo $$ > /sys/fs/cgroup/hearthnet-test/cgroup.procs
exec {SYSTEMD} --user
"""
"""systemd's manager of a user wants a machine that systemd has started, and groups to count in."""

LAUNCHCTL = """\
#!/bin/sh
# As launchctl(1): what is bootstrapped runs until it is booted out, which is under way when it is
# said; then it is not shown any more, and still in the way for a while.
state={directory}/loaded
settling={directory}/settling
case $1 in
bootstrap)
    if [ -f $state ] || [ -f $settling ]; then
        echo "Bootstrap failed: 5: Input/output error" >&2; exit 5
    fi
    sleep 60 < /dev/null > /dev/null 2>&1 &
    echo $! > $state ;;
bootout)
    kill $(cat $state)
    touch $settling
    (sleep 0.2; rm $state; sleep 0.2; rm $settling) < /dev/null > /dev/null 2>&1 &
    echo "Boot-out failed: 36: Operation now in progress" >&2; exit 36 ;;
print)
    case $2 in gui/*/*) [ -f $state ] || {{ echo "Could not find service" >&2; exit 113; }} ;; esac
    echo "	state = running"; [ -f $state ] && echo "	pid = $(cat $state)"; true ;;
esac
"""


@dataclass(frozen=True)
class Account:
    """A user with a manager of services."""

    environment: dict[str, str]
    home: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )

    def hearthnet(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(*COMMAND, *arguments)

    def state_of(self, unit: str) -> str:
        return self.run("systemctl", "--user", "show", "-P", "ActiveState", unit).stdout.strip()


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    home = tmp_path_factory.mktemp("u")
    runtime = home / "run"
    runtime.mkdir(mode=0o700)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HEARTHNET_", "XDG_"))}
    environment = kept | {"HOME": str(home), "XDG_RUNTIME_DIR": str(runtime), "TERM": "dumb"}
    unshare = shutil.which("unshare")
    if not Path(SYSTEMD).exists() or unshare is None:
        pytest.skip("systemd is not installed here")
    manager = subprocess.Popen(
        [unshare, "--mount", "sh", "-c", NAMESPACE], env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    there = Account(environment, home)
    try:
        wait_until(
            lambda: (
                manager.poll() is not None
                or there.run("systemctl", "--user", "show-environment").returncode == 0
            )
        )
        if manager.poll() is not None:
            assert manager.stderr is not None
            pytest.skip(f"no user manager of systemd can run here: {manager.stderr.read()}")
        yield there
    finally:
        manager.terminate()
        manager.communicate(timeout=30)


@pytest.mark.slow
def test_a_node_runs_from_now_on_until_it_is_told_not_to(account: Account) -> None:
    state = account.home / 'of $HOME 100%h "it\'s"'
    paths, unit = StatePaths(state), account.home / ".config/systemd/user/hearthnet.service"
    account.environment["HEARTHNET_ROUTING__KEEP_FIRST"] = "2"
    account.environment["HEARTHNET_HOST"] = "http://127.0.0.1:1"  # of client verbs alone
    flags = (
        "--state-dir", str(state), "--name", "cellar", "--layers", "none", "--port", "0",
        "--api-port", "0", "--interface", "127.0.0.1",
    )  # fmt: skip
    assert "not installed" in account.hearthnet("service", "status").stdout

    installed = account.hearthnet("service", "install", *flags)
    assert installed.returncode == 0, installed.stderr
    assert "recovery code" in installed.stderr
    assert "kept of this shell: HEARTHNET_ROUTING__KEEP_FIRST" in installed.stdout
    assert stat.S_IMODE(unit.stat().st_mode) == 0o600
    first = read_daemon(paths.runtime_file)
    assert first is not None
    assert f"pid {first.pid}" in installed.stdout
    bearer = {"Authorization": f"Bearer {first.api_key}"}
    asked = httpx.get(
        f"{first.api_url}/mesh/v1/privacy", headers=bearer, trust_env=False, timeout=30
    )
    kept = asked.json()["precautions"]
    assert kept["keep_first"] == 2
    said = account.hearthnet("service", "status").stdout
    assert f"running: process {first.pid}" in said
    again = account.hearthnet("service", "install", *flags)
    assert "[already_running]" in again.stderr
    assert "recovery code" not in paths.daemon_log.read_text()

    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: read_daemon(paths.runtime_file) not in {None, first})
    second = read_daemon(paths.runtime_file)
    assert second is not None
    restarted = account.hearthnet("restart", "--state-dir", str(state))
    assert restarted.returncode == 0, restarted.stderr
    third = read_daemon(paths.runtime_file)
    assert third is not None
    assert len({first.pid, second.pid, third.pid}) == 3
    assert f"pid {third.pid}" in account.hearthnet("logs", "--state-dir", str(state)).stdout

    # Killed, because it gets no time to end; it is not started again.
    down = account.hearthnet("down", "--timeout", "0", "--state-dir", str(state))
    assert down.returncode == 0, down.stderr
    assert "systemctl --user start" in down.stderr
    assert account.state_of("hearthnet.service") in {"inactive", "failed"}
    assert "not running" in account.hearthnet("service", "status").stdout
    del account.environment["HEARTHNET_HOST"]
    instead = account.hearthnet("run", "-y", "builtin", "hello")
    assert instead.returncode == 3
    assert "`systemctl --user start hearthnet.service` starts it" in instead.stderr
    assert account.hearthnet("service", "uninstall").returncode == 0
    assert not [path for path in unit.parent.rglob("*") if "hearthnet" in path.name]
    assert "[not_found]" in account.hearthnet("service", "uninstall").stderr

    # It is in a hearth by now, so that the daemon itself finds its port taken.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        failed = account.hearthnet("service", "install", *flags, "--api-port", port)
    assert failed.returncode == 1
    assert "[port_in_use]" in failed.stderr
    assert "nothing was installed" in failed.stderr
    assert not unit.exists()


def test_without_a_manager_nothing_is_made(tmp_path: Path) -> None:
    environment = os.environ | {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "none")}
    state = tmp_path / "state"
    refused = Account(environment, tmp_path).hearthnet(
        "service", "install", "--state-dir", str(state), "--layers", "none"
    )
    assert refused.returncode == 1
    assert "[service_refused]" in refused.stderr
    assert not StatePaths(state).hearth.exists()
    assert not (tmp_path / ".config").exists()


def test_an_agent_of_launchd_is_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launchctl = tmp_path / "launchctl"
    launchctl.write_text(LAUNCHCTL.format(directory=tmp_path))
    launchctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    log = tmp_path / "a log"
    service = Service(("python", "up", "a b"), {"A": "b c"}, tmp_path, log, stop_s=90)
    agent = LaunchAgent()
    agent.require()
    assert agent.pid() is None
    agent.install(service)
    try:
        pid = agent.pid()
        assert pid is not None
        written = plistlib.loads(agent.file.read_bytes())
        assert written["ProgramArguments"] == ["python", "up", "a b"]
        assert written["EnvironmentVariables"] == {"A": "b c"}
        assert written["KeepAlive"] == {"SuccessfulExit": False}
        assert written["ProcessType"] == "Interactive"
        assert written["StandardErrorPath"] == str(log)
        agent.restart()
        assert agent.pid() not in {None, pid}
    finally:
        agent.uninstall()
    assert agent.pid() is None
    assert not agent.file.exists()
