"""A daemon of its own on this machine, for the demo, the benchmarks and the end-to-end tests.

Started through the same command that people use, with its own state directory, on free ports of
the loopback interface. It never outlives the ``with`` block that started it, nor, for more than a
few seconds, the process: see `mesh.cli.tethered`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from mesh.cli.join import join_alone
from mesh.client import pinned, trusting_nobody
from mesh.config import CONFIG_VARIABLE, ENV_PREFIX, Config
from mesh.errors import InternalError, NotRunning
from mesh.paths import StatePaths
from mesh.processes.python import running
from mesh.runtime import DaemonRecord, read_daemon

START_LIMIT_S = 120.0
STOP_LIMIT_S = 15.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Pairing:
    """The code and level by which a node joined."""

    code: str
    level: str


@dataclass
class LocalNode:
    """One daemon process. `flags` go to ``hearthnet up`` as they are.

    Settings come from these and from `environment` alone, not from whoever starts it.
    """

    name: str
    state_dir: Path
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    _record: DaemonRecord | None = None
    _tether: int | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process; `wait_up` and `wait_ready` tell when it answers."""
        paths = StatePaths(self.state_dir).create()
        arguments = [
            "--name", self.name, "--state-dir", str(self.state_dir), "--port", "0",
            "--api-port", "0", "--interface", "127.0.0.1", *self.flags,
        ]  # fmt: skip
        (own_config := paths.root / "config.toml").touch()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
        its_end, self._tether = os.pipe()
        try:
            with paths.daemon_log.open("ab") as log:
                self.process = self.launch(
                    running("mesh.cli.tethered", "up", *arguments),
                    {**inherited, CONFIG_VARIABLE: str(own_config), **self.environment},
                    its_end,
                    log.fileno(),
                )
        finally:
            os.close(its_end)

    def launch(
        self, command: list[str], environment: dict[str, str], tether: int, log: int
    ) -> subprocess.Popen[bytes]:
        """Start `command` in a session of its own, with these descriptors as input and outputs."""
        return subprocess.Popen(
            command, env=environment, stdin=tether, stdout=log, stderr=log, start_new_session=True
        )

    def join(self, anchor: LocalNode, level: str = "trusted") -> Pairing:
        """Pair with a running anchor's hearth, for a daemon that is not started yet."""
        response = anchor.post("/mesh/v1/hearth/invite", {"level": level})
        response.raise_for_status()
        window = response.json()
        config = Config(state_dir=self.state_dir, name=self.name)
        place = f"{window['host']}:{window['port']}"
        join_alone(config, window["code"], place)
        return Pairing(window["code"], window["level"])

    def stop(self) -> None:
        """Ask it to end, then make it end."""
        process, self.process = self.process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_LIMIT_S)
        self._untie()

    def kill(self) -> None:
        """What pulling the plug does: SIGKILL, no goodbye."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(STOP_LIMIT_S)
            self.process = None
        self._untie()

    def freeze(self) -> None:
        """SIGSTOP to the daemon and everything it started: nothing answers, nothing closes."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """The opposite of `freeze`."""
        self._signal_all(signal.SIGCONT)

    @property
    def record(self) -> DaemonRecord:
        """Where it answers. Raises NotRunning before `wait_up`."""
        if self._record is None:
            raise NotRunning(f"{self.name} has not started.", fix="Wait for it.")
        return self._record

    @property
    def url(self) -> str:
        """The HTTP API's base URL."""
        return self.record.api_url

    @property
    def log(self) -> str:
        """Everything it printed."""
        return StatePaths(self.state_dir).daemon_log.read_text(errors="replace")

    def wait_up(self, limit_s: float = START_LIMIT_S) -> DaemonRecord:
        """Until its API answers. Raises InternalError with its last words when it ends instead."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            record = read_daemon(StatePaths(self.state_dir).runtime_file)
            if record is not None:
                self._record = record
                return record
            if self.process is None or self.process.poll() is not None:
                break
            time.sleep(_POLL_S)
        raise InternalError(f"{self.name} did not start:\n{self.log[-2000:]}", fix="Read its log.")

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Until ``/readyz`` says yes. Raises InternalError with what is missing."""
        self.wait_up(limit_s)
        deadline = time.monotonic() + limit_s
        missing: Any = "nothing answered"
        while time.monotonic() < deadline:
            response = self._ask("GET", "/readyz", timeout=10.0)
            if response.status_code == 200:
                return
            missing = response.json().get("missing")
            time.sleep(_POLL_S)
        raise InternalError(f"{self.name} is not ready: {missing}.", fix="Read its log.")

    def get(self, path: str) -> Any:
        """JSON from its API, asked as its owner."""
        response = self._ask("GET", path, timeout=30.0)
        response.raise_for_status()
        return response.json()

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """POST JSON to its API, as its owner."""
        return self._ask("POST", path, timeout=120.0, json=body)

    def _ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        """A request to its API by its owner, who knows its certificate."""
        headers = {"Authorization": f"Bearer {self.record.api_key}"}
        certificate = self.record.certificate
        more["verify"] = trusting_nobody() if certificate is None else pinned(certificate)
        return httpx.request(method, f"{self.url}{path}", headers=headers, trust_env=False, **more)

    def _untie(self) -> None:
        tether, self._tether = self._tether, None
        if tether is not None:
            os.close(tether)

    def _signal_all(self, number: signal.Signals) -> None:
        import psutil

        if self.process is None:
            return
        daemon = psutil.Process(self.process.pid)
        for process in [daemon, *daemon.children(recursive=True)]:
            # A daemon that thaws ends a child that was silent before this comes to the child.
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def start_hearth(nodes: Sequence[LocalNode], stack: ExitStack) -> None:
    """Start nodes in one hearth: the first founds it, the others join and then start."""
    first, *others = nodes
    stack.enter_context(first).wait_up()
    for node in others:
        node.join(first)
        stack.enter_context(node)
