"""Deployments that rest, and what wakes them: nobody's use for long, and somebody's request.

One node has a deployment rest, the lowest id of those that hold it and are alive. What it knows of
the use of others' shards is what they advertise of their latest steps: a single step between two
advertisements may go unseen, an answer does not. Times are of the loop's clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Protocol

from mesh.clock import loop_time
from mesh.deployments.listing import ON_ITS_WAY, SeenDeployment
from mesh.deployments.phases import Phase
from mesh.deployments.turns import Turns
from mesh.deployments.wishes import Deployment, live
from mesh.deployments.world import World
from mesh.errors import MeshError, NoRoute, PipelineStalled
from mesh.processes.tasks import end, spawn
from mesh.types import BringingUp, GenerationRequest, ModelId

logger = logging.getLogger(__name__)

TICK_S = 1.0
LOOK_EVERY_S = 0.2

_FIRST_TOLD = (Phase.PROVISIONING, Phase.DEPLOYING, Phase.QUEUED)
_COMING = {each: each for each in ON_ITS_WAY} | {Phase.LEAVING: Phase.QUEUED}
"""What a span that is to come is in, and what is told of it: one that was woken while it was still
going to rest has to be gone before it is loaded anew."""


@dataclass(frozen=True, slots=True)
class Stay:
    """Until when a deployment stays up unless somebody uses it: `due_s` by the loop's clock,
    `rests_at` by the wall's. None while it is in use or brought up, and of one that never rests."""

    in_use: bool = False
    due_s: float | None = None
    rests_at: datetime | None = None


class Sleeper:
    """Has deployments rest that nobody has used for their keep-alive. `start`, then `stop`.

    `is_on_its_way`: whether one is still brought up; until then nobody could use it.
    """

    def __init__(
        self,
        house: World,
        tell: Callable[..., None],
        is_on_its_way: Callable[[Deployment], bool],
    ) -> None:
        self._house = house
        self._tell = tell
        self._is_on_its_way = is_on_its_way
        self._up_since: dict[str, float] = {}
        self._used_at: dict[str, float] = {}
        self._signs: dict[str, Hashable] = {}
        self._stays: dict[str, Stay] = {}
        self._looks = Turns("having deployments rest")
        self._turns = Turns("having a deployment rest")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._task = spawn(self._run(), "rest deployments")

    async def stop(self) -> None:
        """Watch no more."""
        await end([self._task])

    def up_s(self, deployment: str) -> float:
        """For how long this node has seen it wanted."""
        now = loop_time()
        return now - self._up_since.get(deployment, now)

    def stay(self, deployment: str) -> Stay:
        """Until when it stays up, as this node sees its use."""
        return self._stays.get(deployment, Stay())

    async def _run(self) -> None:
        while True:
            await self._looks.take("by their use", self._look)
            await asyncio.sleep(TICK_S)

    async def _look(self) -> None:
        now = loop_time()
        wanted = {each.id: each for each in live(self._house.deployments()) if each.is_wanted}
        for known in (self._up_since, self._used_at, self._signs, self._stays):
            for name in [each for each in known if each not in wanted]:
                del known[name]
        for name in wanted:
            self._up_since.setdefault(name, now)
            await self._turns.take(name, partial(self._turn, name, now))

    async def _turn(self, name: str, now: float) -> None:
        """See whether it is used, and have it rest if it is time for that."""
        deployment = self._house.deployments().get(name)  # as it is wished for after those before
        if deployment is None or not deployment.is_wanted:
            return
        use = self._house.use(deployment)
        is_used = use.is_busy or self._signs.get(name) != use.signs
        is_coming = self._is_on_its_way(deployment)
        if is_used or name not in self._used_at or is_coming:
            self._used_at[name], self._signs[name] = now, use.signs
        due_s = self._due_s(deployment)
        if use.is_busy or is_coming:
            self._stays[name] = Stay(in_use=not is_coming)
        else:
            self._stays[name] = self._stay(name, now, due_s)
        if due_s is not None and now >= due_s and self._is_mine(deployment):
            await self._rest(deployment)

    def _due_s(self, deployment: Deployment) -> float | None:
        """When it is to rest, as far as it was used until now; None of one that never is."""
        wish = deployment.wish
        if wish.dedicated or not wish.keep_alive_s or deployment.plan is None:
            return None
        least = self._up_since[wish.deployment] + wish.minimum_s
        return max(least, self._used_at[wish.deployment] + wish.keep_alive_s)

    def _stay(self, name: str, now: float, due_s: float | None) -> Stay:
        """The one that is known while nothing has changed: people are shown the same time."""
        known = self._stays.get(name)
        if due_s is None:
            return Stay()
        if known is not None and known.due_s == due_s:
            return known
        return Stay(due_s=due_s, rests_at=datetime.now(UTC) + timedelta(seconds=due_s - now))

    def _is_mine(self, deployment: Deployment) -> bool:
        """Whether it is this node that has it rest."""
        nodes = deployment.plan.nodes if deployment.plan is not None else set()
        return min(nodes & self._house.alive(), default=None) == self._house.node

    async def _rest(self, deployment: Deployment) -> None:
        self._used_at.pop(deployment.id)  # if it cannot be signed, it is tried again later
        try:
            await self._house.publish_wish(replace(deployment.wish, resting=True))
        except MeshError as error:
            logger.warning("deployment=%s stays up: %s", deployment.id, error)
            return
        self._tell("deployment_rests", deployment=deployment.id, model=deployment.wish.model_id)


