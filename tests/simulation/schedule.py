"""Draws what happens in one simulated run from its seed: who serves, who asks, what breaks when.

Plain data; the same seed always gives the same schedule.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from mesh.types import LayerRange
from tests.pipeline.toy_mesh import PRIME, TOTAL_LAYERS

FAULTS = ("crash", "power loss", "freeze", "cut", "silence", "slow", "forget", "refuse", "drain")
"""crash: the process dies, its peers hear of it. power loss: nobody hears of it. freeze: SIGSTOP.
cut: its links break, it lives on. silence: its links deliver nothing more, unnoticed. slow: every
step takes nearly the stall limit. forget: it drops its sessions, as after an eviction. refuse: it
answers every step with an error. drain: it asks to be left, waits a while and then stops."""


@dataclass(frozen=True, slots=True)
class Node:
    """One shard's host."""

    name: str
    layers: LayerRange
    streams: int
    queue_depth: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Fault:
    """Something happens to a node: at a time, or when the n-th message of a kind reaches it.

    `victim` None: whichever node the n-th message reaches, so that it hits one in use. `chained`:
    messages are counted from the fault before it on, so that it hits the recovery from that one.
    `lasts_s` None: for good. `withdrawn_after_s`: when the asker learns that the shard is gone.
    """

    kind: str
    victim: str | None
    at_s: float | None
    at_message: tuple[str, int] | None
    chained: bool
    lasts_s: float | None
    withdrawn_after_s: float


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. It is told apart on the wire by `positions`, which no other one has.

    `follows` names the request whose conversation it continues: `prompt` then comes after what was
    said there, without the last `unsaid` tokens, and `start_s` counts from its end. `leaves_after`
    tokens the client hangs up.
    """

    name: str
    start_s: float
    prompt: tuple[int, ...]
    count: int
    follows: str | None = None
    unsaid: int = 0
    leaves_after: int | None = None

    @property
    def positions(self) -> int:
        return len(self.prompt) + self.count


@dataclass(frozen=True, slots=True)
class Lie:
    """A node's answers are wrong from one of its results on, for so many or (None) for good."""

    node: str
    first: int
    count: int | None

    def covers(self, result: int) -> bool:
        """Whether its `result`-th answer, from 1 on, is a lie."""
        return self.first <= result and (self.count is None or result < self.first + self.count)


WARM_UP = Ask("warm-up", 0.0, (3, 1, 4), 11)
"""Asked before anything else where a schedule says so."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One run. `has_home`: the asker can hold the whole model itself if it must. `is_warm`: it has
    measured its hops before the first fault. `checks`: the probability of a spot check; one node
    may lie where there are any."""

    seed: int
    nodes: tuple[Node, ...]
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    delay_s: tuple[float, float]
    stall_limit_s: float
    has_home: bool
    is_warm: bool
    checks: float
    lie: Lie | None


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = random.Random(seed)
    nodes = _nodes(rng)
    asks = _asks(rng)
    faults = tuple(_fault(rng, nodes) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4, 6))))
    fastest = rng.choice((0.0001, 0.001, 0.02))
    delay_s = (fastest, fastest * rng.choice((1, 3, 10)))
    stall_limit_s, has_home = rng.choice((1.0, 2.0, 5.0)), rng.random() < 0.25
    is_warm, checks = rng.random() < 0.75, rng.choice((0.0, 0.0, 0.02, 0.2, 1.0))
    lie = _lie(rng, nodes) if checks and rng.random() < 0.5 else None
    return Schedule(
        seed, nodes, asks, faults, delay_s, stall_limit_s, has_home, is_warm, checks, lie
    )


def _nodes(rng: random.Random) -> tuple[Node, ...]:
    hops = rng.randint(1, 5)
    cuts = [0, *sorted(rng.sample(range(1, TOTAL_LAYERS), hops - 1)), TOTAL_LAYERS]
    spans: list[LayerRange] = []
    for start, stop in itertools.pairwise(cuts):
        for _ in range(rng.choice((1, 2, 2, 3))):
            wider = rng.choice((0, 0, 1, 2))
            spans.append(LayerRange(max(0, start - wider), min(TOTAL_LAYERS, stop + wider)))
    if rng.random() < 0.3:
        spans.append(LayerRange(0, TOTAL_LAYERS))
    names = [f"n{i:02}" for i in range(len(spans))]
    rng.shuffle(names)
    return tuple(
        Node(
            name,
            span,
            streams=rng.choice((1, 2, 8, 8, 8, 8)),
            queue_depth=rng.choice((0, 0, 0, 1, 2)),
            step_s=rng.choice((0.0002, 0.002, 0.01)),
        )
        for name, span in zip(names, spans, strict=True)
    )


def _asks(rng: random.Random) -> tuple[Ask, ...]:
    asks: list[Ask] = []
    taken = {WARM_UP.positions}
    for number in range(rng.choice((1, 1, 2, 3, 5))):
        rows = rng.choice((1, 2, 7, 20, 20, 30, 270)) if number == 0 else rng.randint(1, 25)
        count = rng.choice((1, 2, 8, 16))
        while rows + count in taken:
            rows += 1
        taken.add(rows + count)
        prompt = tuple(rng.randrange(PRIME) for _ in range(rows))
        leaves = rng.randint(0, count) if rng.random() < 0.15 else None
        asks.append(Ask(f"r{number}", rng.uniform(0, 0.3), prompt, count, leaves_after=leaves))
    if rng.random() < 0.3:
        extra = tuple(rng.randrange(PRIME) for _ in range(3))
        count, unsaid = 5, rng.choice((0, 0, 1, min(7, asks[0].count)))
        while asks[0].positions - unsaid + len(extra) + count in taken:
            count += 1
        start_s = rng.choice((0.0, rng.uniform(0, 3)))
        asks.append(Ask("follow-up", start_s, extra, count, follows="r0", unsaid=unsaid))
    return tuple(asks)


def _fault(rng: random.Random, nodes: tuple[Node, ...]) -> Fault:
    kind = rng.choice(FAULTS)
    lasting = kind in ("freeze", "slow", "refuse") or rng.random() < 0.5
    timed = rng.random() < 0.25
    at_message = (rng.choice(("open", "step", "step", "step")), rng.choice((1, 1, 2, 3, 5, 9, 16)))
    return Fault(
        kind,
        victim=rng.choice(nodes).name if timed or rng.random() < 0.2 else None,
        at_s=rng.uniform(0, 1.0) if timed else None,
        at_message=None if timed else at_message,
        chained=not timed and rng.random() < 0.5,
        lasts_s=rng.choice((0.01, 0.3, 2.0, 12.0)) if lasting else None,
        withdrawn_after_s=rng.choice((0.05, 1.0, 60.0)),
    )


def _lie(rng: random.Random, nodes: tuple[Node, ...]) -> Lie:
    """Of one node only: two that agree on a lie outvote an honest one."""
    return Lie(rng.choice(nodes).name, rng.choice((1, 1, 2, 5, 9)), rng.choice((None, None, 1, 3)))
