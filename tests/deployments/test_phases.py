"""What failed is left alone for a while, longer each time, and holds up nothing else."""

from __future__ import annotations

import asyncio

import pytest

from mesh.deployments.phases import FIRST_WAIT_S, LONGEST_WAIT_S, Phase, PhaseProgress, Phases
from mesh.deployments.turns import MAX_FAILED, Turns
from mesh.errors import DiskFull, MeshError, NotEnoughMemory, TransferFailed
from mesh.types import ShardId
from tests.simulation.virtual_loop import run_virtually

ONE, OTHER = ShardId("m:0-3"), ShardId("m:4-7")
CUT = TransferFailed("It is cut.", fix="Again.")


def waits_s(phases: Phases, shard: ShardId, now: float) -> float:
    """For how long a shard that failed at this time is left alone, to a tenth of a second."""
    tenths = range(round(10 * LONGEST_WAIT_S) + 2)
    return next(each for each in tenths if shard not in phases.not_yet(now + each / 10)) / 10


def test_a_shard_that_failed_waits_twice_as_long_each_time_until_it_is_served() -> None:
    phases = Phases(lambda shard, now: None)
    phases.failed(OTHER, CUT, 0.0)
    for expected in (FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S):
        phases.failed(ONE, CUT, 100.0)
        assert phases.not_yet(100.0) == {ONE: "It is cut. Again."}
        assert waits_s(phases, ONE, 100.0) == expected
    for _ in range(20):
        phases.failed(ONE, CUT, 200.0)
    assert waits_s(phases, ONE, 200.0) == LONGEST_WAIT_S
    phases.ready(ONE)
    phases.failed(ONE, CUT, 1000.0)
    assert waits_s(phases, ONE, 1000.0) == FIRST_WAIT_S
    phases.try_again()
    assert phases.not_yet(1000.0) == {}


def test_a_failure_is_forgotten_with_its_wish_and_with_its_shard() -> None:
    phases = Phases(lambda shard, now: None)
    phases.wished({ONE: "first", OTHER: "first"})
    for shard in (ONE, OTHER):
        phases.failed(shard, CUT, 0.0)
    phases.wished({ONE: "second", OTHER: "first"})
    assert (phases.not_yet(0.0).keys(), phases.get(ONE)) == ({OTHER}, None)
    phases.keep_only([ONE])
    assert (phases.not_yet(0.0), phases.all()) == ({}, {})


@pytest.mark.parametrize(
    ("error", "lacks_memory"),
    [(CUT, False), (NotEnoughMemory("No.", fix=""), True), (DiskFull("No.", fix=""), True)],
)
def test_it_is_told_for_want_of_what_it_failed(error: MeshError, lacks_memory: bool) -> None:
    phases = Phases(lambda shard, now: None)
    phases.failed(ONE, error, 0.0)
    now = phases.get(ONE)
    assert now is not None
    assert (now.phase, now.lacks_memory, now.row()["error"]) == (
        Phase.FAILED, lacks_memory, error.to_dict(),
    )  # fmt: skip


def test_bytes_are_counted_while_they_come_and_only_a_new_phase_is_told() -> None:
    told: list[tuple[ShardId, PhaseProgress]] = []
    phases = Phases(lambda shard, now: told.append((shard, now)))
    phases.bytes(ONE, 1, 2, 1.0)
    assert phases.get(ONE) is None
    for lacks_memory in (False, True, True):
        phases.put(ONE, Phase.QUEUED, lacks_memory=lacks_memory)
    phases.bytes(ONE, 1, 2, 1.0)
    assert phases.all()[ONE].total == 0
    phases.put(ONE, Phase.PROVISIONING)
    assert [(now.phase, now.lacks_memory, now.total) for _, now in told] == [
        (Phase.QUEUED, False, 0), (Phase.QUEUED, True, 0), (Phase.PROVISIONING, False, 0),
    ]  # fmt: skip
    for done, speed, why, eta_s in (
        (3, 0.0, "the line", None),
        (4, 2.0, "", 3.0),
        (12, 2.0, "", 0),
    ):
        phases.bytes(ONE, done, 10, speed, why)
        row = phases.all()[ONE].row()
        assert (row["done_bytes"], row["eta_s"], row["reason"]) == (
            min(done, 10),
            eta_s,
            why or None,
        )
    assert len(told) == 3


def test_a_turn_that_failed_is_put_off_and_holds_up_no_other() -> None:
    failed: list[str] = []
    taken: list[tuple[str, float]] = []
    turns = Turns("testing", lambda name, error: failed.append(name))

    async def take(name: str, *, fails: bool) -> None:
        async def turn() -> None:
            taken.append((name, asyncio.get_running_loop().time()))
            if fails:
                raise ValueError(name)

        await turns.take(name, turn)

    async def main() -> None:
        for _ in range(80):
            await take("one", fails=True)
            await take("other", fails=False)
            await asyncio.sleep(0.25)

    run_virtually(main)
    assert [at for name, at in taken if name == "one"] == [0.0, 2.0, 6.0, 14.0]
    assert sum(name == "other" for name, _ in taken) == 80
    assert set(failed) == {"one"}

    async def mend() -> None:
        taken.clear()
        await take("one", fails=False)
        turns.try_again()
        await take("one", fails=True)
        await asyncio.sleep(2.0)
        for fails in (False, True, True):
            await take("one", fails=fails)
        await asyncio.sleep(2.0)
        await take("one", fails=False)

    run_virtually(mend)
    assert [at for _, at in taken] == [0.0, 2.0, 2.0, 4.0], "it failed once since it went well"


def test_of_turns_that_failed_a_bounded_number_is_known() -> None:
    taken: list[str] = []
    turns = Turns("testing")

    async def take(name: str) -> None:
        async def turn() -> None:
            taken.append(name)
            raise ValueError(name)

        await turns.take(name, turn)

    async def main() -> None:
        for number in range(MAX_FAILED):
            await take(f"{number}")
        await asyncio.sleep(FIRST_WAIT_S)
        for number in (*range(1, MAX_FAILED), 0):
            await take(f"{number}")
        await take("one more")
        taken.clear()
        for name in ("0", "2", "1"):
            await take(name)

    run_virtually(main)
    assert taken == ["1"], "the one that failed longest ago was forgotten"
