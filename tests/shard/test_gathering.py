"""How long single rows wait for others, by a clock of the test's own."""

from __future__ import annotations

from mesh.shard.gathering import (
    ENOUGH_ROWS,
    LONGEST_WAIT_S,
    MOST_ROWS,
    PATIENCE,
    Gathering,
    enough_rows,
)

ALONE_S = 0.005


def test_half_of_the_streams_are_waited_for() -> None:
    gathering = Gathering()
    assert gathering.wait_s(1, 6, ALONE_S, 0.0) == PATIENCE * ALONE_S
    assert 0 < gathering.wait_s(2, 6, ALONE_S, 0.001) < PATIENCE * ALONE_S
    assert gathering.wait_s(3, 6, ALONE_S, 0.002) == 0


def test_two_streams_go_round_by_turns_and_nobody_waits_for_more_than_pays() -> None:
    assert Gathering().wait_s(1, 1, ALONE_S, 0) == 0
    assert Gathering().wait_s(1, 3, ALONE_S, 0) == 0
    assert Gathering().wait_s(ENOUGH_ROWS, 64, ALONE_S, 0) == 0
    assert Gathering().wait_s(1, 64, None, 0) == 0


def test_more_are_waited_for_where_they_are_known_to_cost_little() -> None:
    assert enough_rows(lambda rows: None) == ENOUGH_ROWS
    assert enough_rows(lambda rows: 2.0 * rows) == ENOUGH_ROWS
    assert enough_rows({4: 16.0, 8: 22.0, 16: 35.0}.get) == 8
    assert enough_rows({4: 16.0, 8: 16.0, 16: 16.0}.get) == 16
    assert enough_rows(lambda rows: 1.0) == MOST_ROWS
    assert Gathering().wait_s(4, 16, ALONE_S, 0, enough=8) > 0
    assert Gathering().wait_s(8, 16, ALONE_S, 0, enough=8) == 0


def test_no_wait_is_longer_than_the_limit() -> None:
    gathering = Gathering()
    assert gathering.wait_s(1, 4, 1.0, 0) == LONGEST_WAIT_S
    assert gathering.wait_s(1, 4, 1.0, LONGEST_WAIT_S) == 0


def waits(gathering: Gathering, steps: int, *, in_vain: bool) -> int:
    """How many of `steps` wait, where the other row comes at once or never does."""
    waited, now = 0, 0.0
    for _ in range(steps):
        now += 1.0
        if gathering.wait_s(1, 4, ALONE_S, now) > 0:
            waited += 1
            now += 0.1 if in_vain else 0.001
            assert gathering.wait_s(1 if in_vain else 2, 4, ALONE_S, now) == 0
    return waited


def test_who_waits_in_vain_waits_ever_less_and_learns_that_it_pays_again() -> None:
    gathering = Gathering()
    assert waits(gathering, 500, in_vain=True) < 12
    assert waits(gathering, 2000, in_vain=False) > 1000
    assert waits(gathering, 100, in_vain=False) == 100
