"""The loop that makes what this node holds what is wished: decides, acts, looks again.

`mesh.deployments.reconcile` decides; here loads and drops are tasks that one owner starts, watches
and ends. Nothing is kept: after a restart the log says it all. What the node is made of is asked
through `World`, so that this knows neither processes nor links.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mesh.clock import loop_time, set_within
from mesh.deployments.phases import FIRST_WAIT_S, LONGEST_WAIT_S, Phase, Phases
from mesh.deployments.provisioning import Provisioning
from mesh.deployments.reconcile import (
    Decision,
    DropAction,
    LoadAction,
    OwnShard,
    ShardStage,
    View,
    wishes_of,
)
from mesh.deployments.seats import reconcile_devices, seated
from mesh.deployments.turns import Turns
from mesh.deployments.weights import WeightsSource, local_model
from mesh.deployments.wishes import Deployment, live, merged
from mesh.deployments.world import World
from mesh.errors import MeshError, as_mesh_error
from mesh.models.local import LocalModel
from mesh.processes.tasks import end, spawn
from mesh.types import LayerRange, ModelId, NodeId, ShardId

logger = logging.getLogger(__name__)

TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class ReconcilerHooks:
    """`tell` has an event's type and fields, for people; `changed` says that something moved."""

    tell: Callable[..., None]
    changed: Callable[[], None]


