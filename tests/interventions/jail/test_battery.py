"""Hostile bodies against the walls; and that each body bites and each wall is missed."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from mesh.interventions.jail import result
from mesh.interventions.jail.doctor import JailStrength
from mesh.interventions.jail.job import Jail
from mesh.interventions.jail.limits import Ending, JobLimits
from tests.interventions.jail.battery import BODIES, DEED_LIMITS, RUN, escapes, jail, read_all
from tests.interventions.jail.hostile_bodies import DEEDS, NOT_EVERYWHERE
from tests.interventions.jail.trapped import TrapField

# Every fourth deed, and of the waste what ends in different ways.
SAMPLE = [
    *list(DEEDS)[::4],
    "file_read/readlink", "kernel/raise_limits_through_aligned_pointer",
    "time/loop_that_catches_everything", "time/power", "time/endless_printing",
    "space/one_block", "space/tensor", "space/fork_bomb", "space/thread_bomb",
    "space/huge_result",
]  # fmt: skip
# What each wall alone keeps out: bodies that must get through when it is gone.
MISSED_WITHOUT = {
    "limits": ["space/mapped", "space/descriptors"],
    "files": ["file_read/open", "file_read/torch_from_file", "file_read/list_directory"],
    "calls": [
        "execution/fork", "execution/thread", "execution/code_in_memory", "network/udp",
        "kernel/userfaultfd", "kernel/user_namespace", "kernel/shared_segment",
        "file_read/readlink", "file_write/chmod",
    ],
    "descriptors": ["other_tenants/inherited_descriptors"],
    "executable": ["execution/code_in_memory", "execution/load_library"],
    "pointer": ["kernel/raise_limits_through_aligned_pointer"],
    "own_signals": ["signals/io_owner"],
}  # fmt: skip
# Walls behind others: (those in front of it, what gets through when they and it are gone).
BEHIND = {
    "capabilities": ("calls", ["kernel/chroot"]),
    "no_new_privileges": ("calls,files", ["kernel/new_privileges"]),
    "undumpable": ("calls", ["kernel/core_dumps"]),
}
# Attacks too odd for a canary; the battery has them.
NO_CANARY = ("pointer", "own_signals")

pytestmark = pytest.mark.timeout(600)


async def test_a_sample_of_the_battery_is_contained_without_namespaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with jail(namespaces=False) as cell:
        assert cell.report is not None
        assert cell.report.level is JailStrength.OS, cell.report.to_text()
        assert await escapes(cell, SAMPLE) == {}
        for body in ("os.kill(-1, 9)", "while True:\n    os.fork()"):
            monkeypatch.setitem(BODIES, "space/endless", body)
            with pytest.raises(ValueError, match="space/endless does without a bound"):
                await escapes(cell, ["space/endless"])
            monkeypatch.undo()
    classes = [{name.partition("/")[0] for name in names} for names in (SAMPLE, BODIES)]
    assert classes[0] == classes[1], "no class of attacks is left out"


@pytest.mark.chaos
@pytest.mark.parametrize("namespaces", [False, True])
async def test_nothing_escapes(namespaces: bool) -> None:
    async with jail(namespaces=namespaces) as cell:
        assert cell.report is not None
        if namespaces and not cell.report.namespaces:
            pytest.skip("this kernel allows no unprivileged namespaces")
        assert await escapes(cell, BODIES) == {}


@pytest.mark.chaos
async def test_without_walls_every_deed_is_done() -> None:
    async with jail("all", namespaces=False) as cell:
        assert cell.report is not None
        assert cell.report.level is JailStrength.WEAK
        done = await escapes(cell, DEEDS)
        assert set(DEEDS) - set(done) - NOT_EVERYWHERE == set()


@pytest.mark.chaos
@pytest.mark.parametrize("wall", MISSED_WITHOUT)
async def test_a_missing_wall_is_noticed(wall: str) -> None:
    async with jail(wall, namespaces=False) as cell:
        wanted = MISSED_WITHOUT[wall]
        assert set(await escapes(cell, wanted)) == set(wanted)
        if wall not in NO_CANARY:
            assert cell.report is not None
            assert cell.report.level is JailStrength.WEAK


@pytest.mark.chaos
@pytest.mark.parametrize("wall", BEHIND)
async def test_a_wall_behind_others_stands_when_they_are_gone(wall: str) -> None:
    front, wanted = BEHIND[wall]
    if wall == "capabilities" and os.geteuid() != 0:
        pytest.skip("there are none to give up")
    async with jail(front, namespaces=False) as cell:
        assert await escapes(cell, wanted) == {}
    async with jail(f"{front},{wall}", namespaces=False) as cell:
        assert set(await escapes(cell, wanted)) == set(wanted)


async def test_without_new_privileges_given_up_no_other_wall_goes_up() -> None:
    """The kernel takes neither Landlock's rules nor a filter from such a process."""
    async with jail("no_new_privileges", namespaces=False) as cell:
        assert cell.report is not None
        assert cell.report.level is JailStrength.NONE


