"""What the planner of `mesh.routing` has said of what a deployment lacks, and the room that is left
while a plan is made of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mesh.deployments.wishes import Quant, Span, Wish
from mesh.errors import NotEnoughMemory
from mesh.models.cuts import ANYWHERE, Cuts
from mesh.types import LayerRange, NodeId

PAUSED = "it is paused, until `hearthnet resume` there"


@dataclass(frozen=True, slots=True)
class AvailableNode:
    """A node that may be used; `free_mb` is None where nobody knows. One that `is_paused` keeps
    what it has, and is given no more."""

    node: NodeId
    name: str
    free_mb: int | None = None
    is_paused: bool = False


@dataclass(frozen=True, slots=True)
class Gap:
    """Layers that a replica lacks; `kept` of its spans stay where they are."""

    replica: int
    layers: LayerRange
    kept: int

    def shared_with(self, lying: Iterable[tuple[int, Span]]) -> set[NodeId]:
        """Who has some of these layers for another replica, as `lying` says with the numbers of
        replicas: two copies on one machine are lost together."""
        others = (span for number, span in lying if number != self.replica)
        return {span.node for span in others if span.layers.overlaps(self.layers)}


@dataclass(frozen=True, slots=True)
class Laid:
    """Where the planner lays what is lacking: whole replicas, and the gaps of others.

    `refusal` is why something found no room; None where all did, or the planner cannot say. Where
    it cannot, `rooms` are how many layers each machine has room for beside what is there; nobody
    knows it of the others. `extra` layers fit less for each further shard on a machine, and `held`
    lie on its disk already. `quant` is the format that fits, where machines would choose others.
    `cuts` are where the model may be parted.
    """

    replicas: tuple[tuple[Span, ...], ...] = ()
    gaps: Mapping[Gap, tuple[Span, ...]] = field(default_factory=dict)
    refusal: NotEnoughMemory | None = None
    rooms: Mapping[NodeId, int] = field(default_factory=dict)
    quant: Quant = ""
    extra: int = 0
    held: Mapping[NodeId, Sequence[LayerRange]] = field(default_factory=dict)
    cuts: Cuts = ANYWHERE


UNKNOWN = Laid()
"""Where the planner cannot say."""


class Rooms:
    """How many layers machines still have room for, while a plan is made."""

    def __init__(self, laid: Laid, machines: Sequence[AvailableNode]) -> None:
        self.extra = laid.extra
        self.cuts = laid.cuts
        self._held = laid.held
        self._left = dict(laid.rooms)
        self._machines = machines

    def of(self, node: NodeId) -> int | None:
        """How many; None where nobody knows."""
        return self._left.get(node)

    def held(self, node: NodeId, layers: LayerRange) -> int:
        """How many of these layers lie on the machine's disk."""
        return len(layers) - sum(map(len, layers.lacking(self._held.get(node, ()))))

    def first_held(self, node: NodeId) -> int:
        """The first layer that does; one behind all where none does."""
        return min((each.start for each in self._held.get(node, ())), default=1 << 30)

    def take(self, spans: Iterable[Span]) -> None:
        """These are placed now."""
        for span in spans:
            if span.node in self._left:
                self._left[span.node] -= len(span.layers) + self.extra

    def hold(self, spans: Iterable[Span]) -> bool:
        """Whether all of these fit together."""
        wanted: Counter[NodeId] = Counter()
        for span in spans:
            wanted[span.node] += len(span.layers) + self.extra
        left = self._left
        return all(count - self.extra <= left.get(node, count) for node, count in wanted.items())

    def refusal(self, wish: Wish, layers: int) -> NotEnoughMemory:
        """So many layers do not fit."""
        said = "; ".join(
            f"{each.name}: {PAUSED}"
            if each.is_paused
            else f"{each.name} has room for {max(0, min(self._left[each.node], wish.total_layers))}"
            + (f" ({each.free_mb} MiB are free)" if each.free_mb is not None else "")
            for each in self._machines
            if each.is_paused or each.node in self._left
        )
        return NotEnoughMemory(
            f"{wish.model_id} does not fit: {layers} layers need a place; {said}.",
            fix="Have fewer replicas (--replicas), use other machines (--nodes) or fewer bits"
            " (--quant), or `hearthnet evict` what may go.",
        )
