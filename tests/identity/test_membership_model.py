"""No coup, no death, and recovery always possible: every small world, and many larger ones."""

from __future__ import annotations

import random

import pytest

from tests.identity.deciding import delivered
from tests.identity.model import Cast, Game, explore, wander

CASTS = [
    Cast(("a", "b", "m"), ("d",), villain="m", restored="a"),
    Cast(("m", "a", "b"), ("d",), villain="m", restored="a"),
    Cast(("a", "m", "b"), ("d",), villain="m", restored="b"),
    Cast(("a", "m"), ("d", "e"), villain="m", restored="a"),
    Cast(("m", "a"), ("d", "e"), villain="m", restored="a"),
    Cast(("a", "b", "c", "m"), (), villain="m", restored="b"),
    Cast(("m", "a", "b", "c"), (), villain="m", restored="a"),
]


def named(cast: Cast) -> str:
    return "".join(cast.anchors) + "-" + "".join(cast.members)


@pytest.mark.parametrize("cast", CASTS, ids=named)
def test_no_single_decision_undoes_anybody(cast: Cast) -> None:
    game = Game(cast)
    assert explore(game, 1, game.check) > 30


@pytest.mark.parametrize("seed", range(12))
def test_no_game_ends_in_a_coup_or_beyond_recovery(seed: int) -> None:
    rng = random.Random(seed)
    game = Game(rng.choice(CASTS))
    wander(game, rng, 6)
    check_orders(game, rng, 3)


def check_orders(game: Game, rng: random.Random, times: int) -> None:
    """However the decisions reach another node: the same anchors."""
    roster = game.house.roster
    for _ in range(times):
        found = delivered(game.house, rng, at_first=game.opening)
        if found is not None:
            assert (set(found.anchors), found.forked) == (set(roster.anchors), roster.forked)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cast", CASTS, ids=named)
def test_no_two_decisions_undo_anybody(cast: Cast) -> None:
    """Every pair of moves of everybody, in every order of delivery."""
    game = Game(cast)
    rng = random.Random(1)

    def check() -> None:
        game.check()
        check_orders(game, rng, 1)

    print(named(cast), explore(game, 2, check), "worlds")


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_no_long_game_ends_in_a_coup_or_beyond_recovery(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(5):
        game = Game(rng.choice(CASTS))
        wander(game, rng, 12)
        check_orders(game, rng, 5)
