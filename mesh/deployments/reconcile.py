"""What a node does next, so that what it holds becomes what is wished: pure.

One node's view goes in, at most one load and any number of drops come out, with the reason for
whatever has to wait. Asked again after each, it ends with nothing to do. The rules:

- Where memory allows, the new is loaded before the old is dropped.
- A shard that nobody wishes for any more goes once every layer of it is served by shards that the
  plans do wish for, so that two nodes never drop for each other's sake. What nobody wishes to have
  at all, because its deployment was evicted, goes at once.
- Where memory does not allow that, the old goes first if an operator asked for the change; the
  order is the seed's (delete, then create), and the gap is told. A plan that a node made by itself
  never opens a gap: then the new one waits.
- A shard of the wished layers in another number format, or with caches for fewer positions, is not
  what is wished. Its name is that of the one to come, so that it goes first, one at a time, and the
  gap is told: another format is always an operator's wish, whoever made the plan. Where the new one
  would not fit in its place, it stays.
- Never over memory: a load is let in only when it fits what is free, one at a time.
- What is held by hand (`--model`, `--layers`) is neither loaded nor dropped here.

Knows no clock, no log and no process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mesh.deployments.formats import UNTOLD, LoadedFormat, is_as_wished
from mesh.deployments.wishes import Deployment, live
from mesh.types import LayerRange, ModelId, NodeId, ShardId


class ShardStage(StrEnum):
    """How far a node is with a shard."""

    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class OwnShard:
    """A shard that this node holds or is busy with; `mb` is what it takes. `by_hand`: its owner
    configured it."""

    shard: ShardId
    model_id: ModelId
    weights_sha256: str
    layers: LayerRange
    mb: int
    state: ShardStage = ShardStage.READY
    by_hand: bool = False
    loaded: LoadedFormat = UNTOLD


@dataclass(frozen=True, slots=True)
class ServedShard:
    """A shard that another node serves now; it is the same one however it is `loaded`."""

    node: NodeId
    model_id: ModelId
    weights_sha256: str
    layers: LayerRange
    loaded: LoadedFormat = field(default=UNTOLD, compare=False)


@dataclass(frozen=True, slots=True)
class View:
    """All that a node decides by.

    `free_mb` is what is free beside all that is held or loading, None where nobody knows; then
    what loads is let in and refused by its process. `need_mb` says what some layers would take.
    `not_yet` are shards whose last try failed and that wait for the next, with the reason.
    `own_quant` is the number format of the node's own settings.
    """

    node: NodeId
    deployments: Mapping[str, Deployment]
    held: Sequence[OwnShard]
    served: Collection[ServedShard]
    free_mb: int | None
    need_mb: Callable[[Deployment, LayerRange], int]
    not_yet: Mapping[ShardId, str] | None = None
    own_quant: str = ""


@dataclass(frozen=True, slots=True)
class LoadAction:
    """Fetch and serve these layers."""

    deployment: str
    shard: ShardId
    layers: LayerRange
    mb: int


@dataclass(frozen=True, slots=True)
class DropAction:
    """Serve this shard no longer. With a `gap` there is a while in which nobody serves its layers;
    `why` says what for."""

    shard: ShardId
    why: str
    gap: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done now, and what waits for what, by shard. What is `lacking` waits for room
    that nobody here makes."""

    load: LoadAction | None = None
    drops: tuple[DropAction, ...] = ()
    waiting: Mapping[ShardId, str] | None = None
    lacking: frozenset[ShardId] = frozenset()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.load is None and not self.drops


def reconcile(view: View) -> Decision:
    """The next steps of one node; see the module."""
    wanted = wishes_of(view)
    surplus = [
        held
        for held in view.held
        if not held.by_hand and held.shard not in wanted and held.state is not ShardStage.LEAVING
    ]
    drops = [drop for held in surplus if (drop := _may_go(view, wanted, held)) is not None]
    waiting: dict[ShardId, str] = {}
    lacking: set[ShardId] = set()
    drops += _replaced(view, wanted, waiting, lacking)
    going = {drop.shard for drop in drops}
    here = {held.shard: held for held in view.held}
    load: LoadAction | None = None
    busy = [h.shard for h in view.held if h.state is ShardStage.LOADING and h.shard in wanted]
    for shard, (deployment, layers) in wanted.items():
        if shard in here:
            if here[shard].weights_sha256 != deployment.wish.weights_sha256:
                waiting[shard] = "other weights are held here by that name"
            continue
        if (reason := (view.not_yet or {}).get(shard)) is not None:
            waiting[shard] = reason
            continue
        if busy or load is not None:
            waiting[shard] = f"after {busy[0] if busy else load.shard if load else ''}"
            continue
        need = view.need_mb(deployment, layers)
        if view.free_mb is None or need <= view.free_mb:
            load = LoadAction(deployment.id, shard, layers, need)
            continue
        waiting[shard] = f"needs {need} MiB, {view.free_mb} MiB are free"
        leaving = [h for h in view.held if h.shard in going or h.state is ShardStage.LEAVING]
        if view.free_mb + sum(held.mb for held in leaving) >= need:
            waiting[shard] += "; room is being made"
            continue
        first = _make_room(
            view, deployment, shard, need, [h for h in surplus if h.shard not in going]
        )
        drops += first
        going |= {drop.shard for drop in first}
        if not first:
            lacking.add(shard)
    return Decision(load, tuple(drops), waiting, frozenset(lacking))


