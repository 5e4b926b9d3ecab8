"""The daemon's side of the shard process: tells it what to load, hears how it is doing.

One process serves all shards of one device (`mesh.shard.process`). A crash of it is those shards'
failure, not the node's: it is started again and loads the same shards. Imports no torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec import structs

from mesh.clock import loop_time
from mesh.errors import (
    Busy,
    DeviceFailed,
    InternalError,
    MeshError,
    PortInUse,
    ProcessLost,
    WeightsCorrupted,
)
from mesh.processes.attempts import Attempts
from mesh.processes.lifecycle import ChildEnding, SilenceLimits
from mesh.processes.messages import Handlers
from mesh.processes.supervisor import Supervisor
from mesh.shard.commands import (
    Distrust,
    Health,
    Listening,
    Load,
    Loaded,
    Pause,
    RevokeTokens,
    ShardReport,
    ShardRequest,
    StartShards,
    Unload,
    Withdrawn,
    traces_of,
)
from mesh.shard.local_shard import KnownShard, LocalShard
from mesh.types import ShardId

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 600.0
_NOTABLE_MB = 64
"""A footprint that changed by more is advertised at once."""


class ShardSupervisor(Supervisor):
    """Runs the shard process and has it serve the shards that are `wanted`.

    `health` is what it said last of how it does, empty before.
    """

    def __init__(
        self,
        start: StartShards | None,
        shards: Sequence[ShardRequest],
        on_change: Callable[[], None],
        limits: SilenceLimits | None = None,
        module: str = "mesh.shard.process",
        attempts: Attempts | None = None,
        device: str = "",
    ) -> None:
        """`module` calls `mesh.shard.process.main`; `attempts` says when a load is tried again;
        `device` is its name, where the node has several."""
        super().__init__(f"the shards' process{device and f' on {device}'}", module, start, limits)
        self.device = device
        self.wanted = {request.shard_id: request for request in shards}
        self.reasons: tuple[str, ...] = ()
        self.health = Health()
        self.port: int | None = None
        self._on_change = on_change
        self._revoked: tuple[str, ...] = ()
        self._attempts = attempts or Attempts()
        self._unable: MeshError | None = None  # why the latest process could not begin
        self._known: defaultdict[ShardId, KnownShard] = defaultdict(KnownShard)

    @property
    def processes(self) -> Mapping[str, ShardSupervisor]:
        """Those of the node's devices by their names: this is the only one."""
        return {self.device: self}

    @property
    def shards(self) -> dict[ShardId, LocalShard]:
        """What is here of the wanted ones."""
        return {name: here for name in self.wanted if (here := self._known[name].here) is not None}

    @property
    def private(self) -> dict[ShardId, LocalShard]:
        """What was loaded with `ensure`, for this node alone."""
        here = {name: known.here for name, known in self._known.items() if name not in self.wanted}
        return {name: shard for name, shard in here.items() if shard is not None}

    @property
    def private_serving(self) -> dict[ShardId, LocalShard]:
        """Of that, what may be used now."""
        return self.private if self.is_up else {}

    @property
    def failed(self) -> dict[ShardId, MeshError]:
        """Why wanted ones are not here."""
        return {name: why for name in self.wanted if (why := self._known[name].error) is not None}

    @property
    def serving(self) -> list[LocalShard]:
        """What may be offered now: nothing while the process does not answer."""
        return list(self.shards.values()) if self.is_up else []

    async def ensure(self, request: ShardRequest) -> LocalShard:
        """A shard that this node may use: loaded now, for it alone, unless it is here already. What
        it has for itself is loaded anew where it is to be otherwise.

        One of those it is to serve is waited for, and served as well. Raises what loading raises,
        InternalError when it takes too long, or Busy when the process is being stopped.
        """
        name = request.shard_id
        if name not in self.wanted and (known := self._known[name]).here and known.asked != request:
            await self.drop(name, 0.0)
        if (here := self._here(name)) is not None:
            return here
        if self.is_stopping:  # a second process would take the port of the one that drains
            raise Busy("this node is stopping.", fix="Ask another node, or start this one again.")
        self.start()
        if (refusal := self._why_not(name)) is not None:
            raise refusal
        try:
            async with asyncio.timeout(START_TIMEOUT_S + LOAD_TIMEOUT_S):
                await self._left(name)
                await self.wait_up()
                here, wanted = self._here(name), self.wanted.get(name, request)
                return here if here is not None else await asyncio.shield(self._load(wanted))
        except TimeoutError:
            raise InternalError(f"{name} did not load in time.", fix="See the log.") from None

    async def serve(self, request: ShardRequest) -> LocalShard:
        """Serve this from now on, also after the process was started anew.

        Raises as `ensure`; then it is not served, nor tried again.
        """
        known = self._known[name := request.shard_id]
        await self._left(name)
        if name not in self.wanted and known.asked != request and (known.here or known.loading):
            await self.drop(name, 0.0)  # this node alone wanted it otherwise
        if known.ordered not in (None, request):
            self._attempts.forget_one(name)
        known.ordered = request
        if name not in self.wanted or not (known.here or known.loading):
            self.wanted[name] = request
            self._on_change()
        try:
            return await self.ensure(request)
        except BaseException:
            is_there = known.here is not None or known.loading is not None
            self._forget(name)
            if is_there:  # it goes when it has come: asked once more, the process would refuse it
                self._leave(name, 0.0)
            raise

    async def drop(self, name: ShardId, grace_s: float) -> int:
        """Serve it no longer; who uses it gets `grace_s` to move. How many sessions were ended,
        once its memory is given back. Raises InternalError when that is not said in time."""
        self._forget(name)
        self._on_change()
        if self.pid is None:
            return 0
        leaving = self._known[name].leaving or self._leave(name, grace_s)
        await _over(leaving, grace_s + LOAD_TIMEOUT_S, name)
        return 0 if isinstance(leaving.exception(), ProcessLost) else leaving.result()

    def distrust(self, name: ShardId, error: MeshError) -> None:
        """Load it anew, if it is here."""
        if self._known[name].here is not None:
            self.tell(Distrust(name, error))

    def has(self, name: ShardId) -> bool:
        """Whether it serves this, or is to, or has it for this node alone, or is busy with it."""
        known = self._known[name]
        return name in self.wanted or bool(known.here or known.loading or known.leaving)

    def knows(self, name: ShardId) -> bool:
        """Whether a wanted shard has loaded or failed."""
        return self._known[name].here is not None or self._known[name].error is not None

    def try_again(self) -> None:
        """Load what did not load, whatever happened when that was tried."""
        self._attempts.forget()
        self._load_missing()

    def pause(self, paused: bool) -> None:
        """Ask whoever has a session here to move it elsewhere; False takes that back."""
        logger.info("askers are told to %s", "move" if paused else "come back if they like")
        self.exchange.ask(Pause(paused))

    def revoke_tokens(self, token_ids: Sequence[str]) -> None:
        """Exactly these tokens are revoked: sessions that were opened with one of them end."""
        self._revoked = tuple(token_ids)
        self.tell(RevokeTokens(self._revoked))

    async def stop(self) -> None:
        """End the process, which says goodbye to askers, and wait for it."""
        await self.drain(0.0)

    # What a kind of process decides

    def answers(self) -> Handlers:
        """What the shard process says of itself."""
        return {Withdrawn: self._withdrawn, Health: self._reported}

    def on_started(self) -> None:
        """Tell a new shard process where to listen."""
        self.tell(RevokeTokens(self._revoked))
        super().on_started()

    def on_ready(self, answer: Listening) -> None:
        """Load what is to be served."""
        self._unable = None
        self._use_port(answer.port)
        self.reasons = answer.reasons
        self._load_missing()
        self._on_change()

    def on_failed(self, error: MeshError) -> None:
        """Where it does not listen another is tried; one that is set up wrong stays, and serves
        nothing."""
        if isinstance(error, PortInUse | DeviceFailed):
            super().on_failed(error)
        if isinstance(error, PortInUse) and self.port is not None:
            logger.warning("%s The shards move to another port.", error.message)
            self._use_port(None)
            return
        self._unable = error
        self.look_again()
        for name in self.wanted:
            self._did_not_load(name, error)

    def why_not_wait(self) -> MeshError | None:
        """That it is to stop, or why it could not begin."""
        return super().why_not_wait() or self._unable

    def on_ended(self, ending: ChildEnding) -> None:
        """Withdraw the shards of a process that is no more."""
        for known in self._known.values():
            known.here = None
        self.health = Health()
        if ending.loading is not None:
            error = self._attempts.died(ending.loading, ending, loop_time())
            self._did_not_load(ShardId(ending.loading.name), error)
        self._on_change()

    def on_changed(self) -> None:
        """Have it known that the process fell silent, was heard again or is gone."""
        self._on_change()

    # What the process says

    def _has_loaded(self, request: ShardRequest, answer: asyncio.Future[Loaded]) -> None:
        error = answer.exception()
        if error is None:
            self._loaded(answer.result())
        elif isinstance(error, ProcessLost):
            self._not_loaded(request.shard_id, error)
        elif isinstance(error, MeshError):
            name = request.shard_id
            # What this node tried for itself, asked otherwise, keeps nobody's wish waiting.
            tried = name if name in self.wanted else _alone(name)
            self._attempts.failed(tried, error, loop_time(), self._free_mb[1])
            self._did_not_load(name, error)

    def _loaded(self, answer: Loaded) -> None:
        shard, name = LocalShard(answer), answer.descriptor.shard_id
        self._attempts.succeeded(name)
        self._attempts.succeeded(_alone(name))
        known = self._known[name]
        if known.loading is not None:
            known.loading.set_result(shard)
            known.loading = None
        if known.leaving is not None:
            return  # it was told to go meanwhile
        known.here, known.error = shard, None
        if name in self.wanted:
            self._on_change()

    def _withdrawn(self, answer: Withdrawn) -> None:
        """The process serves it no longer: its weights have changed."""
        name, error = answer.shard_id, self._attempts.corrupted(answer.shard_id, answer.error)
        known = self._known[name]
        if name in self.wanted and known.here is not None:
            known.error = error
        known.here = None
        logger.error("shard=%s withdrawn: %s", name, error)
        self._on_change()
        self._load_missing()

    def _reported(self, answer: Health) -> None:
        self.health = answer
        notable = [self._take(report, answer.rss_mb) for report in answer.shards]
        if any(notable):
            self._on_change()
        self._load_missing()

    # Private

    def _use_port(self, port: int | None) -> None:
        """Peers know the old endpoint; coming back on it spares them an advertisement."""
        self.port = port
        if isinstance(self.first_command, StartShards):
            self.first_command = structs.replace(self.first_command, listen_port=port or 0)

    def _here(self, name: ShardId) -> LocalShard | None:
        return self._known[name].here if self.is_up else None

    def _why_not(self, name: ShardId) -> MeshError | None:
        """Why a shard is not to be loaded now, after what happened when it was."""
        names = [name] if name in self.wanted else [name, _alone(name)]
        found = (self._attempts.why_not(each, loop_time(), *self._free_mb) for each in names)
        return next(filter(None, found), None)

    @property
    def _free_mb(self) -> tuple[int, int]:
        """Of main memory, and of the device's: as they were when the process looked last."""
        memory = self.health.memory
        return (0, 0) if memory is None else (memory.ram_mb, memory.free_mb)

    def _load_missing(self) -> None:
        """Ask for every wanted shard that is not here and may be tried."""
        for name, request in self.wanted.items():
            if self._here(name) is None and self._why_not(name) is None and self.is_up:
                self._load(request)

    def _load(self, request: ShardRequest) -> asyncio.Future[LocalShard]:
        """Ask for it unless that was done: asked twice, the process refuses what it just loaded."""
        known = self._known[name := request.shard_id]
        if known.loading is None:
            known.asked = request
            known.loading = asyncio.get_running_loop().create_future()
            if self._why_not(traces_of(name)) is not None:  # its weights once more were too many
                request = dataclasses.replace(request, max_tap_sessions=0)
            why = known.error.message if isinstance(known.error, WeightsCorrupted) else ""
            self.exchange.ask(Load(request, why), partial(self._has_loaded, request))
        return known.loading

    def _did_not_load(self, name: ShardId, error: MeshError) -> None:
        self._not_loaded(name, error)
        if name in self.wanted:
            self._known[name].error = error
            logger.error("shard=%s failed: %s", name, error)
            self._on_change()

    def _not_loaded(self, name: ShardId, error: MeshError) -> None:
        if (loading := self._known[name].loading) is not None:
            loading.set_exception(error)
            loading.exception()  # often nobody waits, which is no error of its own
            self._known[name].loading = None

    def _forget(self, name: ShardId) -> None:
        """It is not to be served."""
        self.wanted.pop(name, None)
        known = self._known[name]
        known.asked = known.here = known.error = None

    def _leave(self, name: ShardId, grace_s: float) -> asyncio.Future[int]:
        def left(_: object) -> None:
            self._known[name].leaving = None

        leaving = self._known[name].leaving = self.exchange.ask(Unload(name, grace_s), left)
        return leaving

    async def _left(self, name: ShardId) -> None:
        """Until it is unloaded, where it is to go: what loaded meanwhile would be taken for it."""
        while (leaving := self._known[name].leaving) is not None:
            await _over(leaving, LOAD_TIMEOUT_S, name)

    def _take(self, report: ShardReport, rss_mb: float) -> bool:
        """Take note of it; whether others should know before the next heartbeat."""
        if (shard := self._known[report.shard_id].here) is None:
            return False
        before, now = shard.health.memory, report.health.memory
        shard.report, shard.rss_mb = report, rss_mb
        return before is None or now is None or abs(before.total_mb - now.total_mb) > _NOTABLE_MB


async def _over(leaving: asyncio.Future[int], within_s: float, name: ShardId) -> None:
    done, _ = await asyncio.wait([leaving], timeout=within_s)
    if not done:  # it may be loading, from a disk that hangs
        raise InternalError(f"{name} was not unloaded in time.", fix="See the log.")


def _alone(name: ShardId) -> str:
    """What is known of loads of it that were private."""
    return f"{name} for this node alone"
