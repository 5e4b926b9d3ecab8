"""A job's hops: which shards run its layers, and an intervention session on each.

The rules are those of chat (`mesh.routing`), with one more: all hops of a job compute in one number
format, so that its numbers are those of one machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from mesh.clock import LoopClock
from mesh.errors import Busy, MeshError, NoRoute
from mesh.health.standing import Standings
from mesh.interventions.relay import HopRefused, HopSessions
from mesh.pipeline.claims import Claims
from mesh.pipeline.lines import Lines
from mesh.pipeline.pushed import PushedShards
from mesh.routing.cover import Candidate, CoverRules, ShardKey, key_of
from mesh.routing.router import ShardRouter
from mesh.types import LayerRange, ModelId, NodeId, RouteHop

logger = logging.getLogger(__name__)

_WIDEST_FIRST = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The model that a route is for."""

    model_id: ModelId
    weights_sha256: str
    total_layers: int


@dataclass(frozen=True, slots=True)
class OpenRoute:
    """A route with its sessions; all of it computes in `dtype` (fp32, bf16 or fp16)."""

    hops: tuple[RouteHop, ...]
    dtype: str
    sessions: HopSessions


class Routes:
    """Opens routes over the shards that this node may use."""

    def __init__(self, own: NodeId, lines: Lines, rules: Callable[[int], CoverRules]) -> None:
        """`rules` gives those of a route through a model of so many layers."""
        self._own = own
        self._lines = lines
        self._rules = rules
        self._standings = Standings(LoopClock())
        self._claims = Claims(own)

    async def open(
        self, wanted: Wanted, shards: Sequence[dict[str, Any]], exclude: Collection[ShardKey] = ()
    ) -> OpenRoute:
        """A route where every hop has given a session.

        `shards` is what the daemon knows of who serves the model now, as `AskerOwner.routable`.
        Raises NoRoute, WeightsMismatch, or Busy when only occupied shards are in the way.
        """
        pushed = PushedShards(self._own, self._standings, self._claims)
        pushed.replace(shards)
        refused: dict[ShardKey, HopRefused] = {}
        while True:
            try:
                hops, dtype = self._pick(pushed, wanted, [*exclude, *refused])
            except NoRoute as nobody:
                raise _with_refusals(nobody, list(refused.values())) from None
            try:
                sessions = await HopSessions.open(hops, self._lines, self._claims)
            except HopRefused as refusal:
                # Each round excludes one shard more, so this ends.
                refused[key_of(refusal.hop.shard)] = refusal
                logger.info("shard=%s refused: %s", refusal.hop.shard.shard_id, refusal.error)
                continue
            return OpenRoute(hops, dtype, sessions)

    def failed(self, hop: RouteHop, error: MeshError) -> None:
        """Rank a shard that failed a job behind others for a while."""
        self._standings.failed(key_of(hop.shard), error.code)

    def keep_only(self, hosts: frozenset[NodeId]) -> None:
        """Cut the links to all other nodes; jobs on them are run again elsewhere."""
        self._lines.keep_only(hosts)

    async def close(self) -> None:
        """Close every link."""
        await self._lines.close()

    def _pick(
        self, pushed: PushedShards, wanted: Wanted, exclude: Collection[ShardKey]
    ) -> tuple[tuple[RouteHop, ...], str]:
        span = LayerRange(0, wanted.total_layers)
        rules = self._rules(wanted.total_layers)
        for dtype in _WIDEST_FIRST:
            router = ShardRouter(_OneDtype(pushed, dtype), rules)
            try:
                return router.cover(wanted.model_id, wanted.weights_sha256, span, exclude), dtype
            except NoRoute:
                continue
        everyone = ShardRouter(pushed, rules)
        everyone.cover(wanted.model_id, wanted.weights_sha256, span, exclude)
        raise NoRoute(
            f"The layers of {wanted.model_id} are served in different number formats, and no one"
            " of these covers the model.",
            fix="Start the nodes with the same `--dtype`.",
        )


class _OneDtype:
    """The shards that compute in one number format; a `mesh.routing.router.ShardStore`."""

    def __init__(self, pushed: PushedShards, dtype: str) -> None:
        self._pushed = pushed
        self._dtype = dtype

    def candidates(self, model_id: ModelId) -> list[Candidate]:
        """See `mesh.routing.router.ShardStore`."""
        known = self._pushed.candidates(model_id)
        return [each for each in known if each.descriptor.dtype == self._dtype]


def _with_refusals(nobody: NoRoute, refused: Sequence[HopRefused]) -> MeshError:
    """What to say of a route that failed because of what shards answered."""
    said = "".join(f" {each.hop.shard.node_name}: {each.error.message}" for each in refused)
    if refused and all(isinstance(each.error, Busy) for each in refused):
        return Busy(f"No shard has room for a job:{said}", fix="Try again when one has ended.")
    return NoRoute(nobody.message + said, fix=nobody.fix) if said else nobody
