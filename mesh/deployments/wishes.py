"""A deployment as the signed log has it: what somebody wishes for, and where it is to run.

Two facts. The wish is an operator's: which checkpoint, how many replicas, within what. The plan
says which node holds which layers; whoever changes a wish makes one for it, and one node makes
another when a machine stays away. So a plan that was made at the same moment never undoes a wish.
A deployment's id is never used again; evicting it is its last wish, and counts whatever was wished
at the same moment. Of several deployments of one checkpoint, which is what operators make who had
not heard of each other, the one with the lowest id stands, with its settings; the others are merged
into it, and nothing is loaded for them.

Pure data and its strict form; nothing here knows the log, the network or what a node holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from mesh import codec
from mesh.codec import MAX_TEXT, Int63, Sha256
from mesh.events.state import Fact
from mesh.events.types import EventId, Order
from mesh.types import MAX_LAYERS, LayerRange, ModelId, NodeId, ShardId, shard_id

MAX_REPLICAS = 16
MAX_SPANS = 256
"""Of one plan: it has to fit into an event."""
MAX_OF_AUTHOR = 64
"""Deployments whose newest wish is by one author: of those that stand the newest so many count, and
of those that were evicted so many are known. All are looked at whenever the log changes."""
MINIMUM_S = 3600.0
"""The seed's minimum deployment time."""

_LONGEST_NAME = MAX_TEXT - len(":9999-9999#15")
"""So that what its shards are called can be told: a node of which one thing cannot be told tells
nothing that others would take."""

DeploymentId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
_Node = Annotated[NodeId, Meta(pattern=r"\A[a-z0-9]{1,64}\Z")]
_Seconds = Annotated[float, Meta(ge=0, le=86400 * 366)]
Quant = Literal["", "auto", "none", "int8", "int4"]


class Span(NamedTuple):
    """A contiguous range of layers on one node."""

    node: _Node
    layers: LayerRange


_Spans = Annotated[tuple[Span, ...], Meta(max_length=MAX_SPANS)]


class Replica(NamedTuple):
    """One whole copy of the model over some nodes; its number is never used again."""

    number: Int63
    spans: _Spans


@dataclass(frozen=True, slots=True)
class Wish:
    """What an operator wants. `layers_mb` is what all layers take as they are stored.

    `nodes` are the only ones that may be used, if there are any; `pins` are spans that have to be
    where they say. `quant` is the number format, '' for each node's own setting; `context` the
    positions that have to fit, 0 for each node's own. A `dedicated` deployment never goes down a
    level or makes room for another; others may after `minimum_s`, and do so when nobody has used
    them for `keep_alive_s`, if that is not 0. One that is `resting` is COLD: its plan says where it
    comes up again. An evicted one wants nothing, for ever.
    """

    deployment: DeploymentId
    model_id: Annotated[ModelId, Meta(min_length=1, max_length=_LONGEST_NAME), codec.printable]
    weights_sha256: Sha256
    total_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    layers_mb: Annotated[int, Meta(ge=0, le=1 << 40)]
    replicas: Annotated[int, Meta(ge=0, le=MAX_REPLICAS)] = 1
    dedicated: bool = False
    quant: Quant = ""
    context: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    minimum_s: _Seconds = MINIMUM_S
    keep_alive_s: _Seconds = 0.0
    nodes: Annotated[tuple[_Node, ...], Meta(max_length=MAX_SPANS)] = ()
    pins: _Spans = ()
    resting: bool = False
    evicted: bool = False

    @property
    def whole(self) -> LayerRange:
        """All layers of the model."""
        return LayerRange(0, self.total_layers)

    def payload(self) -> dict[str, Any]:
        """What the event says."""
        return codec.plain(self)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a deployment is to run.

    `wish` is the event that it was made for. The highest `epoch` counts among plans for the same
    wish, then the newest. One that was `asked` for by an operator may open a gap where there is no
    room for old and new; one that a node made by itself never does.
    """

    deployment: DeploymentId
    wish: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    epoch: Int63
    replicas: Annotated[tuple[Replica, ...], Meta(max_length=MAX_REPLICAS)]
    next_replica: Int63
    asked: bool
    why: Annotated[str, Meta(max_length=512), codec.printable] = ""

    def spans_of(self, node: NodeId) -> list[LayerRange]:
        """What a node is to hold, once each."""
        return sorted(self.copies_on(node))

    def copies_on(self, node: NodeId) -> Counter[LayerRange]:
        """In how many replicas a node holds the same layers."""
        return Counter(
            s.layers for replica in self.replicas for s in replica.spans if s.node == node
        )

    @property
    def spans(self) -> set[Span]:
        """All that it puts somewhere."""
        return {span for replica in self.replicas for span in replica.spans}

    @property
    def nodes(self) -> set[NodeId]:
        """All that are to hold something."""
        return {span.node for replica in self.replicas for span in replica.spans}

    def payload(self) -> dict[str, Any]:
        """What the event says."""
        return codec.plain(self)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A wish with the plan that counts for it. `event` is the wish's, by `author` at `wall_ms`; a
    wish that was made knowing another has the higher `lamport`.

    A plan that was made for an earlier wish is followed until there is one for this. `merged_into`
    is the deployment of the same checkpoint that stands in its place, '' where it stands itself.
    """

    wish: Wish
    plan: Plan | None
    event: str
    author: NodeId
    wall_ms: int
    merged_into: str = ""
    lamport: int = 0

    @property
    def is_planned(self) -> bool:
        """Whether the plan is for this very wish."""
        return self.plan is not None and self.plan.wish == self.event

    @property
    def is_wanted(self) -> bool:
        """Whether anything is to be loaded for it."""
        wish = self.wish
        return not (self.merged_into or wish.evicted or wish.resting or wish.replicas == 0)

    @property
    def id(self) -> str:
        """The deployment's id."""
        return self.wish.deployment

    def shard(self, layers: LayerRange, copy: int = 0) -> ShardId:
        """What a shard of these layers is called."""
        return shard_id(self.wish.model_id, layers, copy)

    @property
    def ends(self) -> ShardId:
        """What the ends of its model, which who asks it has, are called among the shards."""
        return ShardId(f"{self.wish.model_id}:ends")

    def shards_of(self, node: NodeId, devices: int = 1) -> dict[ShardId, LayerRange]:
        """What a node with so many devices is to hold of it now: of the same layers in several
        replicas a copy on each device, as far as those go."""
        if self.plan is None or not self.is_wanted:
            return {}
        return {
            self.shard(layers, copy): layers
            for layers, count in sorted(self.plan.copies_on(node).items())
            for copy in range(min(count, devices))
        }


