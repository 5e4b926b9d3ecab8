"""Pairing over TCP: a listener that exists while an invitation is open, and the joiner's call.

Each frame is behind a two-byte length. Nothing here lasts: exchanges have a deadline, callers are
counted and slowed down, the listener goes when the window shuts. Who calls most makes room for
others: a stranger who keeps everybody out needs as many addresses as there is room. Knows nothing
of what a new member may do or where the address came from.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from mesh.clock import set_within
from mesh.errors import ConnectFailed, MeshError, PairingRejected, PortInUse
from mesh.identity.invitations import Ticket, Window, WindowEnding
from mesh.identity.keys import NodeKey
from mesh.identity.pairing import (
    MAX_FRAME_BYTES,
    Inviter,
    Joined,
    Joiner,
    JoinRequest,
    Welcome,
    refusal,
)
from mesh.types import host_port

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct(">H")
_Error = TypeVar("_Error", bound=MeshError)


@dataclass(frozen=True, slots=True)
class PairingLimits:
    """The limits of a pairing listener: seconds of one call, and calls at once.

    `starts` exchanges are begun in any `starts_within_s`, `starts_per_host` of them by one caller:
    each costs some 15 ms of computing.
    """

    frame_s: float = 5.0
    exchange_s: float = 20.0
    callers: int = 8
    callers_per_host: int = 4
    starts: int = 20
    starts_per_host: int = 5
    starts_within_s: float = 10.0


DEFAULT_LIMITS = PairingLimits()


@dataclass(frozen=True, slots=True)
class _Caller:
    host: str
    transport: asyncio.WriteTransport


Admit = Callable[[JoinRequest], Awaitable[Welcome]]
"""Makes the proven joiner a member. A MeshError refuses it; the invitation is used up anyway."""


class PairingListener:
    """The inviter's end of one window. Made by `listen`."""

    def __init__(self, key: NodeKey, window: Window, admit: Admit, limits: PairingLimits) -> None:
        self.port = 0
        self.refused: MeshError | None = None
        """Why the one who knew the code is not in all the same."""
        self._key = key
        self._window = window
        self._admit = admit
        self._limits = limits
        self._server: asyncio.Server | None = None
        self._exchanges: dict[asyncio.Task[None], _Caller] = {}
        self._starts: deque[tuple[float, str]] = deque()
        self._shut = asyncio.Event()
        self._answers_at: Callable[[str], bool] = lambda address: True
        self._winner: asyncio.Task[None] | None = None
        self._joined: JoinRequest | None = None

    async def wait(self) -> tuple[WindowEnding, JoinRequest | None]:
        """Wait until the window is shut and the listener gone; how it ended, and who joined."""
        await set_within(self._shut, self._window.remaining_s)
        self._window.shut(WindowEnding.EXPIRED)
        if self._server is not None:
            self._server.close()
        if self._winner is not None:  # the others have nothing left to win
            await asyncio.wait([self._winner], timeout=self._limits.exchange_s)
        await self.close()
        return self._window.ending or WindowEnding.EXPIRED, self._joined

    async def close(self) -> None:
        """Shut the window and the listener now; safe to call twice."""
        self._window.shut(WindowEnding.CLOSED)
        self._shut.set()
        if self._server is not None:
            self._server.close()
        exchanges = [task for task in self._exchanges if task is not asyncio.current_task()]
        for task in exchanges:
            task.cancel()
        await asyncio.gather(*exchanges, return_exceptions=True)

    # For `listen`.

    async def start(self, host: str | Callable[[str], bool], port: int) -> None:
        """Listen. Raises PortInUse."""
        if callable(host):
            self._answers_at, host = host, "0.0.0.0"  # noqa: S104 - the function decides
        try:
            self._server = await asyncio.start_server(
                self._called, host, port, limit=MAX_FRAME_BYTES + _LENGTH.size
            )
        except OSError as error:
            raise PortInUse(
                f"No pairing listener on {host_port(host, port)}: {error.strerror}.",
                fix="Choose another address or port.",
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]

    def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = str(writer.get_extra_info("peername", ("",))[0])
        callers = [caller.host for caller in self._exchanges.values()]
        is_one_more = callers.count(host) >= self._limits.callers_per_host
        is_elsewhere = not self._answers_at(writer.get_extra_info("sockname")[0])
        if is_one_more or is_elsewhere or self._window.ending:
            writer.transport.abort()
            return
        if len(callers) >= self._limits.callers:
            self._make_room()
        caller = _Caller(host, writer.transport)
        task = asyncio.create_task(self._serve(reader, writer, host), name=f"pairing with {host}")
        self._exchanges[task] = caller
        task.add_done_callback(self._left)

    def _make_room(self) -> None:
        """Give up the oldest of the address that has most, whoever has proved itself aside."""
        hosts = Counter(caller.host for caller in self._exchanges.values())
        unproven = [task for task in self._exchanges if task is not self._winner]
        oldest = max(unproven, key=lambda task: hosts[self._exchanges[task].host])
        self._exchanges.pop(oldest).transport.abort()
        oldest.cancel()

    def _left(self, task: asyncio.Task[None]) -> None:
        self._exchanges.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error  # a bug: let the loop's exception handler have it

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str
    ) -> None:
        frames = _Frames(reader, writer, self._limits.frame_s)
        try:
            async with asyncio.timeout(self._limits.exchange_s):
                await self._exchange(frames, host)
        except TimeoutError:
            frames.send_last(refusal(self._failed(_timed_out())))
        except PairingRejected as error:
            logger.info("pairing failed reason=%s", error.param)
            frames.send_last(refusal(self._failed(error)))
        except MeshError as error:
            logger.warning("pairing failed after the code was right: %s", error)
            self._failed(error)
            frames.send_last(refusal(PairingRejected("", fix="", param="refused")))
        finally:
            await frames.hang_up()
            if self._window.ending is not None:
                self._shut.set()

    def _failed(self, error: _Error) -> _Error:
        if self._winner is asyncio.current_task() and self._joined is None:
            self.refused = error
        return error

    async def _exchange(self, frames: _Frames, host: str) -> None:
        inviter = Inviter(self._key, self._window)
        start = await frames.receive()
        self._slow_down(host)
        await frames.send(inviter.greet(start))
        request = inviter.examine(await frames.receive())
        self._winner = asyncio.current_task()
        self._shut.set()
        welcome = await self._admit(request)
        self._joined = request
        await frames.send(inviter.welcome(welcome))
        inviter.finish(await frames.receive())

    def _slow_down(self, host: str) -> None:
        now, limits = asyncio.get_running_loop().time(), self._limits
        while self._starts and now - self._starts[0][0] > limits.starts_within_s:
            self._starts.popleft()
        of_host = sum(caller == host for _, caller in self._starts)
        if len(self._starts) >= limits.starts or of_host >= limits.starts_per_host:
            raise PairingRejected("Too many callers.", fix="Wait.", param="busy")
        self._starts.append((now, host))


