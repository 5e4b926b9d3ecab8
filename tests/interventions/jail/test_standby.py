"""A job that is forked before there is a payload for it, and an outcome before the process' end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import psutil
import pytest

from mesh.interventions.jail.job import Jail, JailedJob
from mesh.interventions.jail.limits import Ending, JobLimits, JobOutcome
from tests.interventions.jail.processes import Unexamined, warmed_parent
from tests.waiting import until

STORIES = "tests.interventions.jail.stories:"


@pytest.fixture
async def jail() -> AsyncIterator[Jail]:
    """Without torch and unexamined, so that each test starts in a moment."""
    started = await Unexamined.start(STORIES + "warm", namespaces=False, max_jobs=2)
    yield started
    await started.stop()


async def standing_by(jail: Jail) -> psutil.Process:
    """The process that waits when no job runs."""
    assert jail.running == 0
    async with asyncio.timeout(20):
        while True:
            if len(processes := warmed_parent().children()) == 1:
                return processes[0]
            await asyncio.sleep(0.01)


async def finish(job: JailedJob) -> None:
    """Read the channel to its end, as the relay does, and say so."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(20):
        while await loop.sock_recv(job.channel, 64):
            pass
    job.hung_up()


async def run(
    jail: Jail, payload: bytes = b"", hint: str | None = "a", limits: JobLimits | None = None
) -> JobOutcome:
    entry = STORIES + ("ready" if hint is not None else "touching")
    async with await jail.start_job(entry, payload, trusted=False, hint=hint, limits=limits) as job:
        if hint is not None:
            await finish(job)
        outcome = await job.outcome()
    if hint is not None and outcome.ending is Ending.FINISHED:  # which is known before it is gone
        await until(lambda: not any(psutil.pid_exists(pid) for pid in pids(outcome)))
    return outcome


def pids(outcome: JobOutcome) -> set[int]:
    """In which processes it was begun and run."""
    assert outcome.ending is Ending.FINISHED, outcome.text
    return {int(number) for number in outcome.result.split()[1:]}


async def test_the_next_of_a_kind_is_there_before_its_payload(jail: Jail) -> None:
    first = await run(jail, b"1")
    assert first.result.startswith(b"a1 ")
    waiting = await standing_by(jail)
    second = await run(jail, b"2")
    assert second.result.startswith(b"a2 ")
    assert pids(second) == {waiting.pid}
    await standing_by(jail)


@pytest.mark.parametrize("other", ["hint", "limits", "payload", "none"])
async def test_what_is_of_another_kind_is_not_run_in_it(jail: Jail, other: str) -> None:
    await run(jail)
    waiting = await standing_by(jail)
    match other:
        case "hint":
            outcome = await run(jail, hint="b")
        case "limits":
            outcome = await run(jail, limits=JobLimits(cpu_s=7))
        case "payload":
            outcome = await run(jail, bytes(2 << 20))
        case _:
            outcome = await run(jail, hint=None)
    assert outcome.ending is Ending.FINISHED
    if other != "none":
        assert waiting.pid not in pids(outcome)
    after = await standing_by(jail)
    assert (after.pid == waiting.pid) == (other in ("payload", "none"))


async def test_one_that_was_ended_is_replaced(jail: Jail) -> None:
    await run(jail)
    waiting = await standing_by(jail)
    parent = warmed_parent()
    parent.suspend()  # which would say that the process has ended
    try:
        waiting.kill()
        await until(lambda: waiting.status() == psutil.STATUS_ZOMBIE)
        running = asyncio.create_task(run(jail))
        await asyncio.sleep(0.05)
    finally:
        parent.resume()
    assert waiting.pid not in pids(await running)
    await standing_by(jail)
    assert jail.running == 0


async def test_none_is_left_when_the_jail_stops(jail: Jail) -> None:
    await run(jail)
    waiting = await standing_by(jail)
    await jail.stop()
    await asyncio.to_thread(waiting.wait, 20)


async def test_the_outcome_is_known_before_the_process_is_gone(jail: Jail) -> None:
    entry = STORIES + "ready"
    async with await jail.start_job(entry, b"1", trusted=False, hint="a") as job:
        nursery = warmed_parent()
        nursery.suspend()  # which would say that the process has ended
        try:
            await finish(job)
            async with asyncio.timeout(20):
                outcome = await job.outcome()
            assert not job.has_ended
        finally:
            nursery.resume()
    assert outcome.result.startswith(b"a1 ")
    assert pids(outcome)
    assert outcome.cpu_s > 0
    assert outcome.peak_memory_bytes > 1 << 20
    assert jail.running == 0


async def test_where_only_the_parent_knows_what_was_used_it_is_asked(
    jail: Jail, monkeypatch: pytest.MonkeyPatch
) -> None:
    had_ended: list[bool] = []
    kill = JailedJob.kill

    def killing(job: JailedJob, *how: Ending) -> None:
        had_ended.append(job.has_ended)
        kill(job, *how)

    monkeypatch.setattr("mesh.interventions.jail.job.usage_of", lambda _: None)
    monkeypatch.setattr(JailedJob, "kill", killing)
    outcome = await run(jail, b"1")
    assert outcome.ending is Ending.FINISHED
    assert outcome.result.startswith(b"a1 ")
    assert outcome.cpu_s > 0
    assert outcome.peak_memory_bytes > 1 << 20
    assert had_ended[0] is False, "it was not left to end by itself"


async def test_a_job_that_hangs_up_early_is_waited_for(jail: Jail) -> None:
    async with await jail.start_job(STORIES + "hanging_up", b"0.3", trusted=False) as job:
        await finish(job)
        outcome = await job.outcome()
    assert (outcome.ending, outcome.result) == (Ending.FINISHED, b"late")


async def test_a_job_that_hangs_up_and_never_ends_is_ended_on_time(jail: Jail) -> None:
    limits = JobLimits(wall_s=0.5)
    async with await jail.start_job(
        STORIES + "hanging_up", b"60", trusted=False, limits=limits
    ) as job:
        await finish(job)
        assert (await job.outcome()).ending is Ending.WALL_LIMIT
