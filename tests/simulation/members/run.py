"""Runs one plan: honest nodes of real code, eve among them, and what must hold for all of them.

While she is at it: no turn of a loop is too long, memory and disk stay within their bounds
(`tests.simulation.members.bounds`), what honest members ask is answered, and rightly. When she has
stopped and links are whole: all have the same members; nobody was put out or raised whom no honest
anchor wished out or up; the anchors can still decide; what honest members recorded is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.errors import MeshError
from mesh.events.types import MODEL_PUBLISHED
from mesh.identity.decisions import Added, Decision, Revoked
from mesh.identity.roster import TrustLevel
from mesh.pipeline.engine import Engine
from mesh.types import Done, TokenDelta
from tests.identity.deciding import NOTHING, party
from tests.pipeline.toy_mesh import expected_tokens, toy_request
from tests.simulation.ledger import Ledger
from tests.simulation.members import bounds
from tests.simulation.members.casting import ANCHORS, HONEST, VILLAIN, Cast, cast, scratch
from tests.simulation.members.eve import Eve
from tests.simulation.members.house import House, Node
from tests.simulation.members.machine import run_metered
from tests.simulation.members.meter import Meter
from tests.simulation.members.plan import LASTS_S, Ask, Attack, Plan, draw

SAMPLED_S = 0.2
DISK_S = 5.0
SETTLE_S = 60.0
_FACT_BYTES = 12_000
"""Of what honest members record: pages for eve have something in them."""

ASK_S = 60.0
"""Within which a request ends: every stream may have to be taken back first."""


@dataclass(slots=True)
class Report:
    """One run. `tally` counts what happened in it."""

    plan: Plan
    broken: list[str]
    tally: Counter[str]
    most: Counter[str]
    """The most of each bounded thing that any node had."""
    trace_hash: str
    lines: list[str]


def run(seed: int, *, keep_lines: bool = False) -> Report:
    """Draw and run the plan of a seed."""
    plan, ledger = draw(seed), Ledger(keep_lines=keep_lines)
    here = cast(plan.level)  # has a run of its own

    async def main(meter: Meter) -> _Run:
        a_run = _Run(plan, here, Path(logs), meter, ledger)
        await a_run.all()
        return a_run

    with scratch() as logs, bounds.small_world():
        done = run_metered(main)
    return Report(plan, ledger.broken, done.tally, done.most, ledger.trace_hash, ledger.lines)


class _Run:
    def __init__(self, plan: Plan, here: Cast, logs: Path, meter: Meter, ledger: Ledger) -> None:
        self._loop = asyncio.get_running_loop()
        ledger.now = self._loop.time
        rng = random.Random(plan.seed + 1)
        self._plan = plan
        self._ledger = ledger
        self._meter = meter
        self._house = House(here, logs, rng, plan.delay_s, meter)
        self._eve = Eve(self._house, random.Random(plan.seed + 2))
        self._facts: dict[str, list[str]] = {name: [] for name in HONEST}
        self._engines: dict[str, Engine] = {}
        self._turns = {name: asyncio.Lock() for name in HONEST}
        self.tally: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    async def all(self) -> None:
        plan, house = self._plan, self._house
        await house.open()
        self._engines = {name: house.asker(name, plan.seed) for name in HONEST[1:]}
        watch = asyncio.create_task(self._watch(), name="watch")
        for name in HONEST:
            self._eve.enter(name)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._honestly())
            for attack in plan.attacks:
                group.create_task(self._attack(attack))
            for ask in plan.asks:
                group.create_task(self._ask(ask))
        await self._settle()
        self._check_end()
        await self._check_alive()
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        self._check_disk()
        self._check_turns()
        for engine in self._engines.values():
            await engine.close()
        await house.close()

    # What happens

    async def _attack(self, attack: Attack) -> None:
        await asyncio.sleep(attack.at_s)
        self._ledger.note(f"eve {attack.kind} {attack.targets} {attack.size}")
        self.tally[attack.kind] += 1
        self._eve.begin(attack)

    async def _ask(self, ask: Ask) -> None:
        await asyncio.sleep(ask.start_s)
        async with self._turns[ask.by]:  # one stream is all that is promised to each
            await self._asked(ask)

    async def _asked(self, ask: Ask) -> None:
        tokens: list[int] = []
        done = False
        frames = self._engines[ask.by].chat(toy_request(list(ask.prompt), ask.count, ask.name))
        try:
            async with asyncio.timeout(ASK_S), contextlib.aclosing(frames):
                async for frame in frames:
                    if isinstance(frame, TokenDelta):
                        tokens += frame.token_ids
                    done = done or isinstance(frame, Done)
        except (MeshError, TimeoutError) as error:
            self._ledger.broke(f"{ask.by}'s request {ask.name} failed: {error!r}")
            return
        expected = expected_tokens(list(ask.prompt), ask.count)
        self._ledger.note(f"{ask.name} {tokens}")
        if not done or tokens != expected:
            self._ledger.broke(f"{ask.name}: {tokens} instead of {expected}")
        self.tally["answered"] += 1

    async def _honestly(self) -> None:
        """What the others do meanwhile: facts, a revocation, being out of each other's sight."""
        plan = self._plan
        acts: list[tuple[float, Coroutine[Any, Any, None]]] = []
        for number, (at_s, name) in enumerate(plan.facts):
            acts.append((at_s, self._publish(name, f"honest-{number}")))
        if plan.revoked_s is not None:
            revocation = Revoked(party(VILLAIN).id, NOTHING, "she cheats")
            acts += [(plan.revoked_s, self._decide(name, revocation)) for name in ANCHORS]
        async with asyncio.TaskGroup() as group:
            for at_s, act in acts:
                group.create_task(self._at(at_s, act))
            if plan.parted is not None:
                group.create_task(self._part(*plan.parted))
        await asyncio.sleep(max(0.0, LASTS_S - self._loop.time()))

    async def _at(self, at_s: float, act: Coroutine[Any, Any, None]) -> None:
        await asyncio.sleep(at_s)
        await act

    async def _publish(self, name: str, model: str) -> None:
        await self._house.nodes[name].hearth.publish(
            MODEL_PUBLISHED, {"model_id": model, "x": bytes(_FACT_BYTES)}
        )
        self._facts[name].append(model)

    async def _decide(self, name: str, decision: Decision) -> None:
        try:
            await self._house.nodes[name].hearth.decide(decision)
        except MeshError as error:
            self._ledger.broke(f"{name} cannot decide: {error!r}")
        self._ledger.note(f"{name} decided {type(decision).__name__}")

    async def _part(self, name: str, begins: float, ends: float) -> None:
        pairs = [frozenset((name, other)) for other in HONEST if other != name]
        await asyncio.sleep(begins)
        for pair in pairs:
            self._house.part(pair)
        await asyncio.sleep(ends - begins)
        for pair in pairs:
            self._house.join(pair)

    async def _settle(self) -> None:
        """Until all have the same, or it has taken too long."""
        for _ in range(int(SETTLE_S)):
            await asyncio.sleep(1)
            if self._is_settled():
                return

    def _is_settled(self) -> bool:
        first, *others = [self._seen(node) for node in self._house.nodes.values()]
        if any(other != first for other in others):
            return False
        return all(
            said in node.hearth.log.state.models()
            for node in self._house.nodes.values()
            for models in self._facts.values()
            for said in models
        )

    # What must hold

    async def _watch(self) -> None:
        """All along."""
        looked = 0.0
        while True:
            for name, node in self._house.nodes.items():
                self._check_memory(name, node)
            if self._loop.time() - looked >= DISK_S:
                looked = self._loop.time()
                self._check_disk()
            await asyncio.sleep(SAMPLED_S)

    def _check_memory(self, name: str, node: Node) -> None:
        for what, held in node.memory_bytes().items():
            self.most[what] = max(self.most[what], held)
            allowed = bounds.MEMORY_BYTES[what]
            if held > allowed:
                self._ledger.broke(f"memory of {name}, {what}: {held} bytes, not {allowed}")

    def _check_disk(self) -> None:
        for name in self._house.nodes:
            for author, kept in self._house.stored(name).items():
                self.most["disk"] = max(self.most["disk"], kept.size_bytes)
                self.most["decisions"] = max(self.most["decisions"], kept.decisions)
                allowed = (bounds.DISK_BYTES, bounds.DISK_FACTS, bounds.DISK_DECISIONS)
                found = (kept.size_bytes, kept.fact_bytes, kept.decisions)
                if any(have > most for have, most in zip(found, allowed, strict=True)):
                    self._ledger.broke(f"disk of {name}: {kept} of {author}")

    def _check_turns(self) -> None:
        for name in HONEST:
            self.most["turn"] = max(self.most["turn"], self._meter.longest[name])
        for name, us, what in self._meter.stalls:
            if name in HONEST:
                self._ledger.broke(f"stall of {name}: {us / 1000:.0f} ms: {what}")

    def _seen(self, node: Node) -> object:
        roster = node.hearth.roster
        return (
            {m.node_id: m.level for m in roster.members.values()}, roster.anchors,
            frozenset(roster.cuts), frozenset(roster.forked),
        )  # fmt: skip

    def _check_end(self) -> None:
        """No coup: every honest node is what it was, nobody is what no honest anchor wished."""
        nodes = self._house.nodes
        first = self._seen(nodes["ann"])
        for name, node in nodes.items():
            roster = node.hearth.roster
            self._ledger.note(f"{name} {sorted(m.name for m in roster.members.values())}")
            if self._seen(node) != first:
                self._ledger.broke(f"{name} and ann have different members")
            for anchor in ANCHORS:
                if party(anchor).id not in roster.anchors:
                    self._ledger.broke(f"coup: {anchor} is no anchor for {name}")
            allowed = {party(who).id for who in (*ANCHORS, VILLAIN)}
            if not set(roster.anchors) <= allowed:
                self._ledger.broke(f"coup: an anchor for {name} whom nobody honest wanted")
            if not roster.at_least(party("dan").id, TrustLevel.TRUSTED):
                self._ledger.broke(f"coup: dan is not trusted by {name}")
            if self._plan.revoked_s is not None and roster.is_member(party(VILLAIN).id):
                self._ledger.broke(f"eve was put out, and is in for {name}")
            self._check_facts(name, node)

    def _check_facts(self, name: str, node: Node) -> None:
        """What honest members recorded is everywhere."""
        for author, models in self._facts.items():
            lost = [model for model in models if model not in node.hearth.log.state.models()]
            if lost:
                self._ledger.broke(f"{name} has not what {author} published: {lost}")

    async def _check_alive(self) -> None:
        """No death: either anchor lets somebody in, and everybody hears of it."""
        for name in ANCHORS:
            await self._decide(
                name, Added(party(f"by-{name}").certificate, name, TrustLevel.MEMBER)
            )
        await asyncio.sleep(15)
        for name, node in self._house.nodes.items():
            for anchor in ANCHORS:
                if not node.hearth.roster.is_member(party(f"by-{anchor}").id):
                    self._ledger.broke(f"death: {name} does not have whom {anchor} let in")
