"""What a node does next, so that what it holds becomes what is wished: pure.

One node's view goes in, at most one load and any number of fetches and drops come out, with the
reason for whatever has to wait. Asked again after each, it ends with nothing to do. The rules:

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
- Never over memory: a load is let in only when it fits what is free, one at a time. Weights are
  fetched before that, of several shards at a time, each of which has the room kept that it will
  take, so that a long download holds up no other load and is not in vain.
- What is held by hand (`--model`, `--layers`) is neither loaded nor dropped here.

Knows no clock, no log and no process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mesh.deployments.formats import UNTOLD, LoadedFormat, is_as_wished
from mesh.deployments.wishes import Deployment, live
from mesh.types import LayerRange, ModelId, NodeId, ShardId

MAX_PROVISIONED = 4
"""So many shards have their weights fetched at a time: more would share the same line and disk."""
BOUNDLESS = 1 << 60
"""MiB that are free where nobody knows what is."""

Wishes = dict[ShardId, tuple[Deployment, LayerRange]]
"""Shards, each with the deployment that has it here."""


class ShardStage(StrEnum):
    """How far a node is with a shard."""

    PROVISIONING = "provisioning"
    """Its weights are being fetched; it takes no memory yet."""
    PROVISIONED = "provisioned"
    """They are here, and it is to be loaded once it may."""
    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class OwnShard:
    """A shard that this node holds or is busy with; `mb` is what it takes, or will take once it is
    loaded, of its `device`, which is '' where there is one only. `by_hand`: its owner configured
    it."""

    shard: ShardId
    model_id: ModelId
    weights_sha256: str
    layers: LayerRange
    mb: int
    state: ShardStage = ShardStage.READY
    by_hand: bool = False
    loaded: LoadedFormat = UNTOLD
    device: str = ""

    @property
    def is_to_come(self) -> bool:
        """Whether nothing of it is in memory yet."""
        return self.state in (ShardStage.PROVISIONING, ShardStage.PROVISIONED)


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

    `free_mb` is what is free beside all that is held or loading, not what is to come, None where
    nobody knows; then what loads is let in and refused by its process. Of `held`, what is to come
    stands in the order in which it was let in. `need_mb` says what some layers would take.
    `not_yet` are shards whose last try failed and that wait for the next, with the reason. Of one
    of several `devices`, `elsewhere` is held on the others, and is for them what is in `others`.
    """

    node: NodeId
    deployments: Mapping[str, Deployment]
    held: Sequence[OwnShard]
    served: Collection[ServedShard]
    free_mb: int | None
    need_mb: Callable[[Deployment, LayerRange], int]
    not_yet: Mapping[ShardId, str] | None = None
    elsewhere: Sequence[OwnShard] = ()
    others: frozenset[ShardId] = frozenset()
    devices: int = 1


@dataclass(frozen=True, slots=True)
class LoadAction:
    """Layers to be fetched or, once their weights are here, loaded and served."""

    deployment: str
    shard: ShardId
    layers: LayerRange
    mb: int


@dataclass(frozen=True, slots=True)
class DropAction:
    """Serve this shard no longer, or bring it up no further. With a `gap` there is a while in which
    nobody serves its layers; `why` says what for."""

    shard: ShardId
    why: str
    gap: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done now, and what waits for what, by shard. What is `lacking` waits for room
    that nobody here makes; what is `unfetched`, until fewer are being fetched."""

    load: LoadAction | None = None
    fetches: tuple[LoadAction, ...] = ()
    drops: tuple[DropAction, ...] = ()
    waiting: Mapping[ShardId, str] | None = None
    lacking: frozenset[ShardId] = frozenset()
    unfetched: frozenset[ShardId] = frozenset()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.load is None and not self.fetches and not self.drops


def reconcile(view: View) -> Decision:
    """The next steps of one node; see the module."""
    wishes = wishes_of(view)
    wanted = {name: wish for name, wish in wishes.items() if name not in view.others}
    to_come = [held for held in view.held if held.is_to_come]
    coming = [held for held in to_come if _is_to_be(wanted, held)]
    room_mb, short = _beside(coming, BOUNDLESS if view.free_mb is None else view.free_mb)
    draft = _Draft(view, wishes, wanted, room_mb, is_kept=len(short) < len(coming))
    draft.drops += [drop for held in draft.surplus if (drop := _may_go(draft, held)) is not None]
    _replace(draft, [held for held in coming if held not in short])
    for held in coming:
        if held.state is ShardStage.PROVISIONED:
            draft.load_fetched(held, fits=held not in short)
    here = {held.shard: held for held in view.held}
    for shard, (deployment, layers) in wanted.items():
        if shard not in here:
            draft.let_in(deployment, shard, layers)
        elif not here[shard].is_to_come and not _is_to_be(wanted, here[shard]):
            draft.waiting[shard] = "other weights are held here by that name"
    stopped = [
        DropAction(held.shard, "nobody wants it any more") for held in to_come if held not in coming
    ]
    return draft.decision(stopped)


def wishes_of(view: View) -> Wishes:
    """What this node is to hold; of two deployments that want the same shard, the first's."""
    wanted: Wishes = {}
    for deployment in live(view.deployments):
        for shard, layers in deployment.shards_of(view.node, view.devices).items():
            wanted.setdefault(shard, (deployment, layers))
    return wanted


