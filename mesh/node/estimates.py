"""What deploying a model would need and give: the planner, asked about the house as it is now.

Gathers what nodes have said of themselves and what links measure; decides nothing
(`mesh.routing.placement` does). Part of the composition root.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mesh import codec
from mesh.capacity import Capacity, Device
from mesh.config import Config
from mesh.deployments.laid import PAUSED, UNKNOWN, Laid
from mesh.deployments.laying import RoomAdjustments, lay, require_possible, rooms, with_more
from mesh.deployments.placement import gaps, leaving
from mesh.deployments.shape import shape_of
from mesh.deployments.wishes import Plan, Span, Wish
from mesh.discovery.directory import NodeView, ShardStore
from mesh.discovery.weights import HeldWeights
from mesh.errors import BadRequest, NotEnoughMemory
from mesh.health.detector import Verdict
from mesh.identity.naming import nodes_meant, told_apart
from mesh.models.manifest import Manifest
from mesh.node.fetched_weights import FetchedWeights
from mesh.node.imagined import imagined
from mesh.node.served_speed import AskedTimes
from mesh.node.shards_as_seen import becomes_free_mb, device_of
from mesh.routing.fitting import asking_bytes, float_format, shard_bytes
from mesh.routing.machines import DEFAULT_CONTEXT, Demand, HeldLayers, Machine, ModelShape, Timed
from mesh.routing.placement import Layout, lay_out
from mesh.types import LayerRange, ModelId, NodeId

_UNMEASURED_MS, _UNMEASURED_MB_S = 1.0, 100.0
"""A way that nobody has measured yet counts as a common one of a house."""

_MAX_MODELS = 64
_AWAY = "it does not answer"


class OthersRoom(Protocol):
    """See `mesh.deployments.control.Deploying.room_of_others`."""

    def __call__(
        self, model_id: ModelId, weights_sha256: str, *, dedicated: bool
    ) -> Mapping[NodeId, int]: ...


@dataclass(frozen=True, slots=True)
class EstimateContext:
    """What is asked of the other parts of the node; `held` is what lies on its own disk. `asker_ms`
    is what a token costs as it is asked for here, `asked` what answers have told of that and of the
    ways to nodes. `members` are all, up or not, with their names; `others` the MiB of each machine
    that would get free if all rested that may for a model, `spoken_for` those that are for what is
    planned of other models and not yet loaded."""

    node: NodeId
    config: Config
    store: ShardStore
    rtt_ms: Callable[[NodeId], float | None]
    may_serve: Callable[[NodeId], bool]
    verdict: Callable[[NodeId], Verdict]
    asks: Callable[[ModelId], bool]
    held: Callable[[], Sequence[HeldWeights]]
    asker_ms: Callable[[], float]
    asked: AskedTimes
    members: Callable[[], Mapping[NodeId, str]]
    others: OthersRoom
    spoken_for: Callable[[ModelId, str], Mapping[NodeId, int]]


@dataclass(frozen=True, slots=True)
class _KnownModel:
    """A model that was asked about; `here` are the layers that lie on this machine's disk."""

    shape: ModelShape
    here: tuple[LayerRange, ...]


