"""What the planner is asked for a deployment, and told beside what it sees: what of a machine's
memory is spoken for, and which spans were refused. Part of the composition root.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from mesh.clock import loop_time
from mesh.config import Config
from mesh.deployments.formats import is_as_wished
from mesh.deployments.laid import UNKNOWN, Laid
from mesh.deployments.laying import RoomAdjustments
from mesh.deployments.phases import Phase, PhaseProgress
from mesh.deployments.reconcile import ServedShard
from mesh.deployments.refusals import Refusals
from mesh.deployments.wishes import Deployment, Plan, Span, Wish, live
from mesh.discovery.directory import ShardStore
from mesh.discovery.progress import SpanProgress
from mesh.errors import MeshError, UnsupportedFamily, WeightsMismatch, from_dict
from mesh.node.estimates import Estimates
from mesh.node.shards_as_seen import becomes_free_mb, served_shard
from mesh.routing.machines import ITEMSIZE
from mesh.types import LayerRange, ModelId, NodeId, ShardId

LAYOUT_S = 20.0
"""A checkpoint of this disk that is looked at for the first time is read whole; that is not waited
for."""

_LOOK_S, _LOOK_AGAIN_S = 3.0, 60.0
"""One that is to be loaded waits for a look at its files, but not for long."""

_COUNT_AGAIN_S = 1.0
"""What layers take is measured by and by, and known better then."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What was to come `of` each deployment, and in all, as far as was `read` and `there`."""

    read: Mapping[str, Deployment]
    there: Collection[ServedShard]
    at: float
    of: Mapping[str, Mapping[NodeId, int]]
    total: Mapping[NodeId, int]


