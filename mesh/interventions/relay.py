"""The parent's end of a job's channel: passes its messages to the hops and their answers back.

Runs in the parent's event loop and looks into no message, nor has it more than a part of one at
once; the job on the other end is not trusted, so what it may send is bounded and it can reach only
the hops it was given.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import msgpack

from mesh.errors import (
    BadFrame,
    BadRequest,
    LimitReached,
    LinkLost,
    MeshError,
    VersionMismatch,
)
from mesh.interventions.channel import ANSWER, ERROR, HEAD, MAX_FRAME_BYTES, MORE
from mesh.pipeline.claims import Claim, Claims
from mesh.pipeline.hop import HopSession, Patience
from mesh.pipeline.links import HopLink, HopLinks
from mesh.pipeline.route import open_sessions
from mesh.routing.cover import key_of
from mesh.shard.taps.parts import MAX_MESSAGE_BYTES, PART_BYTES
from mesh.types import LayerRange, RouteHop, ShardDescriptor
from mesh.wire.messages import Blob, BlobKind, Message, OpenTaps

logger = logging.getLogger(__name__)

_PIECE = 1 << 20
_THE_JOBS_OWN = (BadRequest, LimitReached)
"""What a hop finds wrong with a message would be wrong on any other hop, too."""


@dataclass(frozen=True, slots=True)
class _TapTerms:
    """What a hop is asked for on behalf of a job."""

    shard: ShardDescriptor

    def opening(self, session: int, layers: LayerRange) -> list[Message]:
        """What asks a hop for a tap session."""
        model_id, weights = self.shard.model_id, self.shard.weights_sha256
        return [OpenTaps(session, model_id, weights, layers.start, layers.stop)]

    def room(self, fed: int) -> int:
        """See `mesh.pipeline.hop.Terms.room`: a job's caches are the hop's own matter."""
        return fed


class IncomingMessage:
    """A message that is still arriving: `left` bytes of it."""

    def __init__(self, reader: asyncio.StreamReader, length: int) -> None:
        self.left = length
        self._reader = reader

    async def read(self, limit: int) -> bytes:
        """The next bytes, `limit` or all that are left. Raises IncompleteReadError."""
        part = await self._reader.readexactly(min(limit, self.left))
        self.left -= len(part)
        return part


class RelayedSession(HopSession):
    """One intervention session on one hop, from the asking side.

    An answer may take as long as the job may: a link notices by itself when its other end is gone.
    `on_lost` is called before the job hears of it, and only when the hop itself fails.
    """

    def __init__(
        self, hop: RouteHop, link: HopLink, claim: Claim, *, open_s: float, part_bytes: int
    ) -> None:
        """A hop that has not opened after `open_s` counts as lost."""
        super().__init__(hop, link, claim, _TapTerms(hop.shard), Patience(open_s, open_s))
        self._part_bytes = part_bytes
        self._is_idle = True
        self._waiting: asyncio.Future[Blob] | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the hop itself has failed."""
        return self.error is not None and not isinstance(self.error, _THE_JOBS_OWN)

    async def open(self) -> None:
        """See `HopSession.open`; also raises VersionMismatch for a host that is too old for it."""
        if not self._link.takes_blobs:
            raise VersionMismatch(
                f"{self.hop.shard.node_name} is too old for jobs of this node.",
                fix=f"Update hearthnet on {self.hop.shard.node_name}.",
            )
        await super().open()

    async def call(self, message: IncomingMessage) -> AsyncGenerator[tuple[int, bytes]]:
        """Pass on a message as it arrives; the parts of its answer, the last one as ANSWER.

        Raises what the hop answers, LinkLost, and IncompleteReadError when the message ends early.
        """
        self._is_idle = False
        length, offset = message.left, 0
        while True:
            part = await message.read(self._part_bytes)
            answer = await self._exchange(BlobKind.QUESTION, length, offset, part)
            offset += len(part)
            if not message.left:
                break
            self._require(answer.kind is BlobKind.QUESTION and answer.offset == offset)
        length, offset = answer.length, 0
        self._require(length <= MAX_MESSAGE_BYTES)
        while True:
            self._require(
                answer.kind is BlobKind.ANSWER
                and (answer.length, answer.offset) == (length, offset)
                and (len(answer.data) > 0 or not length)
            )
            offset = answer.end
            if offset == length:
                break
            yield MORE, bytes(answer.data)
            answer = await self._exchange(BlobKind.ANSWER, length, offset, b"")
        self._idle()
        yield ANSWER, bytes(answer.data)

    def close(self) -> None:
        """Free the session on the hop, if it can still be told."""
        super().close()
        if self._waiting is not None:
            self._waiting.cancel()

    def message(self, message: Message) -> None:
        """Put a part of the hop's answer where the job waits for it."""
        if not isinstance(message, Blob):
            super().message(message)
        elif self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(message)

    def fail(self, error: MeshError) -> None:
        """Take the hop as lost from now on; whoever waits gets the error."""
        super().fail(error)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)

    def rest(self, before: float) -> None:
        """The job thinks: say nothing, so that the hop knows that it is still there."""
        is_open = self._opening is None and self.error is None and not self._link.is_closed
        if is_open and self._is_idle and self._active_at <= before:
            try:
                self._link.send(Blob(self._number, BlobKind.ANSWER, 0, 0))
            except MeshError as error:  # its account is full; the lease has room for another try
                shard = self.hop.shard.shard_id
                logger.info("shard=%s is not told that a job thinks: %s", shard, error)
            else:
                self._idle()

    # Private

    def _idle(self) -> None:
        self._is_idle, self._active_at = True, asyncio.get_running_loop().time()

    async def _exchange(self, kind: BlobKind, length: int, offset: int, part: bytes) -> Blob:
        if self.error is not None:
            raise self.error
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            self._link.send(Blob(self._number, kind, length, offset, part))
            return await self._waiting
        except LinkLost as error:
            self.fail(error)
            raise
        finally:
            self._waiting = None

    def _require(self, is_in_turn: bool) -> None:
        if not is_in_turn:
            out_of_turn = BadFrame("A hop answered out of turn.", fix="Update that node.")
            self.fail(out_of_turn)
            raise out_of_turn

    def _failed(self, error: MeshError) -> None:
        if self.is_lost:
            self.on_lost()


