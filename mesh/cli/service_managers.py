"""What starts a person's programs as they log in, and again when they fail: systemd's user manager
on Linux, launchd on macOS.

Files as systemd.unit(5), systemd.service(5) and launchd.plist(5) describe them, of the user who
asks, never of the system; commands through `systemctl --user` and `launchctl`.
"""

from __future__ import annotations

import contextlib
import os
import plistlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mesh.errors import BadValue, ServiceRefused
from mesh.paths import home_dir
from mesh.private_files import write_private

_PATIENCE_S = 90.0
"""For one command of a manager; systemd stops what it starts again within the limit it was told."""
_POLL_S = 0.1
_APPEARS_WITHIN_S = 5.0
"""From launchd's word that it starts something until there is a process."""
_LETS_GO_WITHIN_S = 15.0
"""So long launchd may refuse to start what it has stopped and no longer shows."""


@dataclass(frozen=True, slots=True)
class Service:
    """What is to run: with these variables beside the manager's own, in a directory that may be
    gone by then; what it prints goes to the end of `log`, and it gets `stop_s` seconds to end."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    directory: Path
    log: Path
    stop_s: float


class ServiceManager(Protocol):
    """One that may hold this node's service. Every method raises ServiceRefused, with what the
    manager said."""

    name: str
    file: Path
    """What says what is to run, where the service is installed."""

    def require(self) -> None:
        """Raise when the manager does not answer this user."""

    def install(self, service: Service) -> None:
        """Write the file, for its owner alone, and start what it says, now and from now on."""

    def uninstall(self) -> None:
        """Stop it, and remove everything that `install` made."""

    def pid(self) -> int | None:
        """The process that runs as the service now."""

    def stop(self) -> None:
        """End it until it is started again, here or by the next login."""

    def restart(self) -> None:
        """End it and start it anew."""

    def starts_when(self) -> str:
        """When it is started, and what would change that."""

    def how_to_start(self) -> str:
        """The command that starts it once it was stopped."""


def service_manager() -> ServiceManager:
    """This system's. Raises BadValue for a user without a home: services are written there."""
    return LaunchAgent() if sys.platform == "darwin" else SystemdUser()


def installed_manager() -> ServiceManager | None:
    """This system's, where the service is installed with it."""
    try:
        manager = service_manager()
    except BadValue:
        return None
    return manager if manager.file.exists() else None


def manager_of(pid: int) -> ServiceManager | None:
    """The one that runs process `pid` as the service, if any does."""
    manager = installed_manager()
    try:
        return manager if manager is not None and manager.pid() == pid else None
    except ServiceRefused:  # it does not answer here, so it can be told nothing either
        return None


class SystemdUser(ServiceManager):
    """systemd's manager of this user's services."""

    name = "systemd"
    _UNIT = "hearthnet.service"

    def __init__(self) -> None:
        self.file = home_dir() / ".config/systemd/user" / self._UNIT

    def require(self) -> None:
        self._do("show-environment")

    def install(self, service: Service) -> None:
        _write(self.file, unit_of(service).encode())
        self._do("daemon-reload")
        self._do("enable", "--now", self._UNIT)

    def uninstall(self) -> None:
        if not self.file.exists():
            return
        self._do("disable", "--now", self._UNIT, patience_s=None)
        self.file.unlink(missing_ok=True)
        self._do("daemon-reload")
        with contextlib.suppress(ServiceRefused):  # it is remembered only where it had failed
            self._do("reset-failed", self._UNIT)

    def pid(self) -> int | None:
        return int(self._do("show", "--property=MainPID", "--value", self._UNIT) or 0) or None

    def stop(self) -> None:
        self._do("stop", self._UNIT, patience_s=None)

    def restart(self) -> None:
        self._do("restart", self._UNIT, patience_s=None)

    def starts_when(self) -> str:
        user = _user()
        if Path("/var/lib/systemd/linger", user).exists():
            return "with the machine"
        return f"when {user} logs in; with the machine after `loginctl enable-linger`"

    def how_to_start(self) -> str:
        return f"systemctl --user start {self._UNIT}"

    def _do(self, *arguments: str, patience_s: float | None = _PATIENCE_S) -> str:
        """`patience_s` is None where systemd itself has a limit."""
        return _told(["systemctl", "--user", *arguments], patience_s)