OPEN_FILES = "descriptors,limits,calls"
GROWN = """
for fd in range(3, 64):
    try: os.ftruncate(fd, 8 << 20)
    except OSError: continue
    loot = b"grown"
"""


@pytest.mark.chaos
async def test_seals_hold_where_a_job_has_its_files_at_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    field = await asyncio.to_thread(TrapField)
    try:
        async with jail(OPEN_FILES, namespaces=False) as cell:
            for sealed in (True, False):
                if not sealed:
                    monkeypatch.setattr(result, "_seal", lambda *_: None)
                job = await cell.start_job(
                    RUN, field.payload(GROWN), trusted=True, limits=DEED_LIMITS
                )
                async with job:
                    reading = asyncio.create_task(read_all(job), name="read-channel")
                    outcome = await job.outcome()
                    await reading
                assert outcome.ending is Ending.FINISHED, outcome.text
                assert (outcome.result == b"") is sealed
    finally:
        await asyncio.to_thread(field.close)


@pytest.mark.chaos
async def test_a_storm_does_not_disturb_an_honest_job() -> None:
    """Every body three times in random order, two at a time, beside a job that keeps ticking."""
    order = [name for name in BODIES for _ in range(3)]
    random.Random(7).shuffle(order)
    field = TrapField()
    storm_limits = JobLimits(wall_s=0.5, cpu_s=2, memory_bytes=256 << 20, result_bytes=1 << 20)
    async with jail(namespaces=False, max_jobs=3) as cell:
        honest_limits = JobLimits(wall_s=400, cpu_s=300)
        honest = await cell.start_job(
            "tests.interventions.jail.runner:innocent", b"2000", trusted=False, limits=honest_limits
        )
        loop = asyncio.get_running_loop()
        ticks = 0

        async def tick_along() -> None:
            nonlocal ticks
            for _ in range(2000):
                async with asyncio.timeout(5):
                    assert await loop.sock_recv(honest.channel, 4) == b"tick"
                await loop.sock_sendall(honest.channel, b"tock")
                ticks += 1
                await asyncio.sleep(0.03)

        async def attack(name: str) -> str:
            job = await cell.start_job(
                RUN, field.payload(BODIES[name]), trusted=False, limits=storm_limits
            )
            async with job:
                reading = asyncio.create_task(read_all(job), name="read-channel")
                outcome = await job.outcome()
                sent = await reading
                return field.escaped(outcome.result, sent, [])

        async def attack_some(names: list[str]) -> list[str]:
            return [f"{name}: {how}" for name in names if (how := await attack(name))]

        async with honest:
            ticking = asyncio.create_task(tick_along(), name="tick-along")
            try:
                found = await asyncio.gather(attack_some(order[::2]), attack_some(order[1::2]))
            finally:
                await asyncio.to_thread(field.close)
            assert found == [[], []]
            assert cell.alive
            assert ticks > 100
            await ticking
            outcome = await honest.outcome()
            assert outcome.ending is Ending.FINISHED
        reference = await _alone(cell)
        assert outcome.result == reference


async def _alone(cell: Jail) -> bytes:
    loop = asyncio.get_running_loop()
    job = await cell.start_job("tests.interventions.jail.runner:innocent", b"2000", trusted=False)
    async with job:
        for _ in range(2000):
            await loop.sock_recv(job.channel, 4)
            await loop.sock_sendall(job.channel, b"tock")
        return (await job.outcome()).result
