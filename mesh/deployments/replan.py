"""Planning anew without an operator: when a machine stays away, when one has no room for what it
was given, when a wish has no plan of its own, or when two copies share a machine and need not.

One node does it, the lowest id of those that are alive and trusted; where two believe that they are
the one, both plans are in the log and the same one counts everywhere. Times are of the loop's clock
and of what this node has seen itself: after a start everybody has just been seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import inf

from mesh.clock import backoff_s, loop_time
from mesh.deployments.laid import AvailableNode
from mesh.deployments.placement import make_plan, planner, require_pins, stale, without
from mesh.deployments.spreading import Crowded, crowded, spread
from mesh.deployments.turns import Turns
from mesh.deployments.wishes import Deployment, Plan, Span, live
from mesh.deployments.world import World
from mesh.errors import MeshError
from mesh.identity.naming import called
from mesh.processes.tasks import end, spawn
from mesh.types import NodeId

TICK_S = 1.0
SETTLE_S = 5.0
"""Whoever changes a wish has so long to plan it."""
RETRY_S = 30.0
LONGEST_RETRY_S = 600.0
"""Twice as long after each try that left something to be planned."""


class _Tries:
    """When something may be tried that is due: after a while, and less often each time."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._tried_at: dict[str, float] = {}
        self._tries: dict[str, int] = {}

    def over(self, deployment: str) -> None:
        """It is not due any more."""
        self._since.pop(deployment, None)
        self._tries.pop(deployment, None)

    def may_try(self, deployment: str, now: float) -> bool:
        """Whether it is time for what has been due since it was first asked about."""
        since = self._since.setdefault(deployment, now)
        tries = max(1, self._tries.get(deployment, 0))
        wait_s = backoff_s(tries, RETRY_S, LONGEST_RETRY_S)
        return now - since >= SETTLE_S and now - self._tried_at.get(deployment, -inf) >= wait_s

    def tried(self, deployment: str, now: float) -> None:
        """It is tried now."""
        self._tries[deployment] = self._tries.get(deployment, 0) + 1
        self._tried_at[deployment] = now


class Replanner:
    """`start`, then `stop`. A planned node that is away for `limit_s` is planned around."""

    def __init__(self, members: World, limit_s: float, tell: Callable[..., None]) -> None:
        self._members = members
        self._limit_s = limit_s
        self._tell = tell
        self._seen: dict[NodeId, float] = {}
        self._planning = _Tries()
        self._spreading = _Tries()
        self._looks = Turns("planning anew")
        self._turns = Turns("planning anew deployment", self._unplanned)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._task = spawn(self._run(), "plan deployments anew")

    async def stop(self) -> None:
        """Watch no more."""
        await end([self._task])

    async def _run(self) -> None:
        while True:
            await self._looks.take("all deployments", self._look)
            await asyncio.sleep(TICK_S)

    async def _look(self) -> None:
        now, machines = loop_time(), self._members.machines()
        alive = {machine.node for machine in machines}
        deployments = live(self._members.deployments())
        planned = {node for each in deployments if each.plan for node in each.plan.nodes}
        for node in planned | alive:
            if node in alive or node not in self._seen:
                self._seen[node] = now
        gone = {node: now - self._seen[node] for node in planned - alive}
        for deployment in deployments:
            turn = partial(self._turn, deployment, machines, gone, now)
            await self._turns.take(deployment.id, turn)

    async def _turn(
        self,
        deployment: Deployment,
        machines: Sequence[AvailableNode],
        gone_s: Mapping[NodeId, float],
        now: float,
    ) -> None:
        """Plan it anew if that is due, and this node's to do."""
        alive = {machine.node for machine in machines}
        names = self._names()
        refused = self._refused(deployment)
        why = stale(deployment, gone_s, self._members.trusted(), self._limit_s, names)
        why = why or _no_room(refused, names)
        if why is not None:
            if self._is_my_turn(self._planning, deployment, alive, now):
                await self._plan(deployment, machines, why, refused)
            return
        self._planning.over(deployment.id)
        found = crowded(deployment, machines)
        if found is None:
            self._spreading.over(deployment.id)
        elif self._is_my_turn(self._spreading, deployment, alive, now):
            await self._spread(deployment, found)

    def _is_my_turn(
        self, tries: _Tries, deployment: Deployment, alive: Collection[NodeId], now: float
    ) -> bool:
        is_time = tries.may_try(deployment.id, now)
        if not is_time or planner(deployment, alive) != self._members.node:
            return False
        tries.tried(deployment.id, now)
        return True

    def _refused(self, deployment: Deployment) -> Collection[Span]:
        """Of a plan that counts; what is pinned stays where it is."""
        if not (deployment.is_wanted and deployment.is_planned):
            return ()
        pins = deployment.wish.pins
        return [span for span in self._members.refused(deployment) if span not in pins]

    async def _plan(
        self,
        deployment: Deployment,
        machines: Sequence[AvailableNode],
        why: str,
        refused: Collection[Span],
    ) -> None:
        # A wish whose author could not plan it any more was still an operator's.
        plan = deployment.plan
        asked = not deployment.is_planned or (bool(refused) and plan is not None and plan.asked)
        wish, before = deployment.wish, without(plan, refused)
        require_pins(wish, machines, self._names())
        laid = await self._members.laid_out(wish, before, {})
        new = make_plan(wish, deployment.event, machines, before, asked=asked, why=why, laid=laid)
        if plan is None or _differs(new, plan):
            await self._members.publish_plan(new)
        self._tell("deployment_planned", deployment=deployment.id, reason=why)

    async def _spread(self, deployment: Deployment, found: Crowded) -> None:
        """Move a copy, where the planner knows a place for it."""
        plan = deployment.plan
        laid = await self._members.laid_out(found.alone(deployment.wish), None, {})
        if plan is None or not laid.replicas:
            return
        why = found.why(self._names())
        await self._members.publish_plan(spread(plan, found, laid.replicas[0], why))
        self._tell("deployment_planned", deployment=deployment.id, reason=why)

    def _names(self) -> dict[NodeId, str]:
        """What to call the nodes."""
        return called(self._members.names().items())

    def _unplanned(self, deployment: str, error: MeshError) -> None:
        self._tell("deployment_unplanned", deployment=deployment, reason=error.message)


def _no_room(refused: Collection[Span], names: Mapping[NodeId, str]) -> str | None:
    """What is said of a plan with spans that their machines have no room for."""
    said = [f"{names.get(s.node, s.node)} has no room for layers {s.layers}" for s in refused]
    return f"{said[0]}{f' and {len(said) - 1} more' if said[1:] else ''}" if said else None


def _differs(one: Plan, other: Plan) -> bool:
    return one.replicas != other.replicas or one.wish != other.wish
