"""How strong the jail is on this machine: every wall attacked once, judged by planted traps.

A canary that does not run counts as a wall that does not stand. Knows how to plant and to judge;
what the canaries do is theirs, and who may run code at which level is `job`'s.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from mesh.interventions.jail import kernel
from mesh.interventions.jail.canaries import STARTED, Traps, canaries_of
from mesh.interventions.jail.limits import Ending, JobLimits, JobOutcome

logger = logging.getLogger(__name__)

ENTRY = "mesh.interventions.jail.canaries:attempt"
_MEMORY_BYTES = 256 << 20
_OPEN_FILES = 32
_KILL_WALL_S = 0.3
_LATE_S = 1.0
_PATIENCE = (1, 4)
"""Times these limits that a canary gets at each try: on a loaded machine, slow is not open."""

_LIMITS = JobLimits(
    wall_s=5.0, cpu_s=5, memory_bytes=_MEMORY_BYTES, result_bytes=1 << 20, open_files=_OPEN_FILES
)

# Runs one job: payload and limits in; how it ended and what it sent on its channel out.
RunCanary = Callable[[bytes, JobLimits], Coroutine[Any, Any, tuple[JobOutcome, bytes]]]


class JailStrength(StrEnum):
    """`OS`: every wall held. `WEAK`: a process of its own that ends on time. `NONE`: not even."""

    OS = "os"
    WEAK = "weak"
    NONE = "none"


@dataclass(frozen=True)
class JailReport:
    """What an examination found. `broken` maps a canary's name to what got through."""

    level: JailStrength
    held: tuple[str, ...]
    broken: dict[str, str]
    namespaces: bool
    landlock_abi: int
    filtered_calls: bool

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return dataclasses.asdict(self)

    def to_text(self) -> str:
        """For people: one line per wall, what does not hold first."""
        meaning = {
            JailStrength.OS: "every member's code may run",
            JailStrength.WEAK: "only code of trusted keys may run",
            JailStrength.NONE: "no code may run",
        }[self.level]
        lines = [f"jail: {self.level.value} ({meaning})"]
        lines += [f"  OPEN  {name}: {what.strip()}" for name, what in self.broken.items()]
        lines += [f"  holds {name}" for name in self.held]
        if sys.platform != "linux":
            return "\n".join([*lines, "  The walls are Linux's: this system has none of them"])
        abi = f"version {self.landlock_abi}" if self.landlock_abi else "missing"
        filtered = "on" if self.filtered_calls else f"no table for {platform.machine()}"
        own = "own" if self.namespaces else "shared with the system (not required)"
        lines.append(f"  Landlock {abi}; system call filter {filtered}; namespaces {own}")
        return "\n".join(lines)


async def examine(run_canary: RunCanary, *, namespaces: bool) -> JailReport:
    """Let every canary fly once, a few at a time, and report."""
    broken: dict[str, str] = {}
    async with _planted() as field:

        async def fly(name: str) -> None:
            found = await field.judge(name, run_canary)
            if found:
                broken[name] = found

        gate = asyncio.Semaphore(2)

        async def in_turn(name: str) -> None:
            async with gate:
                await fly(name)

        # The one that attacks the victim goes last: the others need it alive.
        await asyncio.gather(*(in_turn(name) for name in canaries_of() if name != "signal"))
        await fly("signal")
    level = JailStrength.OS if not broken else JailStrength.WEAK
    if {"control", "never_ends"} & broken.keys():
        level = JailStrength.NONE
    for name, what in broken.items():
        logger.warning("jail wall=%s does not hold: %s", name, what)
    here = kernel.machine()
    return JailReport(
        level=level,
        held=tuple(name for name in canaries_of() if name not in broken),
        broken=broken,
        namespaces=namespaces,
        landlock_abi=kernel.landlock_abi(here) if here else 0,
        filtered_calls=here is not None,
    )


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2][-200:]