class Layouts:
    """`planner` is set before anything is asked."""

    def __init__(
        self,
        config: Config,
        node: NodeId,
        store: ShardStore,
        deployments: Callable[[], Mapping[str, Deployment]],
    ) -> None:
        self.planner: Estimates | None = None
        self._config = config
        self._node = node
        self._store = store
        self._deployments = deployments
        self._refusals = Refusals()
        self._looks: dict[tuple[ModelId, str], float] = {}
        """Models that were looked at, and when they are looked at again."""
        self._planned: _Planned | None = None

    async def laid_out(
        self,
        wish: Wish,
        before: Plan | None,
        freed_mb: Mapping[NodeId, int],
        there: Collection[ServedShard],
        alive: Collection[NodeId],
    ) -> Laid:
        """Where the planner lays what `before` lacks of a wish on nodes that are `alive`, were
        `freed_mb` more free; what is `there` is loaded. `UNKNOWN` where it cannot say in time.

        Raises WeightsMismatch and UnsupportedFamily: what cannot be is not split evenly either.
        """
        if self.planner is None:
            return UNKNOWN
        more = Counter(freed_mb)
        own = [(wish, before)] if before is not None else []
        more.subtract(self.spoken_for(wish.deployment, there, own))
        said = RoomAdjustments(more, self._refusals.of(wish.deployment, loop_time()))
        evenly = self._config.deployments.placement == "even"
        try:
            async with asyncio.timeout(LAYOUT_S):
                return await self.planner.layout(wish, before, alive, said, evenly=evenly)
        except (WeightsMismatch, UnsupportedFamily):
            raise
        except (MeshError, TimeoutError) as error:
            logger.info("deployment=%s is split evenly: %s", wish.deployment, error)
            return UNKNOWN

    def spoken_for(
        self,
        deployment: str,
        there: Collection[ServedShard],
        own: Iterable[tuple[Wish, Plan]] = (),
    ) -> Mapping[NodeId, int]:
        """MiB of each machine that are for spans which are planned there and not yet loaded: its
        `own`, and those of other deployments than this."""
        planned = self._planned_now(there)
        taken = Counter(planned.total)
        taken.subtract(planned.of.get(deployment, {}))
        for wish, plan in own:
            taken.update(self._to_come(wish, plan, there))
        return +taken

    def _planned_now(self, there: Collection[ServedShard]) -> _Planned:
        """What is planned of all deployments and not loaded, counted once a second at most while
        nothing changes: many may have to be planned anew, each beside all others."""
        deployments, now, known = self._deployments(), loop_time(), self._planned
        if (
            known is not None
            and known.read is deployments
            and known.there == there
            and now - known.at < _COUNT_AGAIN_S
        ):
            return known
        of = {
            each.id: self._to_come(each.wish, each.plan, there)
            for each in live(deployments)
            if each.is_wanted and each.plan is not None
        }
        total: Counter[NodeId] = Counter()
        for taken in of.values():
            total.update(taken)
        self._planned = _Planned(deployments, frozenset(there), now, of, total)
        return self._planned

    def _to_come(
        self, wish: Wish, plan: Plan, there: Collection[ServedShard]
    ) -> Mapping[NodeId, int]:
        """MiB of each machine for what of a plan is not loaded."""
        taken: Counter[NodeId] = Counter()
        for span in plan.spans:
            served = ServedShard(span.node, wish.model_id, wish.weights_sha256, span.layers)
            if served not in there:
                taken[span.node] += self.need_mb(wish, span.layers)
        return taken

    def need_mb(self, wish: Wish, layers: LayerRange, device: str = "") -> int:
        """What these layers take, on a device of this node if one is named. Where nobody knows the
        model, no more than is certain: the process that loads them counts again, and refuses."""
        if (known := self._known_mb(wish, layers, device)) is not None:
            return known
        quant = wish.quant or self._config.quant
        least = ITEMSIZE["bf16" if quant == "none" else "int8" if quant == "auto" else quant]
        part = wish.layers_mb * len(layers) / wish.total_layers
        return math.ceil(part * least / ITEMSIZE["fp32"])

    async def get_to_know(self, wish: Wish) -> None:
        """Look at a model that nobody has asked about, once in a while where that is in vain."""
        what, now = (wish.model_id, wish.weights_sha256), loop_time()
        if self.planner is None or self.planner.knows(wish) or self._looks.get(what, now) > now:
            return
        self._looks = {each: at for each, at in self._looks.items() if at > now}
        self._looks[what] = now + _LOOK_AGAIN_S
        try:
            async with asyncio.timeout(_LOOK_S):
                await self.planner.get_to_know(wish)
        except (MeshError, TimeoutError) as error:
            logger.info("what layers of %s take is not known yet: %s", wish.model_id, error)

    def computes(self, wish: Wish, device: str) -> bool:
        """Whether a device of this node computes in the format of the wish, as far as is known."""
        return self.planner is None or self.planner.computes(wish, device)

    def asking_mb(self, wish: Wish) -> int:
        """What asking this takes of this node's first device; 0 where nobody knows the model."""
        return self.planner.asking_mb(wish) if self.planner is not None else 0

    def taken_mb(self, wish: Wish, layers: LayerRange) -> int:
        """The same; where nobody knows the model here, the least that is said by who serves them as
        it is wished, weights and caches: so much gets free once they rest."""
        if (known := self._known_mb(wish, layers)) is not None:
            return known
        what, found = (wish.model_id, wish.weights_sha256, layers), list[int]()
        for shard in (each for view in self._store.nodes() for each in view.offers.shards):
            said = served_shard(shard.descriptor)
            is_it = (said.model_id, said.weights_sha256, said.layers) == what
            if is_it and is_as_wished(said.loaded, wish):
                found.append(becomes_free_mb(shard))
        return min(found, default=self.need_mb(wish, layers))

    def _known_mb(self, wish: Wish, layers: LayerRange, device: str = "") -> int | None:
        return self.planner.need_mb(wish, layers, device) if self.planner is not None else None

    def refused(self, deployment: Deployment) -> Collection[Span]:
        """The spans of its plan for which their machines say that they have no room."""
        lacking = self._lacking() if deployment.plan is not None else ()
        spans = deployment.plan.spans if deployment.plan is not None and lacking else ()
        now = [s for s in spans if (s.node, deployment.shard(s.layers)) in lacking]
        self._refusals.put(deployment.id, now, loop_time())
        return now

    def told(self, node: NodeId, shard: ShardId) -> PhaseProgress | None:
        """What a node says of a shard that it works at; None where it says nothing, or speaks of a
        phase that nobody here knows."""
        view = self._store.node(node)
        progress = None if view is None else view.offers.progress
        spans = () if progress is None else progress.spans
        for each in spans:
            if each.shard_id == shard and each.phase in Phase.__members__:
                return PhaseProgress(
                    Phase(each.phase),
                    each.done_bytes,
                    each.total_bytes,
                    each.reason or None,
                    each.lacks_memory,
                    error=_error(each),
                )
        return None

    def _lacking(self) -> Collection[tuple[NodeId, ShardId]]:
        """The shards of which their nodes say so."""
        return {
            (view.info.node_id, ShardId(each.shard_id))
            for view in self._store.nodes()
            if view.offers.progress is not None
            for each in view.offers.progress.spans
            if each.lacks_memory and each.phase in Phase.__members__
        }


def _error(said: SpanProgress) -> MeshError | None:
    """Why it failed, as far as its node says."""
    if not said.code:
        return None
    message = said.reason.removesuffix(said.fix).strip()
    return from_dict({"code": said.code, "message": message, "fix": said.fix})
