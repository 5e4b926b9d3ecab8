"""A server that speaks the hub's protocol, as far as a repository of files goes, and misbehaves.

``/api/models/ORG/NAME/revision/REV?blobs=true`` and ``/ORG/NAME/resolve/COMMIT/FILE`` with ranges,
redirected once as the real one does to where the bytes lie.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "abcd"
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class Mischief:
    """What goes wrong; each count is one less each time."""

    token: str = ""
    """Who does not show it is refused."""
    throttled: int = 0
    cut: int = 0
    """Answers that end after half of their bytes."""
    wrong: int = 0
    """Answers of weights whose first byte is another one."""
    knows_ranges: bool = True
    gated: bool = False


@dataclass
class HubStandin:
    """One repository, ``org/toy``, in a directory; `with` runs the server."""

    directory: Path
    mischief: Mischief = field(default_factory=Mischief)
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes given of each file."""
    asked: Counter[str] = field(default_factory=Counter)
    """Requests by kind: ``api``, ``resolve``, ``bytes``."""
    host: str = "127.0.0.1"

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

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """One request, as the hub would or as its mischief has it."""
        path = unquote(urlsplit(request.path).path)
        mischief = self.mischief
        if mischief.throttled > 0:
            mischief.throttled -= 1
            _plain(request, 429, b"slow down", {"Retry-After": "1"})
        elif mischief.token and request.headers.get("Authorization") != f"Bearer {mischief.token}":
            if path.startswith("/bytes/"):
                self._give(request, path.removeprefix("/bytes/"))  # signed by its address
            else:
                headers = {"X-Error-Code": "GatedRepo"} if mischief.gated else {}
                _plain(request, 401, b"who are you", headers)
        elif path.startswith("/api/models/org/toy/revision/"):
            self.asked["api"] += 1
            _plain(request, 200, json.dumps(self._listing()).encode())
        elif path.startswith(f"/org/toy/resolve/{COMMIT}/"):
            self.asked["resolve"] += 1
            name = path.rpartition("/")[2]
            _plain(request, 302, b"", {"Location": f"{self.url}/bytes/{name}"})
        elif path.startswith("/bytes/"):
            self._give(request, path.removeprefix("/bytes/"))
        else:
            _plain(request, 404, b"no such thing", {"X-Error-Code": "RepoNotFound"})

    def _listing(self) -> dict[str, Any]:
        siblings = []
        for file in sorted(self.directory.iterdir()):
            content = file.read_bytes()
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324 - git's
            entry: dict[str, Any] = {
                "rfilename": file.name, "size": len(content), "blobId": blob,
            }  # fmt: skip
            if file.suffix == ".safetensors":
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 135}
            siblings.append(entry)
        return {"id": "org/toy", "sha": COMMIT, "siblings": siblings, "private": False}

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
        if mischief.wrong > 0 and file.suffix == ".safetensors" and len(body) > 10_000:
            mischief.wrong -= 1
            body[-1] ^= 1
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        if status == 206:
            request.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        request.end_headers()
        if mischief.cut > 0 and len(body) > 1:
            mischief.cut -= 1
            body = body[: len(body) // 2]
            request.close_connection = True
        try:
            request.wfile.write(body)
            self.sent[name] += len(body)
        except OSError:
            request.close_connection = True


def _plain(
    request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
) -> None:
    request.send_response(status)
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)
