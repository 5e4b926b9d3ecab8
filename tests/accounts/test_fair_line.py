"""Turns between owners."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mesh.accounts.fair_line import FairLine

OWNERS = st.lists(st.sampled_from("abcd"), max_size=40)


def filled(owners: list[str]) -> FairLine:
    line = FairLine()
    for number, owner in enumerate(owners):
        line.put(owner, f"{owner}{number}")
    return line


def drained(line: FairLine) -> list[str]:
    return list(iter(line.take, None))


def test_one_greedy_owner_delays_another_by_one_job_only() -> None:
    line = filled(["a"] * 10 + ["b"])
    assert drained(line)[:3] == ["a0", "b10", "a1"]


@given(OWNERS)
def test_the_order_told_is_the_order_taken(owners: list[str]) -> None:
    line = filled(owners)
    assert line.order() == drained(line)
    assert len(line) == 0


@given(OWNERS)
def test_positions_are_those_of_now(owners: list[str]) -> None:
    line = filled([])
    for number, owner in enumerate(owners):
        line.put(owner, f"{owner}{number}")
        assert list(line.positions()) == line.order()
    for move in (line.take, lambda: line.remove(line.order()[-1])):
        for _ in owners[::2]:
            if len(line):
                move()
            assert list(line.positions().items()) == [
                (each, place) for place, each in enumerate(line.order(), start=1)
            ]
    line.put_back("z", "z0")
    assert line.positions()["z0"] == 1


@given(OWNERS)
def test_everybody_gets_a_turn_before_anybody_gets_two(owners: list[str]) -> None:
    taken = drained(filled(owners))
    assert sorted(taken) == sorted(f"{owner}{n}" for n, owner in enumerate(owners))
    rounds = [[job for job in taken if job[0] == owner] for owner in set(owners)]
    for jobs in rounds:  # own jobs stay in order
        assert jobs == sorted(jobs, key=lambda job: int(job[1:]))
    for place, job in enumerate(taken):
        before = [other[0] for other in taken[:place]]
        waiting = {other[0] for other in taken[place:]}
        assert all(before.count(job[0]) <= before.count(other) for other in waiting)


@given(OWNERS, st.data())
def test_removing_and_putting_back(owners: list[str], data: st.DataObject) -> None:
    line = filled(owners)
    order = line.order()
    if order:
        gone = data.draw(st.sampled_from(order))
        assert line.remove(gone)
        assert not line.remove(gone)
        order.remove(gone)
        assert sorted(line.order()) == sorted(order)
    first = line.take()
    if first is not None:
        line.put_back(first[0], first)
        assert line.take() == first
