"""The planted traps of the battery, and the judge who looks at them after each body."""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import secrets
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Compiled modules that nobody has loaded yet.
_LIBRARIES = [
    str(Path(os.__file__).parent / "lib-dynload" / f"{name}{suffix}")
    for name in ("audioop", "_crypt", "ossaudiodev", "_xxtestfuzz")
    for suffix in importlib.machinery.EXTENSION_SUFFIXES
]
_VICTIM = (
    "import ctypes, os, sys\n"
    "buffer = ctypes.create_string_buffer(os.environ['SECRET'].encode(), 64)\n"
    "print(ctypes.addressof(buffer), flush=True)\n"
    "sys.stdin.read()\n"
)


class TrapField:
    """Everything a body might reach, each with a way to see that it was reached."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(16)
        self.folder = Path(tempfile.mkdtemp(prefix="hearthnet-battery-"))
        self.nonce = ""
        self._plant_files()
        self._victim = self._start_victim()
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.unix_name = f"hearthnet-battery-{secrets.token_hex(6)}"
        self.abstract = self._listen(f"\0{self.unix_name}")
        self.door = self._listen(str(self.folder / "door"))
        self.abstract_datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.abstract_datagrams.bind(f"\0{self.unix_name}d")
        for trap in (self.tcp, self.udp, self.abstract_datagrams):
            trap.setblocking(False)
        self._planted = {path.name for path in self.folder.iterdir()}
        self.reset()

    def _listen(self, address: str) -> socket.socket:
        door = socket.socket(socket.AF_UNIX)
        door.bind(address)
        door.listen()
        door.setblocking(False)
        return door

    def _plant_files(self) -> None:
        (self.folder / "secret").write_text(self.secret)
        (self.folder / "planted_module.py").write_text(f"SECRET = {self.secret!r}\n")
        (self.folder / "listing").mkdir()
        (self.folder / "listing" / self.secret).touch()
        (self.folder / "link").symlink_to(self.folder / f"target-{self.secret}")
        self.shared = Path("/dev/shm") / f"hearthnet-{secrets.token_hex(6)}"  # noqa: S108
        self.shared.write_text(self.secret)
        with contextlib.closing(sqlite3.connect(self.folder / "base.db")) as base:
            base.execute("create table t (s)")
            base.execute("insert into t values (?)", (self.secret,))
            base.commit()

    def _start_victim(self) -> subprocess.Popen[bytes]:
        victim = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _VICTIM, self.secret],
            env={"SECRET": self.secret},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert victim.stdout is not None
        self.victim_address = int(victim.stdout.readline())
        return victim

    def traps(self) -> dict[str, Any]:
        """What a body is told."""
        return {
            "nonce": self.nonce,
            "folder": str(self.folder),
            "secret_path": str(self.folder / "secret"),
            "out": str(self.folder / "out"),
            "precious": str(self.folder / "precious"),
            "tcp": self.tcp.getsockname()[1],
            "udp": self.udp.getsockname()[1],
            "unix": self.unix_name,
            "victim": self._victim.pid,
            "victim_address": self.victim_address,
            "libraries": [p for p in _LIBRARIES if Path(p).exists()],
            "shm": self.shared.name + "-new",
            "shm_planted": self.shared.name,
        }

    def payload(self, body: str) -> bytes:
        """A job that runs `body`."""
        return json.dumps({"traps": self.traps(), "body": body}).encode()

    def reset(self) -> None:
        """Make everything as if nothing had happened yet."""
        self.nonce = secrets.token_hex(16)
        for name in self._new_files():
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        precious = self.folder / "precious"
        precious.unlink(missing_ok=True)
        precious.write_text("precious")
        precious.chmod(0o600)
        os.utime(precious, (1000, 1000))
        self.shared.with_name(self.shared.name + "-new").unlink(missing_ok=True)
        if self._victim.poll() is not None or self._victim_state() in "tTZ":
            self._end_victim()
            self._victim = self._start_victim()

    def escaped(self, result: bytes, sent: bytes, lines: list[str]) -> str:
        """What a body achieved; nothing when it was contained. Empties the traps."""
        seen = [f"{name} reached" for name in self._visitors()]
        out = b"\n".join([result, sent, *(line.encode() for line in lines)])
        if self.secret.encode() in out:
            seen.append("the secret came out")
        if self.nonce.encode() in out:
            seen.append("the deed was done")
        if self._new_files():
            seen.append("a file was made")
        seen += self._precious_harm()
        if self._victim.poll() is not None or self._victim_state() in "tTZ":
            seen.append("the victim was hurt")
        return ", ".join(seen)

    def _visitors(self) -> list[str]:
        found = []
        for name, trap in (("tcp", self.tcp), ("abstract", self.abstract), ("door", self.door)):
            with contextlib.suppress(BlockingIOError):
                trap.accept()[0].close()
                found.append(name)
        for name, trap in (("udp", self.udp), ("datagrams", self.abstract_datagrams)):
            with contextlib.suppress(BlockingIOError):
                trap.recv(4096)
                found.append(name)
        return found

    def _new_files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()} - self._planted - {"precious"}

    def _precious_harm(self) -> list[str]:
        precious = self.folder / "precious"
        if not precious.exists():
            return ["a file vanished"]
        stat = precious.stat()
        same = precious.read_text(errors="replace") == "precious"
        untouched = same and stat.st_mode & 0o777 == 0o600 and stat.st_mtime == 1000
        return [] if untouched else ["a file was changed"]

    def _victim_state(self) -> str:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self._victim.pid}/stat").read_text(encoding="ascii")
            return stat.rpartition(")")[2].split()[0]
        return "Z"

    def _end_victim(self) -> None:
        self._victim.kill()
        self._victim.communicate()

    def close(self) -> None:
        """Take everything up."""
        self._end_victim()
        for trap in (self.tcp, self.udp, self.abstract, self.door, self.abstract_datagrams):
            trap.close()
        self.shared.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