class Reconciler:
    """`start`, then `look` whenever something may have changed, then `stop`."""

    def __init__(
        self, world: World, weights: WeightsSource, hooks: ReconcilerHooks, cache_dir: Path | None
    ) -> None:
        self.phases = Phases(self._moved)
        self._world = world
        self._weights = weights
        self._hooks = hooks
        self._cache_dir = cache_dir
        self._provisioning = Provisioning(self.phases, self._ended)
        self._loads: dict[ShardId, asyncio.Task[None]] = {}
        self._left_mb: dict[str, int] = {}
        """What is free on a device once what is loading has all that it will take."""
        self._seats: Mapping[ShardId, str] = {}
        """The devices of what is held or wished for, when that was looked at last."""
        self._drops: dict[ShardId, asyncio.Task[None]] = {}
        self._asks: dict[ModelId, asyncio.Task[None]] = {}
        self._ends_of_asking: dict[ModelId, asyncio.Task[None]] = {}
        self._called_for: set[str] = set()
        """Deployments that somebody here wants to ask, though nothing of them is placed here."""
        self._due = asyncio.Event()
        self._looks = Turns("looking after the shards")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to act."""
        self._task = spawn(self._run(), "deployments")

    async def stop(self) -> None:
        """Act no more; what is loaded stays until its process ends."""
        begun = (self._loads, self._drops, self._asks, self._ends_of_asking)
        tasks = [task for each in begun for task in each.values()]
        await end([self._task, *tasks])
        await self._provisioning.stop()

    def look(self) -> None:
        """The log, a peer or a process may have changed."""
        self._due.set()

    def call_for(self, deployment: str) -> None:
        """Somebody wants to ask this one here."""
        self._called_for.add(deployment)
        self.look()

    def try_again(self) -> None:
        """Whatever failed is tried again now."""
        self.phases.try_again()
        self._looks.try_again()
        self.look()

    async def _run(self) -> None:
        while True:
            self._due.clear()
            await self._looks.take("of this node", self._step)
            await set_within(self._due, TICK_S)

    async def _step(self) -> None:
        free_mb = self._free_mb()
        view = self._view(len(free_mb))
        wanted = wishes_of(view)
        for shard in [each for each in self._loads if each not in wanted]:
            self._loads[shard].cancel()  # what it has loaded meanwhile is dropped next time
        for shard, error in self._world.failed().items():
            if shard in wanted and shard not in self._loads and shard not in self._drops:
                self.phases.failed(shard, error, loop_time())
                self._begin(self._drops, shard, self._let_go(DropAction(shard, "it failed")))
        need_mb = self._world.need_mb
        if len(free_mb) > 1:
            await self._world.get_to_know(each.wish for each, _ in wanted.values())
        seats = seated(view, free_mb, need_mb, self._world.asking_mb)
        ending = {shard: seat for shard, seat in self._seats.items() if shard in self._loads}
        self._seats = ending | seats
        decision = reconcile_devices(view, seats, free_mb, need_mb)
        self._follow(view, free_mb, decision)
        self._world.dedicate([shard for shard, (each, _) in wanted.items() if each.wish.dedicated])
        self._note(view, wanted, decision)
        self._look_after_asking(view, decision.unfetched)

    def _follow(self, view: View, free_mb: Mapping[str, int | None], decision: Decision) -> None:
        """Begin and end what is decided."""
        coming = {held.shard for held in view.held if held.is_to_come}
        self._provisioning.keep_only(coming - {drop.shard for drop in decision.drops})
        for drop in decision.drops:
            if drop.shard in self._loads:
                self._loads[drop.shard].cancel()
            elif drop.shard not in self._drops and drop.shard not in coming:
                self._begin(self._drops, drop.shard, self._drop(drop))
        for fetch in decision.fetches:
            deployment = view.deployments[fetch.deployment]
            shard = self._not_held(fetch.shard, deployment, fetch.layers, fetch.mb)
            self._provisioning.begin(shard, partial(self._fetch, deployment, fetch))
        if (load := decision.load) is not None:
            model = self._provisioning.take(load.shard)
            device = self._seats[load.shard]
            if (free := free_mb[device]) is not None:
                self._left_mb[device] = free - load.mb
            loading = self._load(view.deployments[load.deployment], load, model)
            self._begin(self._loads, load.shard, loading)

    def _view(self, devices: int) -> View:
        world = self._world
        held = {each.shard: each for each in world.held()}
        deployments = world.deployments()
        self.phases.wished(
            {
                name: each.event
                for each in live(deployments)
                for name in each.shards_of(world.node, devices)
            }
        )
        busy = [
            (shard, ShardStage.LEAVING if shard in self._drops else ShardStage.LOADING)
            for shard in [*self._drops, *self._loads]
            if shard not in held
            or held[shard].state is not ShardStage.READY
            or shard in self._drops
        ]
        for shard, state in busy:
            wished = _wished(shard, deployments, world.node, devices)
            if shard in held:
                held[shard] = replace(held[shard], state=state)
            elif wished is not None:  # no process knows of it yet, or any more
                held[shard] = replace(self._not_held(shard, *wished), state=state)
        for each in self._provisioning.to_come():
            wished = _wished(each.shard, deployments, world.node, devices)
            mb = each.mb if wished is None else world.need_mb(*wished, each.device) or each.mb
            held.setdefault(each.shard, replace(each, mb=mb))
        return View(
            world.node,
            deployments,
            list(held.values()),
            world.served(),
            None,
            lambda deployment, layers: world.need_mb(deployment, layers, "") or 0,
            not_yet=self.phases.not_yet(loop_time()),
            devices=devices,
        )

    def _free_mb(self) -> dict[str, int | None]:
        """What is free on each device beside what is loading, which takes its memory bit by bit."""
        loading = {self._seats.get(shard) for shard in self._loads}
        self._left_mb = {d: mb for d, mb in self._left_mb.items() if d in loading}
        return {
            device: mb if mb is None else min(mb, self._left_mb.get(device, mb))
            for device, mb in self._world.free_mb().items()
        }

    def _not_held(
        self, shard: ShardId, deployment: Deployment, layers: LayerRange, mb: int = 0
    ) -> OwnShard:
        """A shard that takes nothing now, and perhaps `mb` later."""
        wish, device = deployment.wish, self._seats.get(shard, "")
        return OwnShard(shard, wish.model_id, wish.weights_sha256, layers, mb, device=device)

    def _note(
        self,
        view: View,
        wanted: Mapping[ShardId, tuple[Deployment, LayerRange]],
        decision: Decision,
    ) -> None:
        """Say how far each span is."""
        waiting = decision.waiting or {}
        for held in view.held:
            is_ready = held.state is ShardStage.READY and held.shard not in waiting
            if held.shard in wanted and is_ready:
                self.phases.ready(held.shard)
        failing = view.not_yet or {}
        for shard, reason in waiting.items():
            if shard not in failing:
                lacks = shard in decision.lacking
                self.phases.put(shard, Phase.QUEUED, reason, lacks_memory=lacks)
        ends = {each.ends for each in live(view.deployments) if each.is_wanted}
        self.phases.keep_only({*wanted, *self._drops, *self._loads, *ends})

    # Loading and dropping

    async def _fetch(self, deployment: Deployment, fetch: LoadAction) -> LocalModel:
        refusal = self._world.refusal(deployment, fetch.layers)
        if refusal is not None:
            raise refusal
        return await self._provide(deployment, fetch.shard)

    async def _load(self, deployment: Deployment, load: LoadAction, model: LocalModel) -> None:
        shard, loading = load.shard, self._bring_up(deployment, load, model)
        try:
            await as_mesh_error(loading, f"loading {shard}")
            self.phases.ready(shard)
        except MeshError as error:
            logger.warning("deployment=%s shard=%s: %s", deployment.id, shard, error)
            self.phases.failed(shard, error, loop_time())

    async def _bring_up(self, deployment: Deployment, load: LoadAction, model: LocalModel) -> None:
        shard = load.shard
        self.phases.put(shard, Phase.DEPLOYING)
        await self._ask_as_wished(deployment, model)
        far = partial(self.phases.bytes, shard)
        device = self._seats.get(shard, "")
        await self._world.serve(self._now(deployment), load, device, far)

    async def _ask_here(self, deployment: Deployment, shard: ShardId) -> None:
        await self._ask_as_wished(deployment, await self._provide(deployment, shard))

    async def _ask_as_wished(self, deployment: Deployment, model: LocalModel) -> None:
        await self._world.ask(replace(model, quant=self._now(deployment).wish.quant))
        if self.phases.get(deployment.ends) is not None:
            self.phases.ready(deployment.ends)

    def _now(self, deployment: Deployment) -> Deployment:
        """As it is wished by now: files take their time to come."""
        return self._world.deployments().get(deployment.id, deployment)

    async def _provide(self, deployment: Deployment, shard: ShardId) -> LocalModel:
        """The files of what this node is to hold of it, on this disk."""
        wish = deployment.wish
        layers = list(deployment.shards_of(self._world.node).values())
        last = wish.total_layers - 1
        directory = await self._weights.ensure(
            wish.model_id,
            wish.weights_sha256,
            layers,
            partial(self.phases.bytes, shard),
            runs_ends=any(0 in span or last in span for span in layers),
        )
        return await asyncio.to_thread(
            local_model, directory, wish.model_id, wish.weights_sha256, self._cache_dir
        )

    async def _drop(self, drop: DropAction) -> None:
        if drop.gap:
            self._hooks.tell("deployment_gap", shard_id=drop.shard, reason=drop.why)
        await self._let_go(drop)

    async def _let_go(self, drop: DropAction) -> None:
        if drop.why != "it failed":
            self.phases.put(drop.shard, Phase.LEAVING, drop.why)
        logger.info("shard=%s is unloaded: %s", drop.shard, drop.why)
        wait_s = FIRST_WAIT_S
        while not await self._is_unserved(drop):
            await asyncio.sleep(wait_s)
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)

    async def _is_unserved(self, drop: DropAction) -> bool:
        """Serve it no more; False where that failed, and it is still held."""
        unserving = self._world.unserve(drop.shard)
        try:
            ended = await as_mesh_error(unserving, f"unloading {drop.shard}")
        except MeshError as error:
            logger.warning("shard=%s cannot be unloaded: %s", drop.shard, error)
            return all(held.shard != drop.shard for held in self._world.held())
        self._hooks.tell("shard_unloaded", shard_id=drop.shard, reason=drop.why, ended=ended)
        return True

    # Asking

    def _look_after_asking(self, view: View, unfetched: Collection[ShardId]) -> None:
        """Ask what is placed here, was deployed from here or is called for, and nothing else. That
        has to be fetched too: unless it is called for it waits for its plan, which may have layers
        for this node, and with what is `unfetched`, whose turn it would take."""
        here, deployments = view.node, view.deployments
        wanted, resting = dict[ModelId, Deployment](), set[ModelId]()
        for each in live(deployments):
            placed = each.plan is not None and here in each.plan.nodes
            if not each.is_wanted:
                resting.add(each.wish.model_id)
            elif placed or each.author == here or self._called_for & _names(deployments, each):
                wanted.setdefault(each.wish.model_id, each)
        self._called_for &= {name for d in live(deployments) for name in _names(deployments, d)}
        asked = self._world.asked()
        for model_id in self._asks.keys() - wanted.keys():
            self._asks[model_id].cancel()  # nobody needs what it fetches any more
        serving = {held.model_id for held in view.held}
        alive = {(each.wish.model_id, each.wish.weights_sha256) for each in live(deployments)}
        for model_id, weights in self._world.known().items():
            is_gone = (model_id, weights) not in alive  # others may have come by its name
            # Layers that stay until others serve them are known by the model that they are of.
            forget = is_gone or model_id not in resting | serving
            is_idle = (is_gone or model_id not in wanted) and model_id not in self._asks
            if is_idle and (forget or model_id in asked):
                ending = self._world.ask_no_more(model_id, forget=forget)
                self._begin(self._ends_of_asking, model_id, ending)
        # Behind that: what goes by a model's name is to be gone before others are asked by it.
        for model_id, deployment in wanted.items():
            name = deployment.ends
            called = self._called_for & _names(deployments, deployment)
            is_planned = deployment.plan is not None
            comes_later = not is_planned or deployment.shards_of(here).keys() & unfetched
            waits = not called and bool(comes_later)
            waits = waits or model_id in self._ends_of_asking
            waits = waits or self._world.asks(deployment.wish)
            if name not in self.phases.not_yet(loop_time()) and not waits:
                self._begin(self._asks, model_id, self._ask(deployment, name))

    async def _ask(self, deployment: Deployment, name: ShardId) -> None:
        self.phases.put(name, Phase.PROVISIONING)
        try:
            await as_mesh_error(self._ask_here(deployment, name), f"asking {name}")
        except MeshError as error:
            logger.warning("deployment=%s cannot be asked here: %s", deployment.id, error)
            self.phases.failed(name, error, loop_time())

    # Tasks

    def _begin(
        self, tasks: dict[Any, asyncio.Task[None]], key: str, work: Coroutine[Any, Any, None]
    ) -> None:
        """One task for a key at a time; the loop looks again when it has ended."""
        if key in tasks:
            work.close()
            return
        task = tasks[key] = spawn(work, f"deployments: {key}")

        def ended(_: asyncio.Task[None]) -> None:
            tasks.pop(key, None)
            self._ended()

        task.add_done_callback(ended)

    def _ended(self) -> None:
        self.look()
        self._hooks.changed()

    def _moved(self, shard: ShardId, now: Any) -> None:
        if now.phase is not Phase.QUEUED:
            self._hooks.tell("deployment_span", shard_id=shard, **now.row())
        self._hooks.changed()


def _names(deployments: Mapping[str, Deployment], deployment: Deployment) -> set[str]:
    """Its id, and those that were merged into it."""
    return {deployment.id, *(each.id for each in merged(deployments, deployment.id))}


def _wished(
    shard: ShardId, deployments: Mapping[str, Deployment], node: NodeId, devices: int
) -> tuple[Deployment, LayerRange] | None:
    """Who has a node hold a shard now, and its layers."""
    for each in live(deployments):
        layers = each.shards_of(node, devices).get(shard)
        if layers is not None:
            return each, layers
    return None
