"""The piece picker of fetches: everything once, the dead one's share to others, the liar named."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.transfers.piece_picker import MAX_IN_HAND, SPLIT_BYTES, Piece, PiecePicker

STEP = 4 << 20


def tensor(name: str, size: int) -> list[Piece]:
    return [Piece(name, start, min(start + STEP, size)) for start in range(0, size, STEP)]


def plan_of(**sizes: int) -> PiecePicker:
    return PiecePicker(
        {name: (tensor(name, size), tensor(name, size)) for name, size in sizes.items()}
    )


def drain(plan: PiecePicker, *sources: str) -> dict[str, list[Piece]]:
    """Let the sources take turns, each giving what it has at once."""
    given: dict[str, list[Piece]] = {source: [] for source in sources}
    while True:
        asked = [(source, piece) for source in sources if (piece := plan.next(source))]
        if not asked:
            return given
        for source, piece in asked:
            if plan.arrived(source, piece, 0.1):
                given[source].append(piece)


def test_small_tensors_come_whole_and_large_ones_from_several() -> None:
    plan = plan_of(small=3 * STEP, large=SPLIT_BYTES + STEP)
    plan.join("a", {"small", "large"})
    plan.join("b", {"small", "large"})
    given = drain(plan, "a", "b")
    small = {source for source, pieces in given.items() for p in pieces if p.tensor == "small"}
    large = {source for source, pieces in given.items() for p in pieces if p.tensor == "large"}
    assert len(small) == 1
    assert large == {"a", "b"}
    assert sum(map(len, given.values())) == 3 + 9
    assert plan.left_bytes == 0
    assert plan.right("small") == plan.right("large") == set()
    assert plan.is_done


def test_a_slower_source_gets_less() -> None:
    plan = plan_of(**{f"t{i}": STEP for i in range(100)})
    names = {f"t{i}" for i in range(100)}
    plan.join("fast", names)
    plan.join("slow", names)
    in_hand: list[tuple[float, float, str, Piece]] = []
    free_at, counts, now = {"fast": 0.0, "slow": 0.0}, {"fast": 0, "slow": 0}, 0.0
    cost = {"fast": 0.04, "slow": 0.4}
    while plan.left_bytes:
        for source, seconds in cost.items():
            while (piece := plan.next(source)) is not None:
                free_at[source] = max(free_at[source], now) + seconds
                in_hand.append((free_at[source], now, source, piece))
        in_hand.sort(key=lambda each: each[0])
        now, asked_at, source, piece = in_hand.pop(0)
        counts[source] += plan.arrived(source, piece, now - asked_at)
    assert counts["fast"] + counts["slow"] == 100
    assert counts["slow"] <= 15
    assert now < 4.5  # together not slower than the fast one alone with a little at the end


def test_what_a_lost_source_had_in_hand_goes_to_the_others() -> None:
    plan = plan_of(x=STEP, y=2 * STEP)
    plan.join("a", {"x", "y"})
    first = plan.next("a")
    assert first is not None
    plan.join("b", {"x", "y"})
    plan.leave("a")
    given = drain(plan, "b")
    assert len(given["b"]) == 3
    assert first in given["b"]


def test_the_hub_is_asked_only_for_what_no_peer_has() -> None:
    plan = plan_of(x=STEP, y=STEP)
    plan.join("hub", {"x", "y"}, is_spared=True)
    plan.join("peer", {"x"})
    assert plan.next("hub") == Piece("y", 0, STEP)
    assert plan.next("hub") is None
    assert plan.next("peer") == Piece("x", 0, STEP)


def test_who_alone_gave_a_wrong_tensor_lied() -> None:
    plan = plan_of(x=2 * STEP)
    plan.join("liar", {"x"})
    drain(plan, "liar")
    assert plan.wrong("x") == {"liar"}
    plan.join("liar", {"x"})
    assert plan.next("liar") is None
    plan.join("honest", {"x"})
    assert len(drain(plan, "honest")["honest"]) == 2
    assert plan.right("x") == set()


def test_of_several_who_gave_a_wrong_tensor_the_liar_is_found() -> None:
    plan = plan_of(x=SPLIT_BYTES + STEP)
    for source in ("honest", "liar"):
        plan.join(source, {"x"})
    given = drain(plan, "honest", "liar")
    assert given["liar"]
    assert plan.wrong("x") == set()
    again = drain(plan, "honest", "liar")
    (witness,) = [source for source, pieces in again.items() if pieces]
    assert len(again[witness]) == len(tensor("x", SPLIT_BYTES + STEP))
    if witness == "liar":
        assert plan.wrong("x") == {"liar"}
    else:
        assert plan.right("x", [given["liar"][0].start]) == {"liar"}


def test_pieces_of_an_earlier_run_blame_nobody() -> None:
    pieces = tensor("x", 2 * STEP)
    plan = PiecePicker({"x": (pieces, pieces[1:])})
    plan.join("honest", {"x"})
    drain(plan, "honest")
    assert plan.wrong("x") == set()
    assert len(drain(plan, "honest")["honest"]) == 2
    assert plan.right("x") == set()


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 12))
def test_everything_arrives_whatever_happens(seed: int, sources: int, tensors: int) -> None:
    rng = random.Random(seed)
    sizes = {f"t{i}": rng.randrange(1, 12 * STEP) for i in range(tensors)}
    plan = plan_of(**sizes)
    plan.join("always", set(sizes))
    names = ["always", *(f"s{i}" for i in range(sources))]
    in_hand: list[tuple[str, Piece]] = []
    got: dict[str, set[int]] = {name: set() for name in sizes}
    for _ in range(10_000):
        if plan.is_done:
            break
        name = rng.choice(names)
        if name != "always" and rng.random() < 0.1:
            if rng.random() < 0.5:
                plan.leave(name)
                in_hand = [each for each in in_hand if each[0] != name]
            else:
                plan.join(name, rng.sample(sorted(sizes), rng.randrange(tensors + 1)))
        if (piece := plan.next(name)) is not None:
            in_hand.append((name, piece))
            assert sum(1 for each in in_hand if each[0] == name) <= MAX_IN_HAND
        if in_hand and rng.random() < 0.7:
            source, piece = in_hand.pop(rng.randrange(len(in_hand)))
            if plan.arrived(source, piece, rng.random()):
                assert piece.start not in got[piece.tensor]
                got[piece.tensor].add(piece.start)
                if len(got[piece.tensor]) == len(tensor(piece.tensor, sizes[piece.tensor])):
                    plan.right(piece.tensor)
    assert plan.is_done
    assert plan.left_bytes == 0