def wishes_of(view: View) -> dict[ShardId, tuple[Deployment, LayerRange]]:
    """What this node is to hold; of two deployments that want the same shard, the first's."""
    wanted: dict[ShardId, tuple[Deployment, LayerRange]] = {}
    for deployment in live(view.deployments):
        for shard, layers in deployment.shards_of(view.node).items():
            wanted.setdefault(shard, (deployment, layers))
    return wanted


def _replaced(
    view: View,
    wanted: Mapping[ShardId, tuple[Deployment, LayerRange]],
    waiting: dict[ShardId, str],
    lacking: set[ShardId],
) -> list[DropAction]:
    """What goes to be loaded anew as it is wished now; what of that has to wait is noted."""
    held_here = {held.shard: held for held in view.held}
    changing = [held.shard for held in view.held if held.state is not ShardStage.READY]
    changing = [shard for shard in changing if shard in wanted]
    drops: list[DropAction] = []
    for shard, (deployment, layers) in wanted.items():
        held = held_here.get(shard)
        if held is None or held.state is ShardStage.LEAVING:
            continue
        if held.weights_sha256 != deployment.wish.weights_sha256:
            continue
        if is_as_wished(held.loaded, deployment.wish, view.own_quant):
            continue
        if held.by_hand:
            waiting[shard] = "it is held by hand here, loaded otherwise than is wished"
        elif held.state is ShardStage.LOADING:
            drops.append(DropAction(shard, "it is wished otherwise now"))
        elif changing:
            waiting[shard] = f"it is loaded anew after {changing[0]}"
        elif _fits_instead(view, held, need := view.need_mb(deployment, layers)):
            waiting[shard] = "it is loaded anew, as it is wished now"
            drops.append(DropAction(shard, "it is loaded anew, as it is wished now", gap=True))
            changing.append(shard)
        else:
            waiting[shard] = (
                f"needs {need} MiB instead of {held.mb} MiB, {view.free_mb} MiB are free"
            )
            lacking.add(shard)
    return drops


def _fits_instead(view: View, held: OwnShard, need: int) -> bool:
    return view.free_mb is None or need <= view.free_mb + held.mb


def _may_go(
    view: View, wanted: Mapping[ShardId, tuple[Deployment, LayerRange]], held: OwnShard
) -> DropAction | None:
    """How a shard that is not wished for goes now; None while it has to stay."""
    if held.state is ShardStage.LOADING:
        return DropAction(held.shard, "nobody wants it any more")
    wishing = [
        each
        for each in live(view.deployments)
        if each.wish.model_id == held.model_id
        and each.wish.weights_sha256 == held.weights_sha256
        and each.is_wanted
    ]
    if not wishing:
        return DropAction(held.shard, "no deployment wants it")
    if any(each.plan is None for each in wishing):
        return None
    if _is_covered(view, wanted, wishing, held):
        return DropAction(held.shard, "its layers are served as wished")
    return None


def _is_covered(
    view: View,
    wanted: Mapping[ShardId, tuple[Deployment, LayerRange]],
    wishing: Sequence[Deployment],
    held: OwnShard,
) -> bool:
    """Whether shards that the plans wish for serve each of its layers now."""
    planned = {
        (span.node, span.layers)
        for each in wishing
        if each.plan is not None
        for replica in each.plan.replicas
        for span in replica.spans
    }
    ready = [
        each.layers
        for each in view.served
        if (each.node, each.layers) in planned and each.node != view.node and _same(each, held)
        if any(is_as_wished(each.loaded, one.wish) for one in wishing)
    ]
    ready += [
        each.layers
        for each in view.held
        if each.state is ShardStage.READY
        and (each.by_hand or _is_wanted(view, wanted, each))
        and _same(each, held)
    ]
    return all(
        any(layer in layers for layers in ready)
        for layer in range(held.layers.start, held.layers.stop)
    )


def _is_wanted(
    view: View, wanted: Mapping[ShardId, tuple[Deployment, LayerRange]], held: OwnShard
) -> bool:
    """Whether it is wished for just as it is."""
    deployment, _ = wanted.get(held.shard, (None, None))
    return deployment is not None and is_as_wished(held.loaded, deployment.wish, view.own_quant)


def _same(one: OwnShard | ServedShard, other: OwnShard) -> bool:
    return one.model_id == other.model_id and one.weights_sha256 == other.weights_sha256


def _make_room(
    view: View, deployment: Deployment, shard: ShardId, need: int, surplus: Sequence[OwnShard]
) -> list[DropAction]:
    """The old that goes before the new is there, smallest first; nothing unless that is enough and
    an operator asked for it."""
    if deployment.plan is None or not deployment.plan.asked or not deployment.is_planned:
        return []
    free = view.free_mb or 0
    free += sum(held.mb for held in view.held if held.state is ShardStage.LEAVING)
    chosen: list[DropAction] = []
    for held in sorted(surplus, key=lambda each: (each.mb, each.shard)):
        if free >= need:
            break
        if held.model_id == deployment.wish.model_id and held.state is ShardStage.READY:
            chosen.append(DropAction(held.shard, f"to make room for {shard}", gap=True))
            free += held.mb
    return chosen if free >= need else []