class LaunchAgent(ServiceManager):
    """launchd's agents of this user."""

    name = "launchd"
    _LABEL = "org.hearthnet.node"

    def __init__(self) -> None:
        self.file = home_dir() / "Library/LaunchAgents" / f"{self._LABEL}.plist"
        self._domain = f"gui/{os.getuid()}"
        self._target = f"{self._domain}/{self._LABEL}"

    def require(self) -> None:
        self._do("print", self._domain)

    def install(self, service: Service) -> None:
        _write(self.file, plist_of(self._LABEL, service))
        self._start()

    def uninstall(self) -> None:
        self.stop()
        self.file.unlink(missing_ok=True)

    def pid(self) -> int | None:
        found = re.search(r"^\s*pid = (\d+)$", self._loaded() or "", re.MULTILINE)
        return int(found[1]) if found else None

    def stop(self) -> None:
        if self._loaded() is None:
            return
        try:
            self._do("bootout", self._target)
        except ServiceRefused as refused:
            if "in progress" not in str(refused):  # launchctl waits less than launchd
                raise
        deadline_s = time.monotonic() + self._ends_within_s()
        while self._loaded() is not None:
            if time.monotonic() >= deadline_s:
                raise ServiceRefused(
                    f"launchd has not ended {self._target} yet.",
                    fix=f"Look at it again in a while: `launchctl print {self._target}`.",
                )
            time.sleep(_POLL_S)

    def restart(self) -> None:
        self.stop()
        self._start()

    def starts_when(self) -> str:
        return f"when {_user()} logs in"

    def how_to_start(self) -> str:
        return f"launchctl bootstrap {self._domain} {shlex.quote(str(self.file))}"

    def _start(self) -> None:
        deadline_s = time.monotonic() + _LETS_GO_WITHIN_S
        while True:
            try:
                self._do("bootstrap", self._domain, str(self.file))
                break
            except ServiceRefused:
                if time.monotonic() >= deadline_s:
                    raise
            time.sleep(_POLL_S)
        deadline_s = time.monotonic() + _APPEARS_WITHIN_S
        while self.pid() is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def _ends_within_s(self) -> float:
        """What launchd was told to give it, and some."""
        with contextlib.suppress(OSError, ValueError):
            return float(plistlib.loads(self.file.read_bytes())["ExitTimeOut"]) + _LETS_GO_WITHIN_S
        return _PATIENCE_S

    def _loaded(self) -> str | None:
        """What launchd says of it; None while it does not know it."""
        try:
            return self._do("print", self._target)
        except ServiceRefused:
            return None

    def _do(self, *arguments: str) -> str:
        return _told(["launchctl", *arguments], _PATIENCE_S)


def unit_of(service: Service) -> str:
    """The unit, systemd.service(5)."""
    variables = "".join(
        f"Environment={_quoted(f'{name}={value}')}\n"
        for name, value in sorted(service.environment.items())
    )
    # What a `$` begins is replaced in commands alone.
    command = " ".join(_quoted(word).replace("$", "$$") for word in service.command)
    log = _plain(str(service.log))
    # A job that takes too much memory is ended by itself, not with all the rest (OOMPolicy); who
    # does not know RestartSteps starts it again after the same five seconds each time.
    return f"""\
[Unit]
Description=hearthnet: a node of this household's mesh
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={command}
WorkingDirectory=-{_plain(str(service.directory))}
{variables}StandardOutput=append:{log}
StandardError=append:{log}
Restart=on-failure
RestartSec=5
RestartSteps=6
RestartMaxDelaySec=300
KillMode=mixed
TimeoutStopSec={service.stop_s:g}
OOMPolicy=continue
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


def plist_of(label: str, service: Service) -> bytes:
    """The agent, launchd.plist(5)."""
    # What says no type is throttled, in computing as in reading, and people wait for answers: how
    # far the node yields to other programs is its own setting.
    agent = {
        "Label": label,
        "ProgramArguments": list(service.command),
        "EnvironmentVariables": dict(service.environment),
        "WorkingDirectory": str(service.directory),
        "StandardOutPath": str(service.log),
        "StandardErrorPath": str(service.log),
        "ProcessType": "Interactive",
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": round(service.stop_s),
    }
    return plistlib.dumps(agent)


def _plain(text: str) -> str:
    """As it is, where systemd replaces what a per cent sign begins."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """One word of a unit, whatever is in it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{_plain(escaped)}"'


def _write(file: Path, content: bytes) -> None:
    """Raises ServiceRefused."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_private(file, content)
    except OSError as error:
        raise ServiceRefused(
            f"{file} cannot be written: {error.strerror}.", fix="Make its directory yours."
        ) from error


def _user() -> str:
    import getpass

    return getpass.getuser()


def _told(command: list[str], patience_s: float | None) -> str:
    """What a command printed. Raises ServiceRefused with what it said."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience_s,
            check=False,
        )
    except FileNotFoundError:
        raise ServiceRefused(
            f"There is no {command[0]} here.",
            fix="Have whatever starts programs on this machine run `hearthnet up`.",
        ) from None
    except subprocess.TimeoutExpired:
        raise ServiceRefused(
            f"`{' '.join(command)}` did not end within {patience_s:g} s.", fix="Try it by hand."
        ) from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise ServiceRefused(
            f"`{' '.join(command)}` failed: {said}",
            fix="Ask from a session of the user whose service it is: log in as that user"
            " (`su` and `sudo` open none).",
        )
    return done.stdout.strip()
