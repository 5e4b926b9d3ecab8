"""Runs one schedule over the real asker and checks every promise it makes.

Promises: never a wrong token; every request ends, with `Done` or a typed error, in bounded time; it
fails only when too few nodes were left unharmed; no hop sees a position twice or misses one; a
position goes through a layer at most once more per loss of that layer; in the end every hop is free
and no task is left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from mesh.discovery.advertisement import Advertisement, encode
from mesh.errors import MeshError
from mesh.pipeline.engine import Engine, EngineSettings
from mesh.pipeline.model import AskerModel
from mesh.types import (
    Done,
    LayerRange,
    NodeId,
    PipelineAborted,
    RouteHop,
    ShardFailover,
    ShardHealth,
    ShardStatus,
    StreamFrame,
    TokenDelta,
)
from tests.fakes import no_judge
from tests.pipeline.toy_mesh import (
    HIDDEN,
    MODEL,
    PRIME,
    TOTAL_LAYERS,
    WEIGHTS,
    ToyEnds,
    ToyText,
    toy_request,
)
from tests.simulation.ledger import Ledger
from tests.simulation.schedule import WARM_UP, Ask, Fault, Schedule, draw
from tests.simulation.toy import whole_model
from tests.simulation.virtual_loop import run_virtually
from tests.simulation.world import KEEPALIVE_S, SimHost, World

DEADLINE_S = 300.0
"""Virtual seconds within which every request ends: eight losses, each noticed late."""

DRAIN_S = 3.0
"""How long a host that stops politely waits for its sessions to move."""

_MODEL = AskerModel(MODEL, WEIGHTS, TOTAL_LAYERS, HIDDEN, PRIME, 4096, ToyEnds(), ToyText())
_ALL = LayerRange(0, TOTAL_LAYERS)


@dataclass(slots=True)
class Outcome:
    """How one request ended: ``done``, ``left``, ``failed CODE``, ``stuck`` or ``not asked``."""

    ask: Ask
    ended: str = "not asked"
    tokens: list[int] = field(default_factory=list)
    lost: list[LayerRange] = field(default_factory=list)
    lost_shards: Counter[str] = field(default_factory=Counter)
    hops_at_first_loss: dict[str, int] = field(default_factory=dict)
    failovers: int = 0


@dataclass(slots=True)
class Report:
    """One run."""

    schedule: Schedule
    broken: list[str]
    outcomes: list[Outcome]
    faults: int
    trace_hash: str
    lines: list[str]

    def tally(self) -> Counter[str]:
        """What happened, counted."""
        counts = Counter(outcome.ended for outcome in self.outcomes)
        counts["failovers"] = sum(outcome.failovers for outcome in self.outcomes)
        counts["faults"] = self.faults
        return counts


def run(seed: int, *, keep_lines: bool = False) -> Report:
    """Draw and run the schedule of a seed."""
    ledger, schedule = Ledger(keep_lines=keep_lines), draw(seed)

    async def main() -> tuple[list[Outcome], int]:
        a_run = _Run(schedule, ledger)
        return await a_run.all(), a_run.faults

    outcomes, faults = run_virtually(main)
    return Report(schedule, ledger.broken, outcomes, faults, ledger.trace_hash, ledger.lines)


class _Run:
    def __init__(self, schedule: Schedule, ledger: Ledger) -> None:
        self._loop = asyncio.get_running_loop()
        ledger.now = self._loop.time
        self._schedule = schedule
        self._ledger = ledger
        self._world = World(schedule.nodes, schedule.delay_s, schedule.seed, ledger)
        self._engine = self._asker()
        self._listed = set(self._world.hosts)
        self._ended = {ask.name: asyncio.Event() for ask in (WARM_UP, *schedule.asks)}
        self._outcomes = {ask.name: Outcome(ask) for ask in (WARM_UP, *schedule.asks)}
        self._armed: list[list[Any]] = []
        self._harmed: set[str] = set()
        self._calm = False
        self.faults = 0
        for host in self._world.hosts.values():
            host.on_message = partial(self._seen, host.node.name)

    def _asker(self) -> Engine:
        """The product's asker over the simulated links."""
        settings = EngineSettings(
            max_shards=16,
            allow_self_as_first=False,
            stall_limit_s=self._schedule.stall_limit_s,
            activation_dtype="fp32",
            cache_dir="",  # nothing is learnt beforehand, so that only the schedule asks
            fallback_to_local=self._schedule.has_home,
            fallback_after=2,
        )
        return Engine(_MODEL, NodeId("asker"), settings, self._go_home, no_judge, self._world.dial)

    async def all(self) -> list[Outcome]:
        self._publish()
        watch = asyncio.create_task(self._engine.watch_stalls(), name="watch stalls")
        if self._schedule.is_warm:
            await self._client(WARM_UP)
        for fault in self._schedule.faults:
            self._arm(fault)
        async with asyncio.TaskGroup() as group:
            for ask in self._schedule.asks:
                group.create_task(self._client(ask), name=ask.name)
        await self._calm_down()
        self._check_freed()
        await self._engine.close()
        await asyncio.sleep(KEEPALIVE_S + 5)
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        self._check_end()
        return list(self._outcomes.values())

    # Clients

    async def _client(self, ask: Ask) -> None:
        outcome = self._outcomes[ask.name]
        try:
            prompt = list(ask.prompt)
            if ask.follows is not None:
                await self._ended[ask.follows].wait()
                before = self._outcomes[ask.follows]
                if before.ended != "done":
                    return
                prompt = [*before.ask.prompt, *before.tokens, *prompt]
            await asyncio.sleep(ask.start_s)
            await self._stream(ask, prompt, outcome)
        finally:
            self._ledger.note(f"{ask.name} {outcome.ended} {outcome.tokens}")
            self._ended[ask.name].set()
        self._check_request(len(prompt) + ask.count, outcome)

    async def _stream(self, ask: Ask, prompt: list[int], outcome: Outcome) -> None:
        expected = whole_model(prompt, ask.count)
        frames = self._engine.chat(toy_request(prompt, ask.count, ask.name))
        try:
            async with asyncio.timeout(DEADLINE_S), contextlib.aclosing(frames):
                async for frame in frames:
                    self._take(frame, expected, outcome)
                    if ask.leaves_after is not None and len(outcome.tokens) >= ask.leaves_after:
                        outcome.ended = "left"
                        return
        except MeshError as error:
            outcome.ended = f"failed {error.code}"
            self._check_failure(error, outcome)
        except TimeoutError:
            outcome.ended = "stuck"
            self._ledger.broke(f"{ask.name} had not ended after {DEADLINE_S:g} s")

    def _take(self, frame: StreamFrame, expected: list[int], outcome: Outcome) -> None:
        name = outcome.ask.name
        self._ledger.note(f"{name} {frame.type}")
        if outcome.ended == "done":
            self._ledger.broke(f"{name}: {frame.type} after done")
        if isinstance(frame, TokenDelta):
            outcome.tokens += frame.token_ids
            if outcome.tokens != expected[: len(outcome.tokens)]:
                self._ledger.broke(f"{name}: {outcome.tokens} instead of {expected}")
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
            if said != (expected, outcome.failovers, "length"):
                self._ledger.broke(f"{name}: done says {said}")

    # Faults

    def _arm(self, fault: Fault) -> None:
        if fault.at_s is not None:
            self._loop.call_later(fault.at_s, self._befall, fault, fault.victim)
        elif fault.at_message is not None:
            self._armed.append([fault, fault.at_message[1]])

    def _seen(self, name: str, kind: str) -> None:
        """A message reached a host: it may be the one that a fault waits for."""
        for number, (fault, left) in enumerate(self._armed):
            blocked = fault.chained and number > 0 and self._armed[number - 1][1] > 0
            if left <= 0 or blocked or fault.at_message[0] != kind:
                continue
            if fault.victim in (None, name):
                self._armed[number][1] -= 1
                if left == 1:
                    self._befall(fault, name)

    def _befall(self, fault: Fault, name: str) -> None:
        host = self._world.hosts[name]
        if self._calm or not host.alive:
            return
        self._harmed.add(name)
        self.faults += 1
        self._ledger.note(f"fault {fault.kind} {name}")
        match fault.kind:
            case "crash" | "power loss":
                host.die(noticed=fault.kind == "crash")
                self._loop.call_later(fault.withdrawn_after_s, self._withdraw, host)
                self._later(fault, partial(self._restart, host))
            case "freeze":
                host.freeze()
                self._later(fault, host.thaw)
            case "cut":
                host.cut_links()
            case "silence":
                host.silence_links()
            case "slow":
                host.step_s = 0.8 * self._schedule.stall_limit_s
                self._later(fault, partial(setattr, host, "step_s", host.node.step_s))
            case "forget":
                host.forget()
            case "refuse":
                host.refusing = True
                self._later(fault, partial(setattr, host, "refusing", False))

            case "drain":
                host.drain()
                self._loop.call_later(DRAIN_S, self._stop, host, fault)

    def _stop(self, host: SimHost, fault: Fault) -> None:
        """A drained host has waited long enough."""
        if host.alive and host.draining:
            host.die(noticed=True)
            self._loop.call_later(fault.withdrawn_after_s, self._withdraw, host)
            self._later(fault, partial(self._restart, host))

    async def _go_home(self) -> tuple[RouteHop, ...]:
        await asyncio.sleep(0.2)
        return (RouteHop(self._world.home.descriptor, _ALL),)

    def _later(self, fault: Fault, act: Callable[[], None]) -> None:
        if fault.lasts_s is not None:
            self._loop.call_later(fault.lasts_s, act)

    def _withdraw(self, host: SimHost) -> None:
        if not host.alive:
            self._listed.discard(host.node.name)
            self._publish()

    def _restart(self, host: SimHost) -> None:
        self._ledger.note(f"restart {host.node.name}")
        host.restart()
        self._listed.add(host.node.name)
        self._publish()

    def _publish(self) -> None:
        self._engine.shards.replace(
            [_advertised(h) for name, h in self._world.hosts.items() if name in self._listed]
        )

    async def _calm_down(self) -> None:
        """No more faults; who sleeps wakes up, and what is under way arrives."""
        self._calm = True
        for host in self._world.hosts.values():
            host.thaw()
        await asyncio.sleep(KEEPALIVE_S + 5)

    def _count_loss(self, outcome: Outcome, frame: ShardStatus) -> None:
        """A shard may hold several hops of one request, and lose them all at once."""
        name = f"{frame.shard_id} of {frame.node}"
        outcome.lost_shards[name] += 1
        live = self._engine.sessions.live.values()
        chains = [s.chain for s in live if s.request_id == outcome.ask.name]
        hops = [station.hop.shard for chain in chains for station in chain.stations]
        held = sum((h.shard_id, h.node_name) == (frame.shard_id, frame.node) for h in hops)
        outcome.hops_at_first_loss.setdefault(name, max(1, held))

    # Promises

    def _unharmed_cover(self) -> bool:
        """Whether nodes that nothing happened to hold all layers, with room for every request."""
        asks = len(self._schedule.asks)
        unharmed = [n for n in self._schedule.nodes if n.name not in self._harmed]
        roomy = [n.layers for n in unharmed if n.streams >= asks]
        return all(any(i in layers for layers in roomy) for i in range(TOTAL_LAYERS))

    def _check_failure(self, error: MeshError, outcome: Outcome) -> None:
        name = outcome.ask.name
        if self._unharmed_cover() or self._schedule.has_home:
            self._ledger.broke(f"{name} failed although others could have served it: {error}")
        if error.code not in ("shard_unavailable", "busy"):
            self._ledger.broke(f"{name} failed with {error.code}: {error}")

    def _check_request(self, positions: int, outcome: Outcome) -> None:
        held = outcome.hops_at_first_loss
        twice = [shard for shard, times in outcome.lost_shards.items() if times > held[shard]]
        if twice and self._unharmed_cover():
            self._ledger.broke(f"{outcome.ask.name} was given to {twice} again, who had failed it")
        for layer in range(TOTAL_LAYERS):
            allowed = 1 + sum(layer in lost for lost in outcome.lost)
            if self._ledger.repeats(positions, layer) > allowed:
                self._ledger.broke(
                    f"{outcome.ask.name}: a position went through layer {layer} "
                    f"{self._ledger.repeats(positions, layer)} times, {outcome.failovers} failovers"
                )

    def _check_freed(self) -> None:
        """Only finished generations are kept, parked, on hops that the asker still knows of."""
        hosts = [*self._world.hosts.values(), self._world.home]
        for host in hosts:
            if host.active():
                self._ledger.broke(f"{host.node.name} still has {host.active()} streams in use")
        if self._engine.sessions.live:
            self._ledger.broke("a session is live after its request ended")
        kept = sum(len(s.chain.stations) for s in self._engine.sessions.known())
        held = sum(len(host.sessions) for host in hosts)
        if held > kept:
            self._ledger.broke(f"hops hold {held} sessions, the asker knows of {kept}")

    def _check_end(self) -> None:
        for host in self._world.hosts.values():
            if host.sessions:
                self._ledger.broke(f"{host.node.name} holds {len(host.sessions)} sessions")
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            self._ledger.broke(f"tasks are left: {sorted(task.get_name() for task in left)}")


def _advertised(host: SimHost) -> dict[str, object]:
    health = ShardHealth(
        host.descriptor.shard_id, True, datetime(2000, 1, 1, tzinfo=UTC), 0.0, 0.0,
        host.node.queue_depth, 0,
    )  # fmt: skip
    return {**encode(Advertisement(host.descriptor, health))}
