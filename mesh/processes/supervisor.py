"""The daemon's side of a child process: starts it, hears that it lives, puts another in its place.

One rule for all: a child says every second that its event loop turns (`channel`). One that says
nothing for `suspect_s` is not up any more, and whatever it serves is not to be offered; after
`replace_s` it is killed. The next is started later each time one ends soon. A kind of process is a
subclass: the answers that it understands, and what it does when one has ended.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from mesh.clock import loop_time, next_tick, set_by, set_within
from mesh.errors import BadRequest, Busy, LinkLost, MeshError, ProcessLost
from mesh.processes import messages
from mesh.processes.child import Child
from mesh.processes.exchange import Exchange
from mesh.processes.headroom import oom_kills, ram
from mesh.processes.lifecycle import ChildEnding, ProcessStanding, ProcessState, SilenceLimits
from mesh.processes.messages import Handlers, ProcessMessage, Start
from mesh.processes.tasks import spawn

logger = logging.getLogger(__name__)

TICK_S = 1.0
_LEAVE_TICK_S = 2.0
STOP_TIMEOUT_S = 5.0
STEADY_S = 60.0
"""A child that ran for so long did not end soon: the next one is started without delay."""


class Supervisor(ABC):
    """Runs one process after the other; `start` once, `stop` at the end."""

    restart_delays_s: tuple[float, ...] = (0.05, 1.0, 2.0, 5.0, 10.0, 30.0)

    def __init__(
        self,
        name: str,
        module: str,
        first_command: Start[Any] | None,
        limits: SilenceLimits | None = None,
    ) -> None:
        """`name` is what people call the process, ``the shards' process``; `module` is what it
        runs. Without its first command, which is not known yet, it must not be started."""
        self.name = name
        self.first_command = first_command
        self.starts = 0  # how many were started
        self.ending: ChildEnding | None = None
        """Of the latest that ended unasked."""
        self.listener: socket.socket | None = None  # for each process, open all the time
        self._module = module
        self.exchange = Exchange(  # ask it through this; ProcessLost when it ends before it answers
            {
                messages.Alive: lambda alive: None,  # that it was heard is all
                messages.LastWords: self._heard_last_words,
                messages.Loads: self._heard_loads,
                **self.answers(),
            },
            self.send,
        )
        self._limits = limits or SilenceLimits()
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()
        self._up = asyncio.Event()
        self._stopping = asyncio.Event()
        self._is_ready = False
        self._silent_s = self._counted_until_s = 0.0
        self._said: MeshError | None = None
        self._loads, self._loads_since_s = messages.Loads(), 0.0
        self._oom_kills: int | None = None
        self._held: MeshError | None = None
        self._delay_s = 0.0

    # What a kind of process decides

    @abstractmethod
    def answers(self) -> Handlers:
        """What the process says and asks of itself, beside what all do."""

    def on_started(self) -> None:
        """A new one runs and waits to be told what to do."""
        if self.first_command is not None:
            self.begin(self.first_command)

    def on_ready(self, answer: Any) -> None:  # noqa: B027 - some have nothing to say then
        """It is ready for work: the answer to its first command."""

    def on_failed(self, error: MeshError) -> None:
        """It runs, but could not do its first command: without that it is of no use."""
        self._said = error
        self.replace()

    @abstractmethod
    def on_ended(self, ending: ChildEnding) -> None:
        """It is no more; unless it was to stop, another one follows."""

    @abstractmethod
    def on_changed(self) -> None:
        """It fell silent, was heard again or is gone: `is_up` is another."""

    def why_not_wait(self) -> MeshError | None:
        """Why nobody is to wait for one that is up; see `look_again`."""
        return Busy("this node is stopping.", fix="Start it again.") if self.is_stopping else None

    def why_not_start(self, free_mb: int) -> MeshError | None:
        """Why none is to be started now, while so much main memory is free; it is asked again."""
        return None

    def lost(self, ending: ChildEnding) -> MeshError:
        """What those hear whose questions one that is no more has not answered."""
        return ProcessLost(f"{self.name}: {ending}.", fix="It is started anew; try again.")

    @property
    def ended_at_will(self) -> bool:
        """Whether the latest was told to end, and the next may wait; see `resting`."""
        return False

    # What others ask

    @property
    def state(self) -> ProcessState:
        """See `ProcessState`."""
        if not self.is_to_run:
            return ProcessState.STOPPED
        if self._child is None or self._gone.is_set():
            return ProcessState.STARTING if self.ending is None else ProcessState.ENDED
        if self._silent_s >= self._limits.suspect_s and self._is_ready:
            return ProcessState.SILENT
        return ProcessState.UP if self._is_ready else ProcessState.STARTING

    @property
    def is_up(self) -> bool:
        """Whether it is ready and was heard lately; a stopping one is until it has ended."""
        return (
            self._is_ready and not self._gone.is_set() and self._silent_s < self._limits.suspect_s
        )

    @property
    def pid(self) -> int | None:
        """The running child's process id."""
        return None if self._child is None else self._child.pid

    @property
    def is_to_run(self) -> bool:
        """Whether it was started and not stopped."""
        return self._task is not None and not self.is_stopping

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to stop: there will be no other."""
        return self._stopping.is_set()

    @property
    def standing(self) -> ProcessStanding:
        """How it is with it, for `status` and for people."""
        left_s = max(0.0, self._limits.replace_s - self._silent_s)
        wait_s = left_s if self.state is ProcessState.SILENT else self._delay_s
        alone = None if self._child is None else self._child.why_alone
        return ProcessStanding(
            self.name, self.state, self.pid, self._silent_s, self.starts, alone, self.ending,
            self._held, wait_s,
        )  # fmt: skip

    def load(self) -> dict[str, Any] | None:
        """The load under way, for `status`: of what, what it takes, since when, and how far."""
        return None if self._child is None else self._loads.row(loop_time() - self._loads_since_s)

    # What others do

    def start(self) -> None:
        """Begin to keep it running, if that was not begun."""
        if self._task is None and not self.is_stopping:
            self._task = spawn(self._keep_running(), self.name)

    def ready(self) -> None:
        """It has said that it is ready for work."""
        self._is_ready = True
        self.look_again()

    def look_again(self) -> None:
        """Have those who wait for one that is up see whether there is, and whether to go on."""
        self._up.set()
        if not self.is_up:
            self._up.clear()

    async def wait_up(self) -> None:
        """Until there is one that is up, however long that takes; it is when this returns. Raises
        what `why_not_wait` says."""
        while not self.is_up:
            if (error := self.why_not_wait()) is not None:
                raise error
            await self._up.wait()

    def begin(self, first: Start[Any]) -> None:
        """Give a new one its first command."""
        self.exchange.ask(first, self._has_begun)

    def tell(self, command: ProcessMessage) -> bool:
        """Send it a command; False when there is nobody to hear it: whoever is next starts anew."""
        try:
            self.send(command)
        except LinkLost:
            return False
        return True

    def send(self, message: ProcessMessage) -> None:
        """Send it a message. Raises LinkLost when there is nobody to hear it."""
        if self._child is None:
            raise LinkLost(f"{self.name} is gone.", fix="Ask again; it starts anew.")
        self._child.channel.send(message)

    def trust(self, members: Sequence[bytes]) -> None:
        """The certificates of those whose links are trusted from now on; all others are cut."""
        named = tuple(members)
        if self.first_command is not None:
            tls = replace(self.first_command.tls, members=named)
            self.first_command = structs.replace(self.first_command, tls=tls)
        self.tell(messages.Trust(named))

    def replace(self) -> None:
        """It is of no use: end it and start another."""
        self._lose()

    async def drain(self, grace_s: float) -> None:
        """Have what runs there end or move elsewhere; wait up to `grace_s`, then `stop`."""
        self.tell(messages.Stop(grace_s))
        self._stopping.set()
        if self._child is not None:
            await set_within(self._gone, grace_s + STOP_TIMEOUT_S)
        await self._end()

    async def stop(self) -> None:
        """End it and wait until it is gone."""
        await self._end()

    # Private

    async def _end(self) -> None:
        self._stopping.set()
        self._lose()
        if self._task is not None:
            await asyncio.wait([self._task])  # not cancelled: a child has to be waited for

    async def _keep_running(self) -> None:
        failures = 0
        while True:
            if not await self._gets_leave():
                return
            started = loop_time()
            try:
                await self._run_one()
            except Exception as error:  # no descriptors, no memory: giving up helps nobody
                logger.exception("%s failed", self.name, exc_info=error)
                self.ending = ChildEnding(None, failed=str(error) or type(error).__name__)
            if self.is_stopping:
                return
            if self.ended_at_will:
                failures, self.ending = 0, None
                continue
            if loop_time() - started > STEADY_S:
                failures = 0
            delays_s = self.restart_delays_s
            self._delay_s = delays_s[min(failures, len(delays_s) - 1)]
            failures += 1
            logger.error("%s: %s; starting again in %g s", self.name, self.ending, self._delay_s)
            if await set_within(self._stopping, self._delay_s):
                return

    async def _gets_leave(self) -> bool:
        """Wait until the owner has nothing against a start; False when there is to be none."""
        while not self.is_stopping:
            try:
                free_mb = (await asyncio.to_thread(ram)).free_mb
            except OSError:  # no descriptor is left to read it with
                free_mb = 0
            self._held = self.why_not_start(free_mb)
            if self._held is None:
                return not self.is_stopping  # which may have come meanwhile
            await set_within(self._stopping, _LEAVE_TICK_S)
        return False

    async def _run_one(self) -> None:
        self.starts = run = self.starts + 1
        self._gone.clear()
        self._silent_s = 0.0
        self._said, self._loads = None, messages.Loads()
        self._oom_kills = await asyncio.to_thread(oom_kills)
        hung = False
        child: Child | None = None
        try:
            child = self._child = await Child.start(
                self._module,
                name=self.name,
                on_message=lambda body: self._heard(run, body),
                on_closed=lambda: self._closed(run),
                listener=self.listener,
            )
            self.on_started()
            hung = await self._falls_silent()
            if hung:
                child.kill()
        finally:
            await self._bury(child, hung=hung)

    async def _falls_silent(self) -> bool:
        """Wait for the end of the process; True when it only says nothing any more.

        A tick counts for no more than `TICK_S`: a daemon that stood still itself has heard nobody,
        and blames nobody.
        """
        self._counted_until_s, limits = loop_time(), self._limits
        while self._silent_s < (limits.replace_s if self._is_ready else limits.start_s):
            was_up = self.is_up
            await set_by(self._gone, next_tick(TICK_S))
            if self._gone.is_set():  # also where it went at the very tick
                return False
            now = loop_time()
            self._silent_s += min(TICK_S, now - self._counted_until_s)
            self._counted_until_s = now
            if was_up and not self.is_up:
                self._up.clear()
                logger.warning("%s said nothing for %d s", self.name, self._silent_s)
                self.on_changed()
        logger.error("%s said nothing for %d s; it is replaced", self.name, self._silent_s)
        return True

    def _closed(self, run: int) -> None:
        if run == self.starts:  # one that could not be ended may close its end when it likes
            self._lose()

    def _lose(self) -> None:
        self._gone.set()
        self.look_again()

    async def _bury(self, child: Child | None, *, hung: bool) -> None:
        self._lose()
        self._is_ready = False
        self.on_changed()
        status: int | None = None
        try:
            if child is not None:  # closes the channel, which ends all but the hung
                status = await child.stop(STOP_TIMEOUT_S)
        except TimeoutError as error:  # the kernel does not let go of it
            logger.exception("%s cannot be ended", self.name, exc_info=error)
        finally:
            before, now = self._oom_kills, await asyncio.to_thread(oom_kills)
            self._child = None
            self.ending = ChildEnding(
                status,
                hung=hung,
                said=self._said,
                loading=self._loads.loading,
                of_memory=None not in (before, now) and before != now,
            )
            self.on_ended(self.ending)
            self.exchange.end(self.lost(self.ending))

    def _heard(self, run: int, body: bytes) -> None:
        if run != self.starts:
            return
        was_up = self.is_up
        self._silent_s = 0.0
        self._counted_until_s = loop_time()
        if self.is_up and not was_up:
            self._up.set()
            logger.warning("%s is heard again", self.name)
            self.on_changed()
        try:
            self.exchange.read(body)
        except BadRequest as error:
            logger.exception("%s is replaced", self.name)
            self._said = error
            self._lose()

    def _has_begun(self, first: asyncio.Future[Any]) -> None:
        error = first.exception()
        is_over = self.is_stopping or isinstance(error, ProcessLost)
        if error is None:
            self.ready()
            self.on_ready(first.result())
        elif isinstance(error, MeshError) and not is_over:
            self.on_failed(error)

    def _heard_last_words(self, words: messages.LastWords) -> None:
        self._said = words.error

    def _heard_loads(self, loads: messages.Loads) -> None:
        if loads.loading != self._loads.loading:
            self._loads_since_s = loop_time()
        self._loads = loads
