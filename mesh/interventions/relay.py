"""The parent's end of a job's channel: passes its messages to the hops and their answers back.

Runs in the parent's event loop and looks into no message, nor has it more than a part of one at
once; the job on the other end is not trusted, so what it may send is bounded and it can reach only
the hops it was given.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgpack

from mesh.errors import (
    BadFrame,
    BadRequest,
    LimitReached,
    LinkLost,
    MeshError,
    PipelineStalled,
    from_dict,
)
from mesh.interventions.channel import ANSWER, ERROR, HEAD, MAX_FRAME_BYTES, MORE
from mesh.pipeline.claims import Claim, Claims
from mesh.pipeline.lines import Line, Lines
from mesh.routing.cover import key_of
from mesh.shard.taps.parts import FETCH, MAX_MESSAGE_BYTES, PART_BYTES
from mesh.types import RouteHop
from mesh.wire.messages import Close, Failure, Message, Opened, OpenTaps, Result, Step, WireTensor

logger = logging.getLogger(__name__)

_PIECE = 1 << 20
_THE_JOBS_OWN = (BadRequest, LimitReached)
"""What a hop finds wrong with a message would be wrong on any other hop, too."""


class HopRefused(Exception):
    """`hop` took no session, because of `error`."""

    def __init__(self, hop: RouteHop, error: MeshError) -> None:
        super().__init__(str(error))
        self.hop = hop
        self.error = error


class Incoming:
    """A message that is still arriving: `left` bytes of it."""

    def __init__(self, reader: asyncio.StreamReader, length: int) -> None:
        self.left = length
        self._reader = reader

    async def read(self, limit: int) -> bytes:
        """The next bytes, `limit` or all that are left. Raises IncompleteReadError."""
        part = await self._reader.readexactly(min(limit, self.left))
        self.left -= len(part)
        return part


class HopSession:
    """One intervention session on one hop, from the asking side; a `SessionReceiver`.

    An answer may take as long as the job may: a link notices by itself when its other end is gone.
    """

    def __init__(self, hop: RouteHop, line: Line, claim: Claim, *, open_s: float) -> None:
        """A hop that has not opened after `open_s` counts as lost."""
        self.hop = hop
        self.error: MeshError | None = None
        """Why the hop is of no use any more; None while it is."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called once, before the job hears of it, when the hop itself fails."""
        self._line = line
        self._claim = claim
        self._open_s = open_s
        self._number = line.register(self)
        self._steps = itertools.count(1)
        self._waiting: asyncio.Future[Message] | None = None
        self._is_idle = False
        self._active_at = 0.0
        self._stay: int | None = None

    async def open(self) -> None:
        """Ask for the session. Raises what the hop answers, LinkLost, PipelineStalled."""
        shard, layers = self.hop.shard, self.hop.layers
        question = OpenTaps(
            self._number, shard.model_id, shard.weights_sha256, layers.start, layers.stop
        )
        try:
            async with asyncio.timeout(self._open_s):
                await self._ask(question)
            self._idle()
        except TimeoutError:
            raise self._fail(
                PipelineStalled(
                    f"{shard.node_name} gave no session within {self._open_s:g} s.",
                    fix="The job is run again on another route if there is one.",
                )
            ) from None

    async def call(self, message: Incoming) -> AsyncGenerator[tuple[int, bytes]]:
        """Pass on a message as it arrives; the parts of its answer, the last one as ANSWER.

        Raises what the hop answers, LinkLost, and IncompleteReadError when the message ends early.
        """
        answer = b""
        sending = True
        self._is_idle = False
        while sending:
            part = await message.read(PART_BYTES)
            answer = await self._exchange(-(-message.left // PART_BYTES), part)
            sending = message.left > 0
        size = len(answer)
        while answer[:1] == b"\1":
            yield MORE, answer[1:]
            answer = await self._exchange(FETCH, b"\0")
            size += len(answer)
            if size > MAX_MESSAGE_BYTES + (1 << 20):
                raise self._fail(BadFrame("A hop's answer does not end.", fix="Update that node."))
        self._idle()
        yield ANSWER, answer[1:]

    def close(self) -> None:
        """Free the session on the hop, if it can still be told."""
        self._claim.release()
        self._line.unregister(self._number)
        if not self._line.is_closed:
            self._line.send(Close(self._number))
        if self._waiting is not None:
            self._waiting.cancel()

    # SessionReceiver

    def message(self, message: Message) -> None:
        """An answer of the hop."""
        waiting = self._waiting
        if isinstance(message, Result) and message.step == self._stay:
            self._stay = None
            return
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
        elif isinstance(message, Failure):
            self._fail(from_dict(message.error))

    def lost(self, error: MeshError) -> None:
        """The link is gone."""
        self._fail(error)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)

    def rest(self, before: float) -> None:
        """The job thinks: fetch nothing, so that the hop knows that it is still there."""
        if self._is_idle and self._active_at <= before and not self._line.is_closed:
            self._idle()
            self._stay = next(self._steps)
            nothing = WireTensor("int8", (1,), b"\0")
            self._line.send(Step(self._number, self._stay, FETCH, nothing))

    # Private

    def _idle(self) -> None:
        self._is_idle, self._active_at = True, asyncio.get_running_loop().time()

    async def _exchange(self, position: int, part: bytes) -> bytes:
        step = Step(
            self._number, next(self._steps), position, WireTensor("int8", (len(part),), part)
        )
        answer = await self._ask(step)
        if not isinstance(answer, Result) or answer.step != step.step:
            raise self._fail(BadFrame("A hop answered out of turn.", fix="Update that node."))
        return bytes(answer.tensor.data)

    async def _ask(self, question: OpenTaps | Step) -> Message:
        if self.error is not None:
            raise self.error
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            self._line.ask([question])
            answer = await self._waiting
        except LinkLost as error:
            raise self._fail(error) from None
        finally:
            self._waiting = None
        if isinstance(answer, Failure):
            raise self._fail(from_dict(answer.error))
        if isinstance(question, OpenTaps) and not isinstance(answer, Opened):
            raise self._fail(BadFrame("A hop did not open.", fix="Update that node."))
        return answer

    def _fail(self, error: MeshError) -> MeshError:
        first, self.error = self.error is None, error
        if first and not isinstance(error, _THE_JOBS_OWN):
            self.on_lost()
        return error


class HopSessions:
    """The sessions of one job, one per hop of its route."""

    def __init__(self, hops: Sequence[HopSession]) -> None:
        self.hops = hops

    @classmethod
    async def open(
        cls,
        route: Sequence[RouteHop],
        lines: Lines,
        claims: Claims | None = None,
        *,
        open_s: float = 120.0,
    ) -> HopSessions:
        """Open a session on every hop at once, all or none. Raises HopRefused for the first."""
        hops: list[HopSession] = []
        counted = claims or Claims()
        # Before anything is awaited: whoever picks a route meanwhile has to know of these.
        claimed = [counted.claim(key_of(hop.shard)) for hop in route]

        async def open_one(hop: RouteHop, claim: Claim) -> HopSession:
            try:
                line = await lines.line(hop.shard.host, hop.shard.endpoint)
                session = HopSession(hop, line, claim, open_s=open_s)
                hops.append(session)
                await session.open()
            except MeshError as error:
                raise HopRefused(hop, error) from error
            return session

        opening = [
            asyncio.create_task(open_one(hop, claim), name=f"open {hop.shard.shard_id}")
            for hop, claim in zip(route, claimed, strict=True)
        ]
        try:
            return cls(await asyncio.gather(*opening))
        except BaseException:
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)
            for opened in hops:
                opened.close()
            for claim in claimed:
                claim.release()
            raise

    @property
    def lost(self) -> HopSession | None:
        """A hop that failed itself. None when all are up."""
        return next(
            (
                h
                for h in self.hops
                if h.error is not None and not isinstance(h.error, _THE_JOBS_OWN)
            ),
            None,
        )

    def on_lost(self, notify: Callable[[], None]) -> None:
        """Call `notify` when a hop fails, before the job hears of it; at once if one has."""
        for hop in self.hops:
            hop.on_lost = notify
        if self.lost is not None:
            notify()

    def call(self, hop: int, message: Incoming) -> AsyncGenerator[tuple[int, bytes]]:
        """See `HopSession.call`. Raises BadRequest for a hop that is none."""
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
            message = Incoming(reader, length)
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