class HopSessions:
    """The sessions of one job, one per hop of its route."""

    def __init__(self, hops: Sequence[RelayedSession]) -> None:
        self.hops = hops

    @classmethod
    async def open(
        cls,
        route: Sequence[RouteHop],
        links: HopLinks,
        claims: Claims | None = None,
        *,
        open_s: float = 120.0,
        part_bytes: int = PART_BYTES,
    ) -> HopSessions:
        """Open a session on every hop at once, all or none; a hop gets messages in parts of at most
        `part_bytes`. Raises HopLost."""
        counted = claims or Claims()
        return cls(
            await open_sessions(
                route,
                links,
                lambda hop: counted.claim(key_of(hop.shard)),
                partial(RelayedSession, open_s=open_s, part_bytes=part_bytes),
            )
        )

    @property
    def lost(self) -> RelayedSession | None:
        """A hop that failed itself. None when all are up."""
        return next((hop for hop in self.hops if hop.is_lost), None)

    def on_lost(self, notify: Callable[[], None]) -> None:
        """Call `notify` when a hop fails, before the job hears of it; at once if one has."""
        for hop in self.hops:
            hop.on_lost = notify
        if self.lost is not None:
            notify()

    def call(self, hop: int, message: IncomingMessage) -> AsyncGenerator[tuple[int, bytes]]:
        """See `RelayedSession.call`. Raises BadRequest for a hop that is none."""
        if hop >= len(self.hops):
            raise BadRequest(f"The job has no hop {hop}.", fix="This is a bug.")
        return self.hops[hop].call(message)

    def close(self) -> None:
        """Free every session."""
        for hop in self.hops:
            hop.close()


async def relay(sock: socket.socket, sessions: HopSessions) -> None:
    """Serve the job at the other end of `sock` until it closes it.

    Takes over `sock`. Raises BadFrame when the job breaks the channel's rules; hop failures go to
    the job as errors and stay visible in `sessions.lost`.
    """
    reader, writer = await asyncio.open_connection(sock=sock, limit=_PIECE)
    try:
        while True:
            hop, status, length = HEAD.unpack(await reader.readexactly(HEAD.size))
            if status != ANSWER or length > MAX_FRAME_BYTES:
                raise BadFrame("The job sent what is no message.", fix="It is ended.")
            message = IncomingMessage(reader, length)
            try:
                async with aclosing(sessions.call(hop, message)) as answer:
                    async for status, part in answer:
                        await _write(writer, hop, status, part)
            except MeshError as error:
                logger.info("hop=%d failed a job: %s", hop, error)
                while message.left:
                    await message.read(_PIECE)
                await _write(writer, hop, ERROR, msgpack.packb(error.to_dict()))
    except (asyncio.IncompleteReadError, ConnectionError):
        return  # the job was ended
    finally:
        writer.close()


async def _write(writer: asyncio.StreamWriter, hop: int, status: int, part: bytes) -> None:
    writer.write(HEAD.pack(hop, status, len(part)))
    writer.write(part)
    await writer.drain()
