"""Operators who have not heard of each other: however their wishes come, all end alike."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.deployments.laid import AvailableNode
from mesh.deployments.placement import make_plan
from mesh.deployments.wishes import Deployment, Wish, live, merged, read, read_wish
from mesh.events.snapshot import dump, load
from mesh.events.state import State
from mesh.events.types import PLACEMENT_PLANNED, PLACEMENT_WISHED
from mesh.types import ModelId, NodeId
from tests.events.support import Author, MemoryReplica, Record, household

MACHINES = [AvailableNode(NodeId(name), name) for name in ("attic", "kitchen")]


class Operator:
    """Who wishes by what has come to it so far."""

    def __init__(self, author: Author, decided: Sequence[Record]) -> None:
        self.author = author
        self.seen = MemoryReplica()
        self.seen.take(decided)

    def hears(self, events: Sequence[Record]) -> None:
        self.seen.take(events)

    @property
    def deployments(self) -> dict[str, Deployment]:
        return read(self.seen.state.wishes(), self.seen.state.plans())

    def wish(self, wish: Wish, *, planned: bool = True) -> list[Record]:
        """Signed, and with a plan unless somebody else is left to make it."""
        heard = max((fact.order[0] for fact in self.seen.state.wishes().values()), default=0)
        wished = self.author.sign(PLACEMENT_WISHED, wish.payload(), heard + 1)
        said: list[Record] = [wished]
        if planned and not wish.evicted:
            before = self.deployments.get(wish.deployment)
            plan = make_plan(
                wish, wished.id.hex(), MACHINES, before.plan if before else None, asked=True
            )
            said.append(self.author.sign(PLACEMENT_PLANNED, plan.payload()))
        self.hears(said)
        return said


def wish(name: str, model: str = "m", replicas: int = 1) -> Wish:
    return Wish(name * 16, ModelId(model), "ab" * 32, 4, 40, replicas)


def read_by(events: Sequence[Record], whole: MemoryReplica | None = None) -> dict[str, Deployment]:
    """What somebody sees to whom this came in this order, and from the `whole` what was lost."""
    replica = MemoryReplica()
    for event in events:
        replica.take([event])
    if whole is not None:
        replica.catch_up(whole)
    return read(replica.state.wishes(), replica.state.plans())


def two() -> tuple[Operator, Operator, list[Record]]:
    _, authors, decided = household(2)
    one, other = (Operator(author, decided) for author in authors)
    return one, other, decided


@pytest.mark.parametrize(
    "late",
    [{"replicas": 3}, {"resting": True}, {"keep_alive_s": 9.0, "resting": True}],
    ids=["scaled", "made room", "nobody used it"],
)
def test_what_was_evicted_stays_so_whatever_is_wished_at_the_same_moment(
    late: dict[str, object],
) -> None:
    one, other, said = two()
    said += one.wish(wish("1"))
    other.hears(said)
    known = other.deployments["1" * 16].wish
    evicted = one.wish(replace(known, evicted=True))
    later = other.wish(replace(known, **late))  # type: ignore[arg-type]
    later += other.wish(replace(known, replicas=4))
    for order in (evicted + later, later + evicted):
        assert live(read_by(said + order)) == []
    # Who has heard of it and says more all the same, as a task that was under way, changes nothing.
    after = one.wish(replace(known, **late))  # type: ignore[arg-type]
    for order in (evicted + after + later, later + evicted + after):
        assert live(read_by(said + order)) == []


def test_a_snapshot_remembers_what_was_evicted() -> None:
    one, _, said = two()
    said += one.wish(wish("1")) + one.wish(replace(wish("1"), evicted=True))
    saved = dump(one.seen.state, "rules")
    assert saved is not None
    kept = load(saved, State(one.seen.state.membership), "rules")
    assert live(read(kept.wishes(), kept.plans())) == []
    assert kept == one.seen.state


def test_of_two_that_were_deployed_at_once_the_lowest_id_stands() -> None:
    one, other, said = two()
    said += one.wish(wish("5", replicas=3))
    twin = other.wish(wish("1"))
    others = other.wish(wish("7", model="of another"))
    for order in (said + twin + others, [*said[:2], *twin, *said[2:], *others]):
        found = read_by(order)
        standing, unlike = live(found)
        assert (standing.id, standing.wish.replicas) == ("1" * 16, 1)
        assert unlike.id == "7" * 16
        assert [each.id for each in merged(found, standing.id)] == ["5" * 16]
        assert found["5" * 16].shards_of(MACHINES[0].node) == {}
    # Where only the one is ended, by who had not heard of the other, that one is left.
    said += twin + others + other.wish(replace(wish("1"), evicted=True))
    assert [each.id for each in live(read_by(said))] == ["5" * 16, "7" * 16]
    said += other.wish(replace(wish("5"), evicted=True))
    assert [each.id for each in live(read_by(said))] == ["7" * 16]


VERBS = st.lists(
    st.tuples(
        st.sampled_from(["deploy", "deploy", "scale", "rest", "evict", "hear", "hear"]),
        st.integers(0, 2),
        st.integers(0, 3),
    ),
    max_size=24,
)


def said_by(operator: Operator, what: str, count: int, rng: random.Random) -> list[Record]:
    """What an operator says by what it knows; nothing of a model that is deployed already."""
    known = live(operator.deployments)
    chosen = known[count % len(known)].wish if known else None
    model = ModelId(f"m{count % 2}")
    if what == "deploy" and model not in [each.wish.model_id for each in known]:
        name = f"{rng.randrange(1 << 64):016x}"
        return operator.wish(Wish(name, model, "ab" * 32, 4, 40, count + 1))
    if chosen is not None and what == "scale":
        return operator.wish(replace(chosen, replicas=count, resting=False))
    if chosen is not None and what == "rest":
        return operator.wish(replace(chosen, resting=True), planned=False)
    if chosen is not None and what == "evict":
        return operator.wish(replace(chosen, evicted=True))
    return []


@settings(max_examples=80)
@given(VERBS, st.randoms(use_true_random=False))
def test_all_end_alike_in_whatever_order_logs_come_and_nothing_that_was_evicted_comes_back(
    verbs: list[tuple[str, int, int]], rng: random.Random
) -> None:
    _, authors, decided = household(3)
    operators = [Operator(author, decided) for author in authors]
    said: list[Record] = []
    for what, who, count in verbs:
        operator = operators[who]
        if what == "hear":
            operator.hears(rng.sample(said, rng.randrange(len(said) + 1)))
            operator.seen.catch_up(operators[count % 3].seen)
        else:
            said += said_by(operator, what, count, rng)
        for each in operators:
            assert not {one.id for one in live(each.deployments)} & evicted(each.seen)
    whole = MemoryReplica()
    whole.take(decided + said)
    expected = read(whole.state.wishes(), whole.state.plans())
    models = [(each.wish.model_id, each.wish.weights_sha256) for each in live(expected)]
    assert len(models) == len(set(models)), "one deployment of a checkpoint"
    assert not {each.id for each in live(expected)} & evicted(whole)
    for operator in operators:
        operator.seen.catch_up(whole)
        assert operator.deployments == expected
    shuffled = decided + said
    rng.shuffle(shuffled)
    assert read_by(shuffled, whole) == expected


def evicted(replica: MemoryReplica) -> set[str]:
    """What anybody said to be evicted, of all that came."""
    wishes = [
        read_wish(event.payload)
        for chain in replica.rows.values()
        for event in chain
        if event.type == PLACEMENT_WISHED and isinstance(event.payload, dict)
    ]
    return {each.deployment for each in wishes if each is not None and each.evicted}