@dataclass(slots=True)
class _Draft:
    """A decision in the making; of all `wishes` some are `wanted` here. `room_mb` is what is free
    beside all that `is_kept` room for."""

    view: View
    wishes: Wishes
    wanted: Wishes
    room_mb: int
    is_kept: bool
    load: LoadAction | None = None
    fetches: list[LoadAction] = field(default_factory=list)
    drops: list[DropAction] = field(default_factory=list)
    waiting: dict[ShardId, str] = field(default_factory=dict)
    lacking: set[ShardId] = field(default_factory=set)
    unfetched: set[ShardId] = field(default_factory=set)

    @property
    def surplus(self) -> list[OwnShard]:
        """What is held, not wished for, and not going already: of a name that is, other weights."""
        going = {drop.shard for drop in self.drops}
        return [
            each
            for each in self.view.held
            if not (each.by_hand or each.is_to_come or each.state is ShardStage.LEAVING)
            and not _is_to_be(self.wanted, each)
            and each.shard not in going
        ]

    def decision(self, stopped: Iterable[DropAction]) -> Decision:
        """As it is now; what is `stopped` is brought up no further."""
        return Decision(
            self.load, tuple(self.fetches), (*stopped, *self.drops), self.waiting,
            frozenset(self.lacking), frozenset(self.unfetched),
        )  # fmt: skip

    def load_fetched(self, held: OwnShard, *, fits: bool) -> None:
        """Its weights are here: it is loaded when that is its turn."""
        deployment, layers = self.wanted[held.shard]
        if not fits:
            self._wait_for_room(deployment, held.shard, held.mb)
        elif (busy := self._loading()) is not None:
            self.waiting[held.shard] = f"its weights are here; after {busy}"
        else:
            self.load = LoadAction(deployment.id, held.shard, layers, held.mb)

    def let_in(self, deployment: Deployment, shard: ShardId, layers: LayerRange) -> None:
        """Have its weights fetched and keep room for it, or say what it waits for."""
        fetching = [h.shard for h in self.view.held if h.state is ShardStage.PROVISIONING]
        fetching += [each.shard for each in self.fetches]
        if (reason := (self.view.not_yet or {}).get(shard)) is not None:
            self.waiting[shard] = reason
        elif len(fetching) >= MAX_PROVISIONED:
            more = f" or one of {len(fetching) - 1} more"
            self.waiting[shard] = f"after {fetching[0]}{more} whose weights are fetched"
            self.unfetched.add(shard)
        elif (need := self.view.need_mb(deployment, layers)) <= self.room_mb:
            self.fetches.append(LoadAction(deployment.id, shard, layers, need))
            self.room_mb -= need
            self.is_kept = True
        else:
            self._wait_for_room(deployment, shard, need)

    def _loading(self) -> ShardId | None:
        """What is being loaded, or is to be now."""
        for held in self.view.held:
            if held.state is ShardStage.LOADING and held.shard in self.wanted:
                return held.shard
        return self.load.shard if self.load is not None else None

    def _wait_for_room(self, deployment: Deployment, shard: ShardId, need: int) -> None:
        beside = " beside what is to come" if self.is_kept else ""
        self.waiting[shard] = f"needs {need} MiB, {self.room_mb} MiB are free{beside}"
        if (busy := self._loading()) is not None:
            self.waiting[shard] += f"; after {busy}"
            return
        going = {drop.shard for drop in self.drops}
        leaving = [h for h in self.view.held if h.shard in going or h.state is ShardStage.LEAVING]
        lacks = need - self.room_mb - sum(held.mb for held in leaving)
        if lacks <= 0:
            self.waiting[shard] += "; room is being made"
        elif first := _make_room(deployment, shard, lacks, self.surplus):
            self.drops += first
        else:
            self.lacking.add(shard)


