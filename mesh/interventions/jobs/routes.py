"""A job's hops: which shards run its layers, and an intervention session on each.

The rules are those of chat (`mesh.routing`), with one more: all hops of a job compute in one number
format, so that its numbers are those of one machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mesh.clock import LoopClock
from mesh.errors import Busy, MeshError, NoRoute
from mesh.interventions.relay import HopSessions
from mesh.models.cuts import ANYWHERE, Cuts
from mesh.pipeline.claims import Claims
from mesh.pipeline.commands import Offer
from mesh.pipeline.known_shards import KnownShards
from mesh.pipeline.links import HopLinks
from mesh.pipeline.refusal import RouteRefused
from mesh.pipeline.route import open_route
from mesh.pipeline.watch.reputation import Reputations
from mesh.routing.cover import Candidate, CoverRules, ShardKey, key_of
from mesh.routing.router import ShardRouter
from mesh.types import LayerRange, ModelId, NodeId, RouteHop

_FORMATS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "int8": "fp32", "int4": "fp32"}
"""What the ends compute in beside layers of each format; those that lose least come first. Few bits
are of weights: what passes between layers of such is fp32."""


@dataclass(frozen=True, slots=True)
class RoutedModel:
    """The model that a route is for."""

    model_id: ModelId
    weights_sha256: str
    total_layers: int
    cuts: Cuts = ANYWHERE


@dataclass(frozen=True, slots=True)
class OpenRoute:
    """A route with its sessions; what passes on it is `dtype` (fp32, bf16 or fp16)."""

    hops: tuple[RouteHop, ...]
    dtype: str
    sessions: HopSessions


class Routes:
    """Opens routes over the shards that this node may use."""

    def __init__(
        self, own: NodeId, links: HopLinks, rules: Callable[[RoutedModel], CoverRules]
    ) -> None:
        """`rules` gives those of a route through a model of so many layers."""
        self._own = own
        self._links = links
        self._rules = rules
        self._reputations = Reputations(LoopClock())
        self._claims = Claims(own)

    async def open(
        self, wanted: RoutedModel, shards: Sequence[Offer], exclude: Collection[ShardKey] = ()
    ) -> OpenRoute:
        """A route where every hop has given a session.

        `shards` is what the daemon knows of who serves the model now.
        Raises NoRoute, WeightsMismatch, or Busy when only occupied shards are in the way.
        """
        known = KnownShards(self._own, self._reputations, self._claims)
        known.replace(shards)

        async def opened(picked: tuple[tuple[RouteHop, ...], str]) -> OpenRoute:
            hops, dtype = picked
            return OpenRoute(hops, dtype, await HopSessions.open(hops, self._links, self._claims))

        try:
            return await open_route(
                lambda refused: self._pick(known, wanted, [*exclude, *refused]), opened
            )
        except RouteRefused as nobody:
            if not nobody.all_full:
                raise
            raise Busy(
                f"No shard has room for a job:{nobody.said}", fix="Try again when one has ended."
            ) from None

    def failed(self, hop: RouteHop, error: MeshError) -> None:
        """Rank a shard that failed a job behind others for a while."""
        self._reputations.failed(key_of(hop.shard), error.code)

    def keep_only(self, hosts: frozenset[NodeId]) -> None:
        """Cut the links to all other nodes; jobs on them are run again elsewhere."""
        self._links.keep_only(hosts)

    async def close(self) -> None:
        """Close every link."""
        await self._links.close()

    def _pick(
        self, known: KnownShards, wanted: RoutedModel, exclude: Collection[ShardKey]
    ) -> tuple[tuple[RouteHop, ...], str]:
        span = LayerRange(0, wanted.total_layers)
        rules = self._rules(wanted)
        for name, dtype in _FORMATS.items():
            router = ShardRouter(_OneFormat(known, name), rules)
            try:
                return router.cover(wanted.model_id, wanted.weights_sha256, span, exclude), dtype
            except NoRoute:
                continue
        everyone = ShardRouter(known, rules)
        everyone.cover(wanted.model_id, wanted.weights_sha256, span, exclude)
        raise NoRoute(
            f"The layers of {wanted.model_id} are served in different number formats, and no one"
            " of these covers the model.",
            fix="Start the nodes with the same `--dtype` and `--quant`.",
        )


class _OneFormat:
    """The shards of one number format; a `mesh.routing.router.ShardSource`."""

    def __init__(self, known: KnownShards, name: str) -> None:
        self._known = known
        self._name = name

    def candidates(self, model_id: ModelId) -> list[Candidate]:
        """The known shards of this number format."""
        everyone = self._known.candidates(model_id)
        return [each for each in everyone if each.descriptor.dtype == self._name]