class Known:
    """What is in the events that were read the last time: a log that has grown by one is not to be
    converted anew, of which the plans of one author may take a second."""

    def __init__(self) -> None:
        self._before: dict[tuple[EventId, ...], Wish | Plan | None] = {}
        self._now = self._before

    def __len__(self) -> int:
        return len(self._now)

    def begin(self) -> None:
        """All that counts is read again; what is not is forgotten."""
        self._before, self._now = self._now, {}

    def wish(self, fact: Fact) -> Wish | None:
        """What `read_wish` gives."""
        found = self._found((fact.event_id,), lambda: read_wish(fact.payload))
        return found if isinstance(found, Wish) else None

    def plan(self, fact: Fact, of: Fact, wish: Wish) -> Plan | None:
        """What `read_plan` gives, where `wish` is in the event `of`."""
        key = fact.event_id, of.event_id
        found = self._found(key, lambda: read_plan(fact.payload, wish))
        return found if isinstance(found, Plan) else None

    def _found(
        self, key: tuple[EventId, ...], convert: Callable[[], Wish | Plan | None]
    ) -> Wish | Plan | None:
        found = self._now[key] = self._before[key] if key in self._before else convert()
        return found


def read(
    wishes: Mapping[str, Fact], plans: Mapping[str, Sequence[Fact]], known: Known | None = None
) -> dict[str, Deployment]:
    """Every deployment by its id, evicted and merged ones too; what is of no form known here, or
    beyond what one author may wish for, is left out. `known` is of the last time, and then of this.
    """
    known = Known() if known is None else known
    known.begin()
    found: dict[str, Deployment] = {}
    standing: dict[tuple[ModelId, str], str] = {}
    for name in _counting(wishes):
        fact = wishes[name]
        wish = known.wish(fact)
        if wish is None:
            continue
        event = fact.event_id.hex()
        plans_of = ((each.order, known.plan(each, fact, wish)) for each in plans.get(name, ()))
        made = [(plan.wish == event, plan.epoch, at, plan) for at, plan in plans_of if plan]
        best = max(made, key=lambda row: row[:3], default=None)
        plan = None if best is None else best[3]
        first = name
        if not wish.evicted:
            first = standing.setdefault((wish.model_id, wish.weights_sha256), name)
        merged_into = "" if first == name else first
        found[name] = Deployment(
            wish, plan, event, fact.author, fact.wall_ms, merged_into, fact.order[0]
        )
    return found


def _counting(wishes: Mapping[str, Fact]) -> list[str]:
    """The names of those that count, in order."""
    kinds: dict[tuple[NodeId, bool], list[tuple[Order, str]]] = {}
    for name, fact in wishes.items():
        kind = fact.author, fact.payload.get("evicted") is True
        kinds.setdefault(kind, []).append((fact.order, name))
    return sorted(name for each in kinds.values() for _, name in nlargest(MAX_OF_AUTHOR, each))


def live(deployments: Mapping[str, Deployment]) -> list[Deployment]:
    """Those that stand, by id: neither evicted nor merged into another."""
    standing = [each for each in deployments.values() if not each.wish.evicted]
    return sorted((each for each in standing if not each.merged_into), key=lambda each: each.id)


def merged(deployments: Mapping[str, Deployment], into: str) -> list[Deployment]:
    """Those that are merged into this one, by id."""
    return sorted(
        (each for each in deployments.values() if each.merged_into == into),
        key=lambda each: each.id,
    )


# The events' payloads, which are read strictly. Keys that this version does not know are let pass.


def read_wish(payload: Mapping[str, Any]) -> Wish | None:
    """The wish of a payload; None for one of a form that nobody knows here."""
    try:
        wish = codec.convert(payload, Wish, complete=True)
    except ValueError:
        return None
    return wish if _within(wish.pins, wish.whole) else None


def read_plan(payload: Mapping[str, Any], wish: Wish) -> Plan | None:
    """The plan of a payload; None for one that cannot be a plan of this wish."""
    try:
        plan = codec.convert(payload, Plan, complete=True)
    except ValueError:
        return None
    spans = [span for replica in plan.replicas for span in replica.spans]
    if plan.deployment != wish.deployment or len(spans) > MAX_SPANS:
        return None
    return plan if _within(spans, wish.whole) else None


def _within(spans: Iterable[Span], whole: LayerRange) -> bool:
    return all(whole.covers(span.layers) for span in spans)