def _is_to_be(wanted: Wishes, held: OwnShard) -> bool:
    """Whether these weights are wished for by this name."""
    deployment, _ = wanted.get(held.shard, (None, None))
    return deployment is not None and deployment.wish.weights_sha256 == held.weights_sha256


def _beside(coming: Iterable[OwnShard], free_mb: int) -> tuple[int, list[OwnShard]]:
    """What is free when what is to come has come, each in its turn as far as there is room; and
    what there is no room for any more."""
    short: list[OwnShard] = []
    for held in coming:
        if held.mb <= free_mb:
            free_mb -= held.mb
        else:
            short.append(held)
    return free_mb, short


def _replace(draft: _Draft, coming: Sequence[OwnShard]) -> None:
    """Have go what is to be loaded anew as it is wished now; what of that has to wait is noted."""
    view, wanted, waiting = draft.view, draft.wanted, draft.waiting
    held_here = {held.shard: held for held in view.held}
    changing = [
        held
        for held in view.held
        if held.shard in wanted and held.state in (ShardStage.LOADING, ShardStage.LEAVING)
    ]
    for shard, (deployment, layers) in wanted.items():
        held = held_here.get(shard)
        if held is None or held.is_to_come or held.state is ShardStage.LEAVING:
            continue
        if held.weights_sha256 != deployment.wish.weights_sha256:
            continue
        if is_as_wished(held.loaded, deployment.wish):
            continue
        # Of the same model it may be what went for the same reason, and is not back yet.
        first = [*changing, *(each for each in coming if each.model_id == held.model_id)]
        if held.by_hand:
            waiting[shard] = "it is held by hand here, loaded otherwise than is wished"
        elif held.state is ShardStage.LOADING:
            draft.drops.append(DropAction(shard, "it is wished otherwise now"))
        elif first:
            waiting[shard] = f"it is loaded anew after {first[0].shard}"
        elif (need := view.need_mb(deployment, layers)) <= draft.room_mb + held.mb:
            waiting[shard] = "it is loaded anew, as it is wished now"
            draft.drops.append(
                DropAction(shard, "it is loaded anew, as it is wished now", gap=True)
            )
            changing.append(held)
        else:
            waiting[shard] = (
                f"needs {need} MiB instead of {held.mb} MiB, {draft.room_mb} MiB are free"
            )
            draft.lacking.add(shard)


def _may_go(draft: _Draft, held: OwnShard) -> DropAction | None:
    """How a shard that is not wished for goes now; None while it has to stay."""
    if held.state is ShardStage.LOADING:
        return DropAction(held.shard, "nobody wants it any more")
    wishing = [
        each
        for each in live(draft.view.deployments)
        if each.wish.model_id == held.model_id
        and each.wish.weights_sha256 == held.weights_sha256
        and each.is_wanted
    ]
    if not wishing:
        return DropAction(held.shard, "no deployment wants it")
    if any(each.plan is None for each in wishing):
        return None
    if _is_covered(draft, wishing, held):
        return DropAction(held.shard, "its layers are served as wished")
    return None


def _is_covered(draft: _Draft, wishing: Sequence[Deployment], held: OwnShard) -> bool:
    """Whether shards that the plans wish for serve each of its layers now."""
    view = draft.view
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
        for each in (*view.held, *view.elsewhere)
        if each.state is ShardStage.READY
        and (each.by_hand or _is_wanted(draft.wishes, each))
        and _same(each, held)
    ]
    return all(
        any(layer in layers for layers in ready)
        for layer in range(held.layers.start, held.layers.stop)
    )


def _is_wanted(wanted: Wishes, held: OwnShard) -> bool:
    """Whether it is wished for just as it is."""
    deployment, _ = wanted.get(held.shard, (None, None))
    return deployment is not None and is_as_wished(held.loaded, deployment.wish)


def _same(one: OwnShard | ServedShard, other: OwnShard) -> bool:
    return one.model_id == other.model_id and one.weights_sha256 == other.weights_sha256


def _make_room(
    deployment: Deployment, shard: ShardId, lacks_mb: int, surplus: Sequence[OwnShard]
) -> list[DropAction]:
    """The old that goes before the new is there, smallest first; nothing unless that is enough and
    an operator asked for it."""
    if deployment.plan is None or not deployment.plan.asked or not deployment.is_planned:
        return []
    chosen: list[DropAction] = []
    for held in sorted(surplus, key=lambda each: (each.mb, each.shard)):
        if lacks_mb <= 0:
            break
        if held.model_id == deployment.wish.model_id and held.state is ShardStage.READY:
            chosen.append(DropAction(held.shard, f"to make room for {shard}", gap=True))
            lacks_mb -= held.mb
    return chosen if lacks_mb <= 0 else []
