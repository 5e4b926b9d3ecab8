"""Draws from a seed what eve does in one run, and what the others do meanwhile. Plain data."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.simulation.members.casting import HONEST, LEVELS

ATTACKS = (
    "repeated ranges", "overlapping pulls", "void flood", "lawful flood", "fat orphans",
    "facts flood", "half tensors", "tensors on control", "silent sessions", "late fork",
    "back-dating",
)  # fmt: skip
"""repeated ranges: one pull names a range 256 times. overlapping pulls: all of the log again and
again, of which it reads nothing. void flood: decisions that it may not make, forged ones, nonsense.
lawful flood: as many as it may make. fat orphans: large records that wait for what never comes.
facts flood: large facts, in one generation after another. half tensors: chunks of tensors that are
never ended, on as many links as there are. tensors on control: steps where they do not belong.
silent sessions: every stream of the shard, held. late fork: a second record with an old number, or
after an old past, also when it is out. back-dating: decisions after a past that ignores what it
knows, and facts with an old lamport."""

LASTS_S = 30.0
"""Eve has so long, the others as long again to settle."""


@dataclass(frozen=True, slots=True)
class Attack:
    """What eve begins at a time, at one node or at all."""

    kind: str
    at_s: float
    targets: tuple[str, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to the model by an honest member."""

    name: str
    by: str
    start_s: float
    prompt: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A run. `revoked_s`: when the anchors put eve out; None for never. `parted`: the honest node
    that only eve can reach, from when to when."""

    seed: int
    level: str
    attacks: tuple[Attack, ...]
    asks: tuple[Ask, ...]
    facts: tuple[tuple[float, str], ...]
    revoked_s: float | None
    parted: tuple[str, float, float] | None
    delay_s: tuple[float, float]


def draw(seed: int) -> Plan:
    """The same plan for the same seed."""
    rng = random.Random(seed)
    level = rng.choice([*LEVELS])
    attacks = []
    for kind in rng.sample(ATTACKS, rng.randint(2, 4)):
        for _ in range(rng.randint(1, 2)):
            targets = HONEST if rng.random() < 0.5 else (rng.choice(HONEST),)
            size = rng.choice([8, 30, 30, 200])
            attacks.append(Attack(kind, rng.uniform(1, LASTS_S - 5), targets, size))
    asks = tuple(
        Ask(
            f"r{number}", rng.choice(HONEST[1:]), rng.uniform(0, LASTS_S),
            tuple(rng.randrange(97) for _ in range(rng.randint(2, 8))), rng.randint(2, 8),
        )
        for number in range(rng.randint(2, 4))
    )  # fmt: skip
    facts = tuple((rng.uniform(0, LASTS_S), rng.choice(HONEST)) for _ in range(rng.randint(1, 4)))
    revoked_s = rng.uniform(5, LASTS_S - 5) if rng.random() < 0.5 else None
    parted = None
    if rng.random() < 0.5:
        begins = rng.uniform(2, LASTS_S - 10)
        parted = (rng.choice(HONEST), begins, begins + rng.uniform(5, 15))
    delay_s = (0.001, rng.choice([0.005, 0.05, 0.3]))
    ordered = tuple(sorted(attacks, key=lambda attack: attack.at_s))
    return Plan(seed, level, ordered, asks, facts, revoked_s, parted, delay_s)