class Estimates:
    """Implements `mesh.api.services.PlanControl`."""

    def __init__(self, house: EstimateContext, weights: FetchedWeights) -> None:
        self._house = house
        self._weights = weights
        self._known: dict[tuple[str, str], _KnownModel] = {}
        """By name and the weights' hash: of what was asked about last."""

    async def plan(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """See `PlanControl`. Raises ModelNotFound, BadCheckpoint, and BadRequest for nodes that
        nobody knows."""
        known = await self._look_up(order["model"], order["context"])
        model = known.shape
        machines, demand = self._asked(model, order)
        what = model.model_id, model.weights_sha256
        others = self._house.others(*what, dedicated=demand.dedicated)
        spoken_for = self._house.spoken_for(*what)

        def laid_out(more_mb: Mapping[NodeId, int]) -> Layout:
            room = (more_mb.get(m.node_id, 0) - spoken_for.get(m.node_id, 0) for m in machines)
            ready = [with_more(m, mb << 20) for m, mb in zip(machines, room, strict=True)]
            return lay_out(model, ready, demand)

        found = await asyncio.to_thread(laid_out, {})
        is_full = found.refusal is not None and found.refusal.code == NotEnoughMemory.code
        if is_full and others:  # as a deployment that finds no room
            found = await asyncio.to_thread(laid_out, others)
        return _as_json(found) | {"others_rest": is_full and found.refusal is None}

    async def layout(
        self,
        wish: Wish,
        before: Plan | None,
        alive: Collection[NodeId],
        said: RoomAdjustments,
        *,
        evenly: bool = False,
    ) -> Laid:
        """Where what `before` lacks of a wish goes, on machines that are `alive`. Where it is to be
        split `evenly`, or not all of them were measured, only how much fits on each.

        Raises ModelNotFound, BadCheckpoint, WeightsMismatch where the wish counts other layers than
        the weights have, UnsupportedFamily for a format that they are not served in, and what
        fetching raises.
        """
        lacking = wish.replicas - (0 if before is None else len(before.replicas))
        open_gaps = gaps(wish, before, alive)
        # What was planned once may run in the format of other nodes' settings.
        quant = wish.quant or (self._house.config.quant if before is None else "auto")
        if asked := self._known.get((wish.model_id, wish.weights_sha256)):
            require_possible(asked.shape, wish, quant)
        if lacking < 1 and not open_gaps:
            return UNKNOWN
        # It is known by its id where it is deployed, whatever it was called when that was asked.
        context = wish.context or DEFAULT_CONTEXT
        known = await self._look_up(wish.model_id, context)
        model = known.shape
        if model.weights_sha256 != wish.weights_sha256:
            return UNKNOWN
        require_possible(model, wish, quant)
        machines = [
            each
            for each in self.machines(model)
            if each.node_id in alive and (not wish.nodes or each.node_id in wish.nodes)
        ]
        demand = Demand(
            asker=self._house.node,
            quant=self._quant(model, wish.quant, _devices(machines)),
            context=context,
            max_shards=self._house.config.distributed.max_shards_per_request,
            thin=self._is_thin,
        )
        going = leaving(wish, before, alive)
        freed = {each.node_id: _freed_mb(each, going) for each in machines}
        more = {node: mb + said.freed_mb.get(node, 0) for node, mb in freed.items()}
        said = replace(said, freed_mb=more)
        if evenly or not all(_is_measured(each) for each in machines):
            return await asyncio.to_thread(rooms, model, machines, demand, said)
        return await asyncio.to_thread(lay, model, machines, wish, before, open_gaps, demand, said)

    def knows(self, wish: Wish) -> bool:
        """Whether anybody has asked about the model."""
        return (wish.model_id, wish.weights_sha256) in self._known

    async def get_to_know(self, wish: Wish) -> None:
        """Look at the model, as if somebody asked. Raises as `layout`."""
        await self._look_up(wish.model_id, wish.context or DEFAULT_CONTEXT)

    def need_mb(self, wish: Wish, layers: LayerRange, device_name: str = "") -> int | None:
        """What these layers take of this machine, caches and all, as a shard counts it before it
        loads; None while nobody has asked about the model. Without a device named it is the first.
        """
        known = self._known.get((wish.model_id, wish.weights_sha256))
        if known is None:
            return None
        model = known.shape
        named = [each for each in self._own_devices() if device_name in ("", each.name)][:1]
        device = next(iter(named), None)
        quant = self._quant(model, wish.quant, named)
        if quant in ("none", "auto"):
            name = float_format(model, device) if device is not None else "fp32"
        else:
            name = quant
        positions = max(wish.context, self._kv_tokens)
        return math.ceil(shard_bytes(model, layers, name, device, positions) / 2**20)

    def computes(self, wish: Wish, device_name: str) -> bool:
        """Whether one of this node's devices computes in the format that is wished; so it is taken
        to be while it is not measured."""
        quant = wish.quant or self._house.config.quant
        named = (each for each in self._own_devices() if each.name == device_name)
        speeds = {speed.format for device in named for speed in device.speeds}
        return not speeds or quant in ("none", "auto") or quant in speeds

    def asking_mb(self, wish: Wish) -> int:
        """What the process that asks takes of this node's first device; 0 where nobody knows."""
        known = self._known.get((wish.model_id, wish.weights_sha256))
        devices = self._own_devices()
        if known is None or not devices:
            return 0
        return math.ceil(asking_bytes(known.shape, devices[0], thin=self._is_thin) / 2**20)

    def _own_devices(self) -> tuple[Device, ...]:
        view = self._house.store.node(self._house.node)
        capacity = None if view is None else view.offers.capacity
        return () if capacity is None else capacity.devices

    def _quant(self, model: ModelShape, wished: str, devices: Iterable[Device]) -> str:
        """The format that is planned with: of ``auto`` processors make int8 where they can, or
        int4 of a model that is stored so."""
        quant = wished or self._house.config.quant
        if quant == "auto" and {device.kind for device in devices} <= {"cpu"}:
            few = "int4" if model.is_int4 else "int8"
            return few if few in model.quants else "none"
        return quant

    def machines(self, model: ModelShape) -> list[Machine]:
        """Every node that is known, with what it has of the model."""
        return [self._machine(view, model) for view in self._house.store.nodes()]

    @property
    def _kv_tokens(self) -> int:
        """Of this node: a shard sets its whole cache aside, however short prompts are to be."""
        return self._house.config.distributed.host.kv_tokens

    @property
    def _is_thin(self) -> bool:
        """Whether who takes layers has no use for the ends, but with the first and the last."""
        return self._house.config.distributed.thin == "always"

    async def _look_up(self, name: str, context: int) -> _KnownModel:
        manifest = await self._weights.manifest(name)
        house = [view.offers for view in self._house.store.nodes()]
        aside = (each.capacity.kv_tokens or 0 for each in house if each.capacity is not None)
        longest = max(context, self._kv_tokens, *aside)
        known = await asyncio.to_thread(_known, manifest, longest)
        shards = [shard.descriptor for each in house for shard in each.shards]
        if any(each.halved for each in shards if each.weights_sha256 == known.shape.weights_sha256):
            known = replace(known, shape=replace(known.shape, is_standard=True))
        key = known.shape.model_id, known.shape.weights_sha256
        self._known.pop(key, None)
        self._known[key] = known
        if len(self._known) > _MAX_MODELS:
            del self._known[next(iter(self._known))]
        return known

    def _asked(self, model: ModelShape, order: Mapping[str, Any]) -> tuple[list[Machine], Demand]:
        machines = {
            node: Machine(node, name, (), refusal=_AWAY)
            for node, name in self._house.members().items()
        } | {each.node_id: each for each in self.machines(model)}
        for text in order["with"]:
            own = machines.get(self._house.node)
            one = imagined(text, own, _UNMEASURED_MS, self._kv_tokens)
            one = one or machines[_node(text, machines.values())]
            machines[one.node_id] = replace(one, refusal="")
        known = list(machines.values())
        only = frozenset(_node(text, known) for text in order["nodes"])
        without = frozenset(_node(text, known) for text in order["without"])
        usable = [
            each
            for each in known
            if not each.refusal
            and each.node_id not in without
            and (not only or each.node_id in only)
        ]
        demand = Demand(
            asker=self._house.node,
            replicas=order["replicas"],
            dedicated=order["dedicated"],
            only=only,
            without=without,
            pins=tuple(_pin(text, known) for text in order["layers"]),
            quant=self._quant(model, order["quant"] or "", _devices(usable)),
            context=order["context"],
            streams=order["streams"],
            max_shards=self._house.config.distributed.max_shards_per_request,
            thin=self._is_thin,
        )
        return known, demand

    def _machine(self, view: NodeView, model: ModelShape) -> Machine:
        node, capacity = view.info.node_id, view.offers.capacity or Capacity()
        devices, free = capacity.devices, capacity.disk_free_bytes
        here = node == self._house.node
        own = [
            each
            for each in (self._house.held() if here else view.offers.weights)
            if (each.model_id, each.weights_sha256) == (model.model_id, model.weights_sha256)
        ]
        held = [HeldLayers(layers) for each in own for layers in each.layers]
        known = self._known.get((model.model_id, model.weights_sha256)) if here else None
        held += [HeldLayers(layers) for layers in (known.here if known is not None else ())]
        has_ends_here = any(each.ends for each in own)
        if free is not None and not (has_ends_here or self._is_thin):
            free = max(0, free - model.ends_bytes)
        rtt_ms, timed = self._house.rtt_ms(node), []
        for shard in view.offers.shards:
            said, health = shard.descriptor, shard.health
            if (said.model_id, said.weights_sha256) != (model.model_id, model.weights_sha256):
                continue
            device = device_of(said, devices)
            held.append(HeldLayers(said.layers, device.name, becomes_free_mb(shard) << 20))
            if health.p50_latency_ms > 0:
                ms = max(health.p50_latency_ms / 2, health.p50_latency_ms - device.visit_ms)
                timed.append(Timed(device.name, said.format, ms / len(said.layers)))
        return Machine(
            node,
            view.info.name,
            devices,
            rtt_ms=0.0 if here else rtt_ms if rtt_ms is not None else _UNMEASURED_MS,
            refusal=self._refusal(view),
            timed=tuple(timed),
            held=tuple(held),
            has_ends=self._asks(view, model),
            asker_ms=self._house.asker_ms() if here else 0.0,
            asked_ms=self._house.asked.of(model.model_id) if here else None,
            way_ms=self._house.asked.way_ms(node),
            mb_s=self._house.asked.mb_s(node) or _UNMEASURED_MB_S,
            disk_bytes=free,
            kv_tokens=self._kv_tokens if capacity.kv_tokens is None else capacity.kv_tokens,
        )

    def _asks(self, view: NodeView, model: ModelShape) -> bool:
        """Whether what asking takes there is taken already: who serves a part asks as well."""
        if view.info.node_id == self._house.node:
            return self._house.asks(model.model_id)
        if view.offers.progress is not None and model.model_id in view.offers.progress.asks:
            return True
        return any(
            (said.model_id, said.weights_sha256) == (model.model_id, model.weights_sha256)
            for said in (shard.descriptor for shard in view.offers.shards)
        )

    def _refusal(self, view: NodeView) -> str:
        node, config = view.info.node_id, self._house.config
        if node == self._house.node:
            if config.distributed.host.serve_shards is False:
                return "its settings let it serve no layers (host.serve_shards)"
        elif not view.online or self._house.verdict(node) is Verdict.LOST:
            return _AWAY
        elif not self._house.may_serve(node):
            return "it is not trusted to serve: `hearthnet members promote`"
        progress = view.offers.progress
        return PAUSED if progress is not None and progress.paused else ""


def _known(manifest: Manifest, context: int) -> _KnownModel:
    is_read = bool(manifest.weights_sha256)  # else there are the headers alone
    here = manifest.layers_here() if is_read else ()
    return _KnownModel(shape_of(manifest, context), here)


def _devices(machines: Iterable[Machine]) -> list[Device]:
    return [device for machine in machines for device in machine.devices]


def _is_measured(machine: Machine) -> bool:
    return bool(machine.refusal) or any(device.speeds for device in machine.devices)


def _freed_mb(machine: Machine, going: Collection[Span]) -> int:
    """What gets free on a machine when these spans are gone."""
    sizes = [h.loaded_bytes for h in machine.held if Span(machine.node_id, h.layers) in going]
    return sum(sizes) >> 20


def _pin(text: str, known: Iterable[Machine]) -> tuple[NodeId, LayerRange]:
    who, _, layers = text.rpartition("=")
    try:
        return _node(who, known), LayerRange.parse(layers)
    except ValueError as error:
        raise BadRequest(f"layers: {error}.", fix="Give NODE=LO-HI.", param="layers") from None


def _as_json(found: Layout) -> dict[str, Any]:
    fields = codec.plain(found)
    for replica in fields["replicas"]:
        for shard in replica["shards"]:
            shard["need"]["total"] = sum(shard["need"].values())
    return fields


def _node(who: str, known: Iterable[Machine]) -> NodeId:
    """The node that is meant, see `nodes_meant`."""
    names = [(each.node_id, each.name) for each in known]
    found = nodes_meant(who, names)
    if len(found) != 1:
        raise BadRequest(
            f"{'no' if not found else 'more than one'} node is called {who!r}.",
            fix=f"Name one of: {told_apart(names)}.",
            param="nodes",
        )
    return found[0]
