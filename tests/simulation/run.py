"""Runs one schedule over the real asker, under the eyes of `tests.simulation.promises`."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from mesh.discovery.advertisement import Advertisement
from mesh.errors import MeshError
from mesh.pipeline.commands import EngineSettings, Offer, RouteLimits
from mesh.pipeline.engine import Engine
from mesh.pipeline.model import AskerModel
from mesh.types import (
    LayerRange,
    NodeId,
    RouteHop,
    ShardHealth,
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
from tests.simulation.promises import Outcome, Promises
from tests.simulation.schedule import WARM_UP, Ask, Fault, Schedule, draw
from tests.simulation.virtual_loop import run_virtually
from tests.simulation.world import KEEPALIVE_S, SimHost, World

DEADLINE_S = 300.0
"""Virtual seconds within which every request ends: eight losses, each noticed late."""

DRAIN_S = 3.0
"""How long a host that stops politely waits for its sessions to move."""

_MODEL = AskerModel(MODEL, WEIGHTS, TOTAL_LAYERS, HIDDEN, PRIME, 4096, ToyEnds(), ToyText())
_ALL = LayerRange(0, TOTAL_LAYERS)


@dataclass(slots=True)
class Report:
    """One run."""

    schedule: Schedule
    broken: list[str]
    outcomes: list[Outcome]
    faults: Counter[str]
    caught: int
    trace_hash: str
    lines: list[str]

    def tally(self) -> Counter[str]:
        """What happened, counted."""
        counts = Counter(outcome.ended for outcome in self.outcomes)
        counts["failovers"] = sum(outcome.failovers for outcome in self.outcomes)
        counts.update(self.faults)
        counts["liars caught"] = self.caught
        return counts


def run(seed: int, *, keep_lines: bool = False) -> Report:
    """Draw and run the schedule of a seed."""
    ledger, schedule = Ledger(keep_lines=keep_lines), draw(seed)

    async def main() -> tuple[list[Outcome], _Run]:
        a_run = _Run(schedule, ledger)
        return await a_run.all(), a_run

    outcomes, a_run = run_virtually(main)
    caught, trace_hash = a_run.promises.caught, ledger.trace_hash
    return Report(schedule, ledger.broken, outcomes, a_run.faults, caught, trace_hash, ledger.lines)


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
        self.promises = Promises(schedule, self._world, self._engine, ledger)
        self._calm = False
        self.faults: Counter[str] = Counter()
        """Those that befell a host, by kind."""
        for host in self._world.hosts.values():
            host.on_message = partial(self._seen, host.node.name)
        if schedule.lie is not None:
            self._world.hosts[schedule.lie.node].lie = schedule.lie
            self.promises.harmed.add(schedule.lie.node)

    def _asker(self) -> Engine:
        """The product's asker over the simulated links."""
        settings = EngineSettings(
            RouteLimits(16, allow_self_as_first=False),
            stall_limit_s=self._schedule.stall_limit_s,
            activation_dtype="fp32",
            cache_dir="",  # nothing is learnt beforehand, so that only the schedule asks
            fallback_to_local=self._schedule.has_home,
            fallback_after=2,
            spot_check_probability=self._schedule.checks,
        )
        judge = self._judge if self._schedule.has_home else no_judge
        engine = Engine(_MODEL, NodeId("asker"), settings, self._go_home, judge, self._world.dial)
        engine.spot_checks.rng = random.Random(self._schedule.seed)
        return engine

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
        self.promises.check_freed()
        self.promises.check_honesty()
        await self._engine.close()
        await asyncio.sleep(KEEPALIVE_S + 5)
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        self.promises.check_end()
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
                said = before.tokens[: len(before.tokens) - ask.unsaid]
                prompt = [*before.ask.prompt, *said, *prompt]
            await asyncio.sleep(ask.start_s)
            outcome.begin(prompt)
            await self._stream(outcome)
        finally:
            self._ledger.note(f"{ask.name} {outcome.ended} {outcome.tokens}")
            self._ended[ask.name].set()
        self.promises.ended(outcome)

    async def _stream(self, outcome: Outcome) -> None:
        ask = outcome.ask
        asked = toy_request(outcome.prompt, ask.count, ask.name)
        # With drafts a position may pass a layer again without anything having been lost.
        frames = self._engine.chat(replace(asked, draft=False))
        try:
            async with asyncio.timeout(DEADLINE_S), contextlib.aclosing(frames):
                async for frame in frames:
                    self.promises.took(frame, outcome)
                    if ask.leaves_after is not None and len(outcome.tokens) >= ask.leaves_after:
                        outcome.ended = "left"
                        return
        except MeshError as error:
            outcome.ended = f"failed {error.code}"
            self.promises.failed(error, outcome)
        except TimeoutError:
            outcome.ended = "stuck"
            self._ledger.broke(f"{ask.name} had not ended after {DEADLINE_S:g} s")

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
        self.promises.harmed.add(name)
        self.faults[fault.kind] += 1
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

    async def _judge(self, layers: LayerRange) -> RouteHop:
        await asyncio.sleep(0.2)
        return RouteHop(self._world.home.descriptor, layers)

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


def _advertised(host: SimHost) -> Offer:
    health = ShardHealth(
        True, datetime(2000, 1, 1, tzinfo=UTC), 0.0, 0.0, host.node.queue_depth, 0
    )  # fmt: skip
    return Offer(Advertisement(host.descriptor, health))