class _Field:
    """The planted traps, and the judge."""

    def __init__(self, folder: Path, victim: subprocess.Popen[bytes], secret: str) -> None:
        self._folder = folder
        self._victim = victim
        self._secret = secret.encode()
        self._unix_name = f"hearthnet-canary-{secrets.token_hex(8)}"
        self._tcp = socket.create_server(("127.0.0.1", 0))
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("127.0.0.1", 0))
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        abstract = sys.platform == "linux"
        self._unix.bind(f"\0{self._unix_name}" if abstract else str(folder / "trap"))
        self._unix.listen()
        for trap in (self._tcp, self._udp, self._unix):
            trap.setblocking(False)

    def close(self) -> None:
        """Take everything up again."""
        for trap in (self._tcp, self._udp, self._unix):
            trap.close()

    async def judge(self, name: str, run_canary: RunCanary) -> str:
        """Run one canary, with more time where it had too little; what got through, or nothing."""
        found = ""
        for patience in _PATIENCE:
            found, was_slow = await self._try(name, run_canary, patience)
            if not was_slow:
                break
        return found

    async def _try(self, name: str, run_canary: RunCanary, patience: int) -> tuple[str, bool]:
        """What got through, and whether that may only mean that the machine was slow."""
        traps = self._traps(name)
        payload = json.dumps(dataclasses.asdict(traps)).encode()
        endless = name == "never_ends"
        wall_s = patience * (_KILL_WALL_S if endless else _LIMITS.wall_s)
        begun_s = time.monotonic()
        outcome, sent = await run_canary(payload, dataclasses.replace(_LIMITS, wall_s=wall_s))
        took_s = time.monotonic() - begun_s
        ended = outcome.ending is Ending.WALL_LIMIT
        if not sent.startswith(STARTED):
            return f"the canary did not run ({outcome.ending}: {_last_line(outcome.text)})", ended
        if endless:
            late = took_s > wall_s + patience * _LATE_S
            return "not ended on time" if late or not ended else "", late
        if name == "control":
            honest = outcome.result == traps.nonce[::-1].encode()
            return "" if honest else f"an honest job fails: {_last_line(outcome.text)}", ended
        found = await asyncio.to_thread(self._evidence, traps, outcome.result, sent)
        if ended and not found:
            return "the canary was too slow to tell", True
        return found, False

    def _traps(self, name: str) -> Traps:
        return Traps(
            name=name,
            nonce=secrets.token_hex(16),
            secret_path=str(self._folder / "secret"),
            write_path=str(self._folder / f"written-{name}"),
            tcp_port=self._tcp.getsockname()[1],
            udp_port=self._udp.getsockname()[1],
            unix_name=self._unix_name,
            victim_pid=self._victim.pid,
            memory_bytes=_MEMORY_BYTES,
            open_files=_OPEN_FILES,
        )

    def _evidence(self, traps: Traps, result: bytes, sent: bytes) -> str:
        ended = self._victim_ended(patience_s=0.2 if traps.name == "signal" else 0.0)
        found = {
            "wrote a file": Path(traps.write_path).exists(),
            "read a planted secret": self._secret in result or self._secret in sent,
            "another process or thread answered": traps.nonce.encode() in sent[len(STARTED) :],
            "ended a foreign process": ended,
        }
        reached = self._visitor() or next((what for what, so in found.items() if so), "")
        return reached or result.decode("utf-8", "replace")[:200]

    def _visitor(self) -> str:
        for trap, what in ((self._tcp, "TCP"), (self._unix, "a unix socket")):
            try:
                trap.accept()[0].close()
            except BlockingIOError:
                continue
            return f"connected by {what}"
        try:
            return f"sent a datagram of {len(self._udp.recv(1024))} bytes"
        except BlockingIOError:
            return ""

    def _victim_ended(self, patience_s: float) -> bool:
        try:
            self._victim.wait(patience_s)
        except subprocess.TimeoutExpired:
            return False
        return True


@asynccontextmanager
async def _planted() -> AsyncIterator[_Field]:
    secret = secrets.token_hex(16)

    def plant() -> tuple[Path, subprocess.Popen[bytes], _Field]:
        folder = Path(tempfile.mkdtemp(prefix="hearthnet-canary-"))
        (folder / "secret").write_text(secret, encoding="ascii")
        victim = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"],
            env={"SECRET": secret},
            stdin=subprocess.PIPE,
        )
        return folder, victim, _Field(folder, victim, secret)

    def clear(folder: Path, victim: subprocess.Popen[bytes], field: _Field) -> None:
        field.close()
        victim.kill()
        victim.communicate()
        shutil.rmtree(folder, ignore_errors=True)

    planted = await asyncio.to_thread(plant)
    try:
        yield planted[2]
    finally:
        await asyncio.to_thread(clear, *planted)
