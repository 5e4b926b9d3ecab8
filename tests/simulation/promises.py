"""What a simulated run must keep to, whatever happens in it.

Never a wrong token, unless a host lies that was not caught yet; who is honest is never called a
liar, nor doubted where nobody lies. Every request ends, with `Done` or a typed error, in bounded
time; it fails only when too few nodes were left unharmed. No hop sees a position twice or misses
one; a position goes through a layer at most once more per loss of that layer. In the end every hop
is free and no task is left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from mesh.errors import MeshError
from mesh.pipeline.engine import Engine
from mesh.routing.cover import key_of
from mesh.types import (
    Done,
    LayerRange,
    PipelineAborted,
    ShardFailover,
    ShardStatus,
    StreamFrame,
    TokenDelta,
)
from tests.pipeline.toy_mesh import TOTAL_LAYERS, expected_tokens
from tests.simulation.ledger import Ledger
from tests.simulation.schedule import Ask, Schedule
from tests.simulation.world import World

_ALL = LayerRange(0, TOTAL_LAYERS)


@dataclass(slots=True)
class Outcome:
    """How one request ended: ``done``, ``left``, ``failed CODE``, ``stuck`` or ``not asked``."""

    ask: Ask
    ended: str = "not asked"
    prompt: list[int] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    late_lies: int = 0
    lost: list[LayerRange] = field(default_factory=list)
    lost_shards: Counter[str] = field(default_factory=Counter)
    hops_at_first_loss: dict[str, int] = field(default_factory=dict)
    failovers: int = 0

    def begin(self, prompt: list[int]) -> None:
        """It is asked now."""
        self.prompt, self.expected = prompt, expected_tokens(prompt, self.ask.count)


class Promises:
    """Looks on; what is broken goes to the ledger. `harmed`: nodes that something happened to."""

    def __init__(self, schedule: Schedule, world: World, engine: Engine, ledger: Ledger) -> None:
        self.harmed: set[str] = set()
        self.caught = 0
        self._schedule = schedule
        self._world = world
        self._engine = engine
        self._ledger = ledger
        self._liar = None if schedule.lie is None else world.hosts[schedule.lie.node]

    # While requests run

    def took(self, frame: StreamFrame, outcome: Outcome) -> None:
        """A frame came."""
        name = outcome.ask.name
        self._ledger.note(f"{name} {frame.type}")
        if outcome.ended == "done":
            self._ledger.broke(f"{name}: {frame.type} after done")
        if isinstance(frame, TokenDelta):
            outcome.tokens += frame.token_ids
            self._check_last(len(frame.token_ids), outcome)
        elif isinstance(frame, ShardStatus):
            outcome.failovers += frame.status == "degraded"
            self._count_loss(outcome, frame)
            outcome.lost.append(LayerRange.parse(frame.shard_id.rpartition(":")[2]))
        elif isinstance(frame, ShardFailover):
            spans = [LayerRange.parse(name.rpartition(":")[2]) for name in frame.replaced_by]
            if {i for span in spans for i in range(span.start, span.stop)} == {*range(_ALL.stop)}:
                outcome.lost.append(_ALL)  # a new route may have had to begin from nothing
        elif isinstance(frame, PipelineAborted):
            outcome.lost.append(_ALL)  # what goes on at home starts there from nothing
        elif isinstance(frame, Done):
            outcome.ended = "done"
            said = (list(frame.token_ids), frame.failovers, frame.finish_reason)
            if said != (outcome.tokens, outcome.failovers, "length"):
                self._ledger.broke(f"{name}: done says {said}")
            if len(outcome.tokens) != outcome.ask.count:
                self._ledger.broke(f"{name}: {len(outcome.tokens)} of {outcome.ask.count} tokens")

    def failed(self, error: MeshError, outcome: Outcome) -> None:
        """A request ended with an error."""
        name = outcome.ask.name
        if self._unharmed_cover() or self._schedule.has_home:
            self._ledger.broke(f"{name} failed although others could have served it: {error}")
        if error.code not in ("shard_unavailable", "busy"):
            self._ledger.broke(f"{name} failed with {error.code}: {error}")

    def ended(self, outcome: Outcome) -> None:
        """A request ended."""
        held = outcome.hops_at_first_loss
        twice = [shard for shard, times in outcome.lost_shards.items() if times > held[shard]]
        if self._liar is not None:  # it is left when it is caught, also by whom it served before
            twice = [shard for shard in twice if not shard.endswith(f" of {self._liar.node.name}")]
        if twice and self._unharmed_cover():
            self._ledger.broke(f"{outcome.ask.name} was given to {twice} again, who had failed it")
        if self._schedule.checks:
            return  # what is computed to check others is computed in the request's name, too
        for layer in range(TOTAL_LAYERS):
            allowed = 1 + sum(layer in lost for lost in outcome.lost)
            times = self._ledger.repeats(len(outcome.prompt) + outcome.ask.count, layer)
            if times > allowed:
                self._ledger.broke(
                    f"{outcome.ask.name}: a position went through layer {layer} "
                    f"{times} times, {outcome.failovers} failovers"
                )

    # In the end

    def check_freed(self) -> None:
        """Only finished generations are kept, parked, on hops that the asker still knows of."""
        hosts = [*self._world.hosts.values(), self._world.home]
        for host in hosts:
            if host.active():
                self._ledger.broke(f"{host.node.name} still has {host.active()} streams in use")
        if self._engine.sessions.live:
            self._ledger.broke("a session is live after its request ended")
        kept = sum(len(s.route.hops) for s in self._engine.sessions.known())
        held = sum(len(host.sessions) for host in hosts)
        if held > kept:
            self._ledger.broke(f"hops hold {held} sessions, the asker knows of {kept}")

    def check_honesty(self) -> None:
        """Nobody was called a liar, or doubted, for what an honest host said."""
        liar = self._liar.node.name if self._liar is not None and self._liar.has_lied else None
        for event in self._engine.oversight.take_events():
            about = event["node"]
            if event["type"] == "shard_doubtful" and liar is None:
                self._ledger.broke(f"{about} was doubted, and nobody lied")
            if event["type"] == "shard_lied":
                self.caught += 1
                if about != liar:
                    self._ledger.broke(f"{about} was called a liar")

    def check_end(self) -> None:
        """The asker has closed everything."""
        for host in [*self._world.hosts.values(), self._world.home]:
            if host.sessions:
                self._ledger.broke(f"{host.node.name} holds {len(host.sessions)} sessions")
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            self._ledger.broke(f"tasks are left: {sorted(task.get_name() for task in left)}")

    # Private

    def _check_last(self, count: int, outcome: Outcome) -> None:
        """The last `count` tokens follow from all before, or a liar at large had a hand in them.

        One of each request may have been under way when the liar was caught.
        """
        said = outcome.tokens
        if said == outcome.expected[: len(said)]:
            return
        if expected_tokens([*outcome.prompt, *said[:-count]], count) == said[-count:]:
            return
        liar = self._liar
        if liar is not None and liar.has_lied:
            reputations = self._engine.oversight.reputations
            outcome.late_lies += reputations.is_liar(key_of(liar.descriptor))
            if outcome.late_lies <= 1:
                return
        self._ledger.broke(f"{outcome.ask.name}: {said} instead of {outcome.expected}")

    def _count_loss(self, outcome: Outcome, frame: ShardStatus) -> None:
        """A shard may hold several hops of one request, and lose them all at once."""
        name = f"{frame.shard_id} of {frame.node}"
        outcome.lost_shards[name] += 1
        live = self._engine.sessions.live.values()
        routes = [s.route for s in live if s.request_id == outcome.ask.name]
        hops = [hop.hop.shard for route in routes for hop in route.hops]
        held = sum((h.shard_id, h.node_name) == (frame.shard_id, frame.node) for h in hops)
        held += frame.status == "draining"  # that hop was replaced before it is told
        outcome.hops_at_first_loss.setdefault(name, max(1, held))

    def _unharmed_cover(self) -> bool:
        """Whether nodes that nothing happened to hold all layers, with room for every request."""
        asks = len(self._schedule.asks)
        unharmed = [n for n in self._schedule.nodes if n.name not in self.harmed]
        roomy = [n.layers for n in unharmed if n.streams >= asks]
        return all(any(i in layers for layers in roomy) for i in range(TOTAL_LAYERS))
