"""Network namespaces with a cable to this one: real interfaces that can be unplugged.

Needs root. The addresses are of TEST-NET-1 and exist on these cables only; everything is removed by
name in the end, also what an earlier run left behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Self

IP = shutil.which("ip") or "ip"
PREFIX = "hnchaos"


def why_not() -> str:
    """Why no namespace can be made here; empty when it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"{PREFIX}-probe"
    made = ip("netns", "add", name, check=False)
    if made.returncode != 0:
        return f"`ip netns add` fails here: {made.stderr.strip()}"
    cable = ip("link", "add", f"{PREFIX}p0", "type", "veth", "peer", f"{PREFIX}p1", check=False)
    ip("link", "del", f"{PREFIX}p0", check=False)
    ip("netns", "del", name, check=False)
    return "" if cable.returncode == 0 else f"no veth here: {cable.stderr.strip()}"


class Namespace:
    """One namespace and its cable; processes started `inside` see nothing else."""

    def __init__(self, number: int) -> None:
        self.name = f"{PREFIX}-{number}"
        self.here = f"192.0.2.{4 * number + 1}"
        self.there = f"192.0.2.{4 * number + 2}"
        self._cable = f"{PREFIX}{number}a"
        self._far = f"{PREFIX}{number}b"

    def __enter__(self) -> Self:
        self._remove()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def unplug(self) -> None:
        """The cable is out: nothing arrives, and nobody is told."""
        # Only the far end: this side would notice at once that it has no route any more.
        self._ip("link", "set", self._far, "down")

    def plug(self) -> None:
        """The cable is in again."""
        self._ip("link", "set", self._far, "up")

    def inside(self, *command: str) -> tuple[str, ...]:
        """What runs `command` in here."""
        return (IP, "netns", "exec", self.name, *command)

    def _make(self) -> None:
        ip("netns", "add", self.name)
        ip("link", "add", self._cable, "type", "veth", "peer", "name", self._far)
        ip("link", "set", self._far, "netns", self.name)
        ip("addr", "add", f"{self.here}/30", "dev", self._cable)
        ip("link", "set", self._cable, "up")
        self._ip("addr", "add", f"{self.there}/30", "dev", self._far)
        self._ip("link", "set", self._far, "up")
        self._ip("link", "set", "lo", "up")

    def _remove(self) -> None:
        ip("link", "del", self._cable, check=False)
        ip("netns", "del", self.name, check=False)

    def _ip(self, *arguments: str) -> None:
        ip("-n", self.name, *arguments)


def ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """``ip`` with these arguments; AssertionError with what it said when it fails."""
    return _run(IP, *arguments, check=check)


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=20)
    if check and done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done
