"""Fetching the file of an edit from another member, by its hash, part by part.

One question at a time for each fetch, so a fetch holds at most one part more than the file. What
arrives is believed only when its hash is the one that was asked for; whoever sent it.

The files of this node are in its library, each named by its SHA-256; that blocks, and is called
from threads. Knows nothing of names or models.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from mesh.errors import LinkLost
from mesh.models.edits import MAX_EDIT_BYTES
from mesh.private_files import write_private
from mesh.processes.tasks import end, spawn
from mesh.types import NodeId
from mesh.wire.messages import FileAsk, FilePart

logger = logging.getLogger(__name__)

PART_BYTES = 128 << 10
PART_TIMEOUT_S = 10.0
PEER_TIMEOUT_S = 30.0
"""For a whole file: a chat waits for it, and the next peer may be quicker."""
MAX_SERVING = 8
"""Questions answered at the same time; further ones get no answer and are asked elsewhere."""

Send = Callable[[NodeId, FileAsk | FilePart], None]

_SUFFIX = ".safetensors"


class Library:
    """Files below one directory, which is made when it is first needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, sha256: str) -> bytes | None:
        """The file of that hash; None when it is not here, or is not what its name says."""
        path = self.path(sha256)
        try:
            if path.stat().st_size > MAX_EDIT_BYTES:
                return None
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        return data if hashlib.sha256(data).hexdigest() == sha256 else None

    def keep(self, data: bytes) -> str:
        """Put a file in; its hash. When this returns it is on the disk, or OSError was raised."""
        sha256 = hashlib.sha256(data).hexdigest()
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self.path(sha256), data)
        return sha256

    def prune(self, wanted: Collection[str]) -> None:
        """Delete what is none of the `wanted` hashes, also what a killed process has begun.

        Not while a file is put in.
        """
        names = {self.path(sha256).name for sha256 in wanted}
        for path in self._directory.glob("*"):
            if path.name not in names:
                path.unlink(missing_ok=True)

    def path(self, sha256: str) -> Path:
        """Where the file of this hash lies, if it is here."""
        return self._directory / f"{sha256}{_SUFFIX}"


class FileTransfer:
    """Asks others for files and answers them from the library. Use on one event loop."""

    def __init__(
        self,
        library: Library,
        send: Send,
        *,
        part_timeout_s: float = PART_TIMEOUT_S,
        peer_timeout_s: float = PEER_TIMEOUT_S,
    ) -> None:
        """`send` raises LinkLost for a node that is not linked; a part is waited for so long, and
        all that one peer sends."""
        self._part_timeout_s = part_timeout_s
        self._peer_timeout_s = peer_timeout_s
        self._library = library
        self._send = send
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[NodeId, asyncio.Future[FilePart]]] = {}
        self._serving: set[asyncio.Task[None]] = set()

    def receive(self, peer: NodeId, message: FileAsk | FilePart) -> None:
        """What another member said."""
        if isinstance(message, FilePart):
            asked = self._asked.get(message.number)
            if asked is not None and asked[0] == peer and not asked[1].done():
                asked[1].set_result(message)
        elif len(self._serving) < MAX_SERVING:
            spawn(self._answer(peer, message), "send a steering edit", among=self._serving)

    async def fetch(self, sha256: str, size: int, peers: Sequence[NodeId]) -> bytes | None:
        """The file from the first of `peers` that has it; None when none of them does."""
        for peer in peers:
            try:
                async with asyncio.timeout(self._peer_timeout_s):
                    data = await self._fetch_from(peer, sha256, size)
            except (LinkLost, TimeoutError) as error:
                logger.info("edit=%s not from peer=%s: %s", sha256[:12], peer, error)
                continue
            if data is not None:
                return data
        return None

    async def close(self) -> None:
        """Stop answering."""
        await end(self._serving)

    async def _fetch_from(self, peer: NodeId, sha256: str, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            part = await self._ask(peer, sha256, len(data))
            # Whole parts only: of single bytes a file of megabytes would be asked for for days.
            if len(part.data) != min(PART_BYTES, size - len(data)):
                return None
            data += part.data
        if hashlib.sha256(data).hexdigest() != sha256:
            logger.warning("edit=%s from peer=%s is not what was asked for", sha256[:12], peer)
            return None
        return bytes(data)

    async def _ask(self, peer: NodeId, sha256: str, offset: int) -> FilePart:
        number = next(self._numbers) & 0xFFFFFFFF
        future: asyncio.Future[FilePart] = asyncio.get_running_loop().create_future()
        self._asked[number] = (peer, future)
        try:
            self._send(peer, FileAsk(number, sha256, offset))
            async with asyncio.timeout(self._part_timeout_s):
                return await future
        finally:
            del self._asked[number]

    async def _answer(self, peer: NodeId, question: FileAsk) -> None:
        data = await asyncio.to_thread(self._library.read, question.sha256) or b""
        part = data[question.offset : question.offset + PART_BYTES]
        try:
            self._send(peer, FilePart(question.number, part))
        except LinkLost:
            logger.info("peer=%s left before it got its part", peer)