class WakingVerbs(Protocol):
    """The verbs that waking uses; see `mesh.deployments.control`."""

    def seen(self, model: ModelId) -> list[SeenDeployment]:
        """What is seen of each deployment of a model."""

    async def wake(self, model: str, *, may_wake: bool) -> bool:
        """Wake what rests; whether anything had to."""


class Waker:
    """Brings a deployment up for a request, waits for layers that are held by hand and loading, and
    says how far that is."""

    def __init__(
        self,
        verbs: WakingVerbs,
        is_askable: Callable[[ModelId], bool],
        call_for: Callable[[str], None],
        patience_s: float,
        loading: Callable[[ModelId], BringingUp | None],
        is_asked: Callable[[ModelId], bool] = lambda model: True,
    ) -> None:
        """`is_askable`: whether this node can ask a model now; `call_for` has it be able to.
        `loading`: how far layers are that this node loads because it was told to hold them, None
        where it loads none. `is_asked`: whether there is anybody here who asks it and can say what
        is missing."""
        self._is_asked = is_asked
        self._verbs = verbs
        self._is_askable = is_askable
        self._call_for = call_for
        self._patience_s = patience_s
        self._loading = loading

    async def bring_up(self, request: GenerationRequest) -> AsyncGenerator[BringingUp, None]:
        """Yields how far it is whenever that changes, until the model can be asked; ends at once
        where it can, or where nothing is on its way.

        Raises Forbidden when it rests and the request may not wake it, NoRoute with the reason when
        it cannot be brought up, and PipelineStalled when that takes too long.
        """
        model = request.model
        if self._is_askable(model):
            return
        if is_deployed := bool(self._verbs.seen(model)):
            await self._verbs.wake(model, may_wake=request.may_wake)
        for each in self._verbs.seen(model):
            self._call_for(each.deployment.id)
        told: BringingUp | None = None
        until = loop_time() + self._patience_s  # no timeout: it would end whoever is told meanwhile
        while not self._is_askable(model):
            news = self._progress(model) if is_deployed else self._loading(model)
            if news is None and (is_deployed or told is None):
                self._require_asked(model)
                return  # who asks says what is missing
            if news is not None and news != told:
                yield news
            told = news  # what has loaded this moment is offered in the next
            if loop_time() >= until:
                raise PipelineStalled(
                    f"{model} was not up after {self._patience_s:g} s.",
                    fix="It goes on coming up; see `hearthnet status`, and ask again.",
                )
            await asyncio.sleep(LOOK_EVERY_S)

    async def on_its_way(self, model: ModelId, *, may_wake: bool) -> BringingUp | None:
        """How far a model is that is being brought up, woken first where it rests; None where all
        its layers are offered, or nothing of what is missing is on its way.

        Raises Forbidden when it rests and may not be woken, and NoRoute as `bring_up`.
        """
        await self._verbs.wake(model, may_wake=may_wake)
        if not all(each.missing for each in self._wanted(model)):
            return None
        return self._progress(model)

    def _progress(self, model: ModelId) -> BringingUp | None:
        """See `_progress`; None also where it was evicted meanwhile, or rests again."""
        wanted = self._wanted(model)
        return _progress(model, wanted) if wanted else None

    def _require_asked(self, model: ModelId) -> None:
        """Raise NoRoute for what is deployed and away, where nobody asks it here yet."""
        wanted = [] if self._is_asked(model) else self._wanted(model)
        missing = ", ".join(str(layers) for each in wanted[:1] for layers in each.missing)
        if missing:
            raise NoRoute(
                f"no node that is up serves layers {missing} of {model}, which is deployed.",
                fix="Wait until their machines are found, or start them: see `hearthnet status`.",
            )

    def _wanted(self, model: ModelId) -> list[SeenDeployment]:
        return [each for each in self._verbs.seen(model) if each.deployment.is_wanted]


def _progress(model: ModelId, wanted: Sequence[SeenDeployment]) -> BringingUp | None:
    """How far the spans are together, and what this node asks with; those that are fetched before
    those that are loaded. None where none of what is missing is on its way."""
    spans = [span for each in wanted for span in each.spans]
    is_lacking = any(each.missing for each in wanted)
    coming = [span.now for span in spans if span.now.phase in _COMING]
    failed = next((span for span in spans if span.now.phase is Phase.FAILED), None)
    if failed is not None and is_lacking:
        raise NoRoute(
            f"{failed.node} cannot hold layers {failed.span.layers} of {model}:"
            f" {failed.now.reason}",
            fix="See `hearthnet status`.",
        )
    if not coming and is_lacking:
        return None
    ends = [each.ends for each in wanted if each.ends is not None]
    for own in ends:
        if own.phase is Phase.FAILED:
            raise NoRoute(
                f"This machine has nothing to ask {model} with: {own.reason}",
                fix="It is tried again by itself: see `hearthnet logs`, and ask again.",
            )
    coming += [own for own in ends if own.phase in _COMING]
    phases = {_COMING[now.phase] for now in coming}
    phase = next((each for each in _FIRST_TOLD if each in phases), Phase.DEPLOYING)
    told = [now for now in coming if now.phase is phase]
    total, done = sum(now.total for now in told), sum(now.done for now in told)
    return BringingUp(model, phase.value, done * 100 // total if total else None)
