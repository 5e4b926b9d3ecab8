"""A server that speaks the hub's protocol, as far as a repository of files goes, and misbehaves.

``/api/models/ORG/NAME/revision/REV?blobs=true`` and ``/ORG/NAME/resolve/COMMIT/FILE`` with ranges,
redirected once as the real one does to where the bytes lie.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

WEIGHTS = (".safetensors", ".gguf")
SLOW_STEP_S = 0.05
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class Mischief:
    """What goes wrong; each count is one less each time.

    What files meet with, those meet with whose names end so (`suffix`); with '' the listing, too.
    """

    token: str = ""
    """Who does not show it is refused."""
    suffix: str = ""
    throttled: int = 0
    """Answers that are 429, with this header, once so many bytes of the file were given."""
    retry_after: str = "1"
    throttled_after_bytes: int = 0
    cut: int = 0
    """Answers that end after half of their bytes."""
    cut_listings: int = 0
    """Listings that end after half of their bytes."""
    wrong: int = 0
    """Answers of weights whose last byte is another one."""
    bytes_per_s: float = 0.0
    """No answer is given faster; 0: as fast as it goes."""
    knows_ranges: bool = True
    portal: int = 0
    """The status of every answer, as of a network that wants a login first: a page, or the way to
    this same address."""
    gated: bool = False

    def throttles(self, name: str, given: int) -> bool:
        """Whether this request for a file is one to be made later."""
        if not self.throttled or not name.endswith(self.suffix):
            return False
        if given < self.throttled_after_bytes:
            return False
        self.throttled -= 1
        return True

    def cuts(self, name: str) -> bool:
        """Whether this answer ends early."""
        if not self.cut or not name.endswith(self.suffix):
            return False
        self.cut -= 1
        return True


@dataclass(frozen=True)
class Given:
    """An answer about a file: when it began, as `time.monotonic` has it, and what was asked."""

    at: float
    name: str
    status: int
    start: int
    stop: int


@dataclass
class HubStandin:
    """One repository, ``org/toy``, in a directory; `with` runs the server."""

    directory: Path
    mischief: Mischief = field(default_factory=Mischief)
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes given of each file."""
    asked: Counter[str] = field(default_factory=Counter)
    """Requests by kind: ``api``, ``resolve``, ``bytes``."""
    given: list[Given] = field(default_factory=list)
    """Every answer of bytes, or that there are none now."""
    host: str = "127.0.0.1"
    mirror: str = ""
    """Another repository with the same files."""
    before: str = ""
    """What ``org/toy`` was called before it got another name: its listing is sent on."""

    def __enter__(self) -> Self:
        standin = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                standin.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((self.host, 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    @property
    def url(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://{self.host}:{self._server.server_address[1]}"

    @property
    def commit(self) -> str:
        """Another one whenever a file is."""
        files = [(self._name(each), each.stat()) for each in self._files]
        said = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
        return hashlib.sha1(repr(said).encode()).hexdigest()  # noqa: S324 - as long as git's

    @property
    def _files(self) -> list[Path]:
        return sorted(each for each in self.directory.rglob("*") if each.is_file())

    def _name(self, file: Path) -> str:
        return file.relative_to(self.directory).as_posix()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """One request, as the hub would or as its mischief has it."""
        path = unquote(urlsplit(request.path).path)
        mischief = self.mischief
        name = path.rpartition("/")[2]
        if mischief.portal:
            _plain(request, mischief.portal, b"<html>", {"Location": request.path})
        elif mischief.throttles(name, self.sent[name]):
            self.given.append(Given(time.monotonic(), name, 429, 0, 0))
            _plain(request, 429, b"slow down", {"Retry-After": mischief.retry_after})
        elif mischief.token and request.headers.get("Authorization") != f"Bearer {mischief.token}":
            if path.startswith("/bytes/"):
                self._give(request, path.removeprefix("/bytes/"))  # signed by its address
            else:
                headers = {"X-Error-Code": "GatedRepo"} if mischief.gated else {}
                _plain(request, 401, b"who are you", headers)
        elif self.before and path.startswith(f"/api/models/{self.before}/"):
            _plain(request, 307, b"", {"Location": request.path.replace(self.before, "org/toy")})
        elif repository := self._meant(path, "/api/models/{}/revision/"):
            self.asked["api"] += 1
            listing = json.dumps(self._listing(repository)).encode()
            is_cut = mischief.cut_listings > 0
            mischief.cut_listings -= is_cut
            _plain(request, 200, listing, is_cut=is_cut)
        elif self._meant(path, f"/{{}}/resolve/{self.commit}/"):
            self.asked["resolve"] += 1
            file = path.partition(f"/resolve/{self.commit}/")[2]
            _plain(request, 302, b"", {"Location": f"{self.url}/bytes/{file}"})
        elif path.startswith("/bytes/"):
            self._give(request, path.removeprefix("/bytes/"))
        else:
            _plain(request, 404, b"no such thing", {"X-Error-Code": "RepoNotFound"})

    def _meant(self, path: str, beginning: str) -> str:
        """The repository in a path that begins so; '' for others."""
        names = filter(None, ("org/toy", self.mirror))
        return next((name for name in names if path.startswith(beginning.format(name))), "")

    def _listing(self, repository: str) -> dict[str, Any]:
        siblings = []
        for file in self._files:
            content = file.read_bytes()
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324 - git's
            entry: dict[str, Any] = {
                "rfilename": self._name(file), "size": len(content), "blobId": blob,
            }  # fmt: skip
            if file.name.endswith(tuple(WEIGHTS)):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 135}
            siblings.append(entry)
        return {"id": repository, "sha": self.commit, "siblings": siblings, "private": False}

    def _give(self, request: BaseHTTPRequestHandler, name: str) -> None:
        self.asked["bytes"] += 1
        file = self.directory / name
        if not file.is_file():
            _plain(request, 404, b"no such file")
            return
        content, mischief = file.read_bytes(), self.mischief
        found = _RANGE.fullmatch(request.headers.get("Range", ""))
        start, stop, status = 0, len(content), 200
        if found is not None and mischief.knows_ranges:
            start, stop, status = int(found[1]), min(int(found[2]) + 1, stop), 206
        body = bytearray(content[start:stop])
        if mischief.wrong > 0 and file.suffix in WEIGHTS and len(body) > 10_000:
            mischief.wrong -= 1
            body[-1] ^= 1
        self.given.append(Given(time.monotonic(), name, status, start, stop))
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        if status == 206:
            request.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        request.end_headers()
        if len(body) > 1 and mischief.cuts(name):
            body = body[: len(body) // 2]
            request.close_connection = True
        try:
            self._send(request, name, memoryview(body))
        except OSError:
            request.close_connection = True

    def _send(self, request: BaseHTTPRequestHandler, name: str, body: memoryview) -> None:
        rate = self.mischief.bytes_per_s
        step = max(1, int(rate * SLOW_STEP_S)) if rate else len(body) or 1
        begin = time.monotonic()
        for place in range(0, len(body), step):
            if rate:
                time.sleep(max(0.0, begin + place / rate - time.monotonic()))
            chunk = body[place : place + step]
            request.wfile.write(chunk)
            self.sent[name] += len(chunk)


def _plain(
    request: BaseHTTPRequestHandler,
    status: int,
    body: bytes,
    headers: dict[str, str] | None = None,
    *,
    is_cut: bool = False,
) -> None:
    request.send_response(status)
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body[: len(body) // 2] if is_cut else body)
    request.close_connection = request.close_connection or is_cut