async def listen(
    host: str | Callable[[str], bool],
    port: int,
    *,
    key: NodeKey,
    window: Window,
    admit: Admit,
    limits: PairingLimits = DEFAULT_LIMITS,
) -> PairingListener:
    """Open the window on `host` and `port` (0: any free one). Raises PortInUse.

    A function as `host` says for every address of this machine whether to answer at it.
    The caller awaits `PairingListener.wait`, which ends the listener when the window ends.
    """
    listener = PairingListener(key, window, admit, limits)
    await listener.start(host, port)
    return listener


async def join(
    host: str,
    port: int,
    *,
    key: NodeKey,
    name: str,
    ticket: Ticket,
    keep: Callable[[Joined], Awaitable[None]],
    limits: PairingLimits = DEFAULT_LIMITS,
) -> Joined:
    """Pair with the inviter at that address; `keep` stores the result before it is acknowledged.

    Raises ConnectFailed when nobody answers there, PairingRejected, and what `keep` raises.
    """
    try:
        async with asyncio.timeout(limits.frame_s):
            reader, writer = await asyncio.open_connection(
                host, port, limit=MAX_FRAME_BYTES + _LENGTH.size
            )
    except (OSError, TimeoutError) as error:
        raise ConnectFailed(
            f"Nobody answers at {host_port(host, port)}.",
            fix="Check that the invitation is still open.",
        ) from error
    frames = _Frames(reader, writer, limits.frame_s)
    joiner = Joiner(key, name, ticket)
    try:
        async with asyncio.timeout(limits.exchange_s):
            await frames.send(joiner.start())
            greeting = await _greeting(frames, host_port(host, port))
            await frames.send(joiner.prove(greeting))
            joined = joiner.read_welcome(await frames.receive())
            await keep(joined)
            await frames.send(joiner.done())
    except TimeoutError as error:
        raise _timed_out() from error
    finally:
        await frames.hang_up()
    return joined


async def _greeting(frames: _Frames, place: str) -> bytes:
    """The inviter's first frame. Raises PairingRejected that says so where somebody else listens:
    a node or its API hang up, or answer otherwise."""
    try:
        return await frames.receive()
    except PairingRejected as error:
        if error.param != "protocol":
            raise
        raise PairingRejected(
            f"Who listens at {place} hung up, or speaks of no invitation.",
            fix="Give the address that `hearthnet invite` shows: a node's own port is another.",
            param="protocol",
        ) from error


class _Frames:
    """Length-prefixed frames on one connection; each has to come within `frame_s`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frame_s: float
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._frame_s = frame_s

    async def receive(self) -> bytes:
        """The next frame. Raises PairingRejected when it is too large, late, or never comes."""
        try:
            async with asyncio.timeout(self._frame_s):
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                if length > MAX_FRAME_BYTES:
                    raise PairingRejected(
                        f"A pairing message of {length} bytes.", fix=_AGAIN, param="protocol"
                    )
                return await self._reader.readexactly(length)
        except TimeoutError as error:
            raise _timed_out() from error
        except (OSError, asyncio.IncompleteReadError) as error:
            raise PairingRejected(
                "The other side hung up.", fix=_AGAIN, param="protocol"
            ) from error

    async def send(self, frame: bytes) -> None:
        """Write a frame. Raises PairingRejected when the other side does not take it in time."""
        self._writer.write(_LENGTH.pack(len(frame)) + frame)
        try:
            async with asyncio.timeout(self._frame_s):
                await self._writer.drain()
        except TimeoutError as error:
            raise _timed_out() from error
        except OSError as error:
            raise PairingRejected(
                "The other side hung up.", fix=_AGAIN, param="protocol"
            ) from error

    def send_last(self, frame: bytes) -> None:
        """Write a frame before closing, without waiting for anybody."""
        if not self._writer.transport.is_closing():
            self._writer.write(_LENGTH.pack(len(frame)) + frame)

    async def hang_up(self) -> None:
        """Close; whoever does not take the last words in time does not get them."""
        self._writer.close()
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._writer.wait_closed()
        except TimeoutError:
            self._writer.transport.abort()
        except OSError:
            pass  # it is closed, which is all that was wanted


_LAST_WORDS_S = 1.0
_AGAIN = "Run `hearthnet invite` again, and join once more."


def _timed_out() -> PairingRejected:
    return PairingRejected("The exchange took too long.", fix=_AGAIN, param="timeout")
