"""The queue by itself: fairness, bounds, restarts, the disk."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from mesh.clock import SystemClock
from mesh.errors import Busy, JobFailed, NotFound, SchemaTooNew, StorageFull
from mesh.interventions.jobs.files import part_of
from mesh.interventions.jobs.queue.feed import MAX_WAITING, Feed
from mesh.interventions.jobs.queue.printed import MAX_CHARACTERS, Printed
from mesh.interventions.jobs.queue.service import JobQueue
from mesh.interventions.jobs.queue.spool import Spool
from mesh.interventions.jobs.queue.types import Job, QueueSettings, Status, Submission, Update
from mesh.interventions.jobs.types import JobHearer, JobReport, JobSpec
from mesh.types import ANONYMOUS, ModelId, Principal, PrincipalKind
from tests.ndif.serving import ScriptedRunner
from tests.waiting import until

ANNA, BEN, CARL, DORA = (
    Principal(PrincipalKind.KEY, name) for name in ("anna", "ben", "carl", "dora")
)

_made: list[JobQueue] = []


@pytest.fixture(autouse=True)
async def _nothing_is_left_open() -> AsyncIterator[None]:
    """The table's thread would outlive a test that fails."""
    yield
    while _made:
        await _made.pop().stop(0)


def a_queue(root: Path, disk_bytes: int = 1 << 30, **settings: Any) -> JobQueue:
    spool = Spool(root / "jobs", disk_bytes)
    given = QueueSettings(**{"concurrent": 1, "max_result_bytes": 1 << 16, **settings})
    queue = JobQueue(ScriptedRunner(), spool, given, SystemClock(), lambda *_: None)
    _made.append(queue)
    return queue


def faulty(root: Path, tell: Callable[[str, dict[str, Any]], None]) -> JobQueue:
    """One that runs a job at a time and tells of it to `tell`."""
    spool, settings = Spool(root / "jobs", 1 << 30), QueueSettings(concurrent=1)
    queue = JobQueue(ScriptedRunner(), spool, settings, SystemClock(), tell)
    _made.append(queue)
    return queue


def runner_of(queue: JobQueue) -> ScriptedRunner:
    assert isinstance(queue.runner, ScriptedRunner)
    return queue.runner


async def hand_in(
    queue: JobQueue, words: str, owner: Principal = ANNA, feed: Feed | None = None, model: str = "m"
) -> Job:
    payload = f"script = '{words}'".encode()
    arrived = await asyncio.to_thread(queue.spool.receive)
    arrived.grow(len(payload), 1 << 20)
    await asyncio.to_thread(arrived.write, payload)
    asked = Submission(owner, ModelId(model), feed is not None, False, {"a": "b"}, False)
    return await queue.submit(asked, arrived, feed)


async def all_done(queue: JobQueue) -> None:
    left = queue.unended
    await until(lambda: not queue.unended)
    await until(lambda: all(ticket.ended.is_set() for ticket in left))


async def heard_until_its_end(feed: Feed) -> list[Update]:
    """What a client was told, up to how its job ended."""
    heard = [await feed.get()]
    while heard[-1].status not in (Status.ERROR, Status.COMPLETED):
        heard.append(await feed.get())
    return heard


async def test_keys_take_turns(tmp_path: Path) -> None:
    queue = a_queue(tmp_path)
    await queue.start()
    await hand_in(queue, "wait 0")
    await runner_of(queue).began.get()
    for number in range(4):
        await hand_in(queue, f"greedy {number}", BEN)
    await hand_in(queue, "modest", CARL)
    runner_of(queue).proceed.set()
    await all_done(queue)
    assert runner_of(queue).words == [
        "wait 0",
        "greedy 0",
        "modest",
        *(f"greedy {n}" for n in (1, 2, 3)),
    ]
    await queue.stop(0)


async def test_keys_take_turns_over_all_models(tmp_path: Path) -> None:
    queue = a_queue(tmp_path)
    await queue.start()
    await hand_in(queue, "wait 0", BEN)
    await runner_of(queue).began.get()
    for number in range(4):
        await hand_in(queue, f"greedy {number}", BEN, model=f"m{number}")
    await hand_in(queue, "modest 0", CARL, model="other")
    await hand_in(queue, "modest 1", CARL, model="another")
    runner_of(queue).proceed.set()
    await all_done(queue)
    order = ["wait 0", "modest 0", "greedy 0", "modest 1", "greedy 1", "greedy 2", "greedy 3"]
    assert runner_of(queue).words == order
    await queue.stop(0)


async def test_who_has_fewer_places_is_next(tmp_path: Path) -> None:
    queue = a_queue(tmp_path, concurrent=2)
    await queue.start()
    runner = runner_of(queue)
    long = [await hand_in(queue, f"wait {n}", BEN, model=f"m{n}") for n in range(3)]
    for _ in range(2):
        await runner.began.get()
    await hand_in(queue, "wait 3", CARL, model="other")
    gone = await hand_in(queue, "never", DORA, model="another")
    await queue.kill(gone.job_id, DORA, "It is not wanted.")
    await queue.kill(long[0].job_id, BEN, "It is not wanted.")
    await runner.began.get()
    assert runner.words[2:] == ["wait 3"]
    runner.proceed.set()
    await all_done(queue)
    assert runner.words[3:] == ["wait 2"]
    await queue.stop(0)


class HalfWriter(ScriptedRunner):
    """Leaves of each result a part, and fails."""

    async def run(self, spec: JobSpec, hearer: JobHearer) -> JobReport:
        part_of(spec.result).write_bytes(b"half")
        raise JobFailed("The disk is full.", fix="")


async def test_half_a_result_goes_with_its_job(tmp_path: Path) -> None:
    spool, settings = Spool(tmp_path / "jobs", 1 << 30), QueueSettings(concurrent=1)
    queue = JobQueue(HalfWriter(), spool, settings, SystemClock(), lambda *_: None)
    _made.append(queue)
    await queue.start()
    job = await hand_in(queue, "any")
    await all_done(queue)
    assert (await queue.find(job.job_id, ANNA)).status is Status.ERROR
    assert not list((tmp_path / "jobs/results").iterdir())
    await queue.stop(0)


async def test_models_do_not_wait_for_each_other_but_share_the_places(tmp_path: Path) -> None:
    queue = a_queue(tmp_path, concurrent=2)
    await queue.start()
    for number in range(3):
        await hand_in(queue, f"wait {number}", model="slow")
    for _ in range(2):
        await runner_of(queue).began.get()
    await hand_in(queue, "wait elsewhere", model="other")
    await asyncio.sleep(0.2)  # a third job would begin at once
    assert queue.counts() == (2, 2)
    runner_of(queue).proceed.set()
    await all_done(queue)
    assert runner_of(queue).most_running == 2
    assert runner_of(queue).words.index("wait elsewhere") <= 3
    await queue.stop(0)


async def test_there_is_an_end_to_the_line_and_half_of_it_is_for_one_key(tmp_path: Path) -> None:
    queue = a_queue(tmp_path, max_queued=4)
    await queue.start()
    for number in range(2):
        await hand_in(queue, f"wait {number}", ANNA)
    with pytest.raises(Busy, match="2 of your jobs"):
        await hand_in(queue, "too much", ANNA)
    for owner in (BEN, CARL):
        await hand_in(queue, "wait", owner)
    with pytest.raises(Busy, match="there are 4 places"):
        await hand_in(queue, "too much", DORA)
    assert len(list((tmp_path / "jobs/payloads").iterdir())) == 4
    assert not list((tmp_path / "jobs/incoming").iterdir())
    runner_of(queue).proceed.set()
    await all_done(queue)
    await hand_in(queue, "room again", ANNA)
    await all_done(queue)
    assert queue.spool.used_bytes == sum(
        file.stat().st_size for file in (tmp_path / "jobs/results").iterdir()
    )
    await queue.stop(0)


async def test_a_burst_never_gets_more_places_than_there_are(tmp_path: Path) -> None:
    queue = a_queue(tmp_path, max_queued=10)
    await queue.start()
    ends = await asyncio.gather(
        *(hand_in(queue, f"wait {n}") for n in range(30)), return_exceptions=True
    )
    assert sum(isinstance(end, Job) for end in ends) == 5
    assert sum(isinstance(end, Busy) for end in ends) == 25
    await queue.stop(0)


async def test_a_restart_runs_what_was_accepted(tmp_path: Path) -> None:
    first = a_queue(tmp_path)
    await first.start()
    running = await hand_in(first, "wait 0")
    waiting = [await hand_in(first, f"later {n}") for n in range(3)]
    socket = await hand_in(first, "socket", feed=Feed())
    await runner_of(first).began.get()
    await first.stop(0)

    second = a_queue(tmp_path)
    runner_of(second).proceed.set()
    await second.start()
    await all_done(second)
    assert runner_of(second).words == ["wait 0", "later 0", "later 1", "later 2"]
    for job in (running, *waiting):
        assert (await second.find(job.job_id, ANNA)).status is Status.COMPLETED
    assert (await second.find(socket.job_id, ANNA)).status is Status.ERROR
    assert dict(runner_of(second).specs[0].env) == {"a": "b"}
    await second.stop(0)


async def crashed(queue: JobQueue) -> None:
    """What kill -9 leaves: the files as they are now, whatever is written afterwards."""
    root = queue.spool.root
    now = root.with_name("now")
    await asyncio.to_thread(shutil.copytree, root, now)
    await queue.stop(0)
    await asyncio.to_thread(shutil.rmtree, root)
    await asyncio.to_thread(now.rename, root)


async def test_a_job_that_was_running_is_begun_once_more_and_not_twice(tmp_path: Path) -> None:
    for _ in range(2):
        queue = a_queue(tmp_path)
        await queue.start()
        if not queue.unended:
            job = await hand_in(queue, "wait")
        await runner_of(queue).began.get()
        await crashed(queue)
    third = a_queue(tmp_path)
    await third.start()
    found = await third.find(job.job_id, None)
    assert (found.status, found.attempts) == (Status.ERROR, 2)
    assert "2 times" in found.description
    assert not runner_of(third).specs
    await third.stop(0)


async def test_a_job_whose_client_waited_is_over_after_a_crash(tmp_path: Path) -> None:
    queue = a_queue(tmp_path)
    await queue.start()
    job = await hand_in(queue, "wait", feed=Feed())
    await runner_of(queue).began.get()
    await crashed(queue)
    again = a_queue(tmp_path)
    await again.start()
    found = await again.find(job.job_id, None)
    assert found.status is Status.ERROR
    assert "was restarted" in found.description
    assert not runner_of(again).specs
    assert not list((tmp_path / "jobs/payloads").iterdir())


async def test_what_belongs_to_no_job_is_swept_at_the_start(tmp_path: Path) -> None:
    queue = a_queue(tmp_path)
    await queue.start()
    done = await hand_in(queue, "big 10")
    await all_done(queue)
    await queue.stop(0)
    for name in ("payloads/left", "results/left", "incoming/left", f"payloads/{done.job_id}"):
        (tmp_path / "jobs" / name).write_bytes(b"x" * 100)
    again = a_queue(tmp_path)
    await again.start()
    left = [path.name for path in (tmp_path / "jobs").rglob("*/*")]
    assert left == [done.job_id]
    assert again.spool.used_bytes == done_size(tmp_path, done)
    await again.stop(0)


def done_size(root: Path, job: Job) -> int:
    return (root / "jobs/results" / job.job_id).stat().st_size


async def test_a_payload_that_is_gone_is_said(tmp_path: Path) -> None:
    queue = a_queue(tmp_path)
    await queue.start()
    await hand_in(queue, "wait")
    job = await hand_in(queue, "gone")
    await crashed(queue)
    (tmp_path / "jobs/payloads" / job.job_id).unlink()
    again = a_queue(tmp_path)
    await again.start()
    assert "payload is gone" in (await again.find(job.job_id, None)).description
    await again.stop(0)


async def test_the_disk_has_a_budget(tmp_path: Path) -> None:
    queue = a_queue(tmp_path, disk_bytes=100_000)
    await queue.start()
    arrived = await asyncio.to_thread(queue.spool.receive)
    with pytest.raises(StorageFull):
        arrived.grow(100_001, 1 << 30)
    await asyncio.to_thread(arrived.discard)
    feed = Feed()
    await hand_in(queue, "big 10000")  # 40,000 bytes stay
    await all_done(queue)
    await hand_in(queue, "next", feed=feed)  # whose result could take 65,536
    async with asyncio.timeout(10):
        while (update := await feed.get()).status is not Status.PROVISIONING:
            assert update.status is Status.QUEUED
    assert "of disk" in update.description
    assert runner_of(queue).words == ["big 10000"]
    assert queue.spool.used_bytes < 100_000
    await queue.stop(0)


async def test_a_result_that_is_handed_over_while_it_makes_room_is_counted_once(
    tmp_path: Path,
) -> None:
    queue = a_queue(tmp_path, disk_bytes=200_000)
    await queue.start()
    jobs = []
    for number in range(4):
        jobs.append(await hand_in(queue, f"big {10_000 + number}", BEN, Feed()))
        await all_done(queue)
    await asyncio.gather(queue.results.make_room(CARL, 60_000), queue.delivered(jobs[0].job_id))
    left = await asyncio.to_thread(lambda: [*(tmp_path / "jobs/results").iterdir()])
    assert queue.spool.used_bytes == sum(each.stat().st_size for each in left)
    await queue.stop(0)


async def test_whoever_fills_the_disk_makes_room_for_others(tmp_path: Path) -> None:
    queue = a_queue(tmp_path, disk_bytes=200_000)
    await queue.start()
    jobs = []
    for number in range(4):
        jobs.append(await hand_in(queue, f"big {10_000 + number}", BEN))  # 40,000 bytes each
        await all_done(queue)
    await hand_in(queue, "one more", BEN)  # for which there is no room before
    await hand_in(queue, "modest", CARL)
    await all_done(queue)
    assert runner_of(queue).words[4:] == ["modest", "one more"]
    found = [await queue.find(job.job_id, BEN) for job in jobs]
    assert [job.status is Status.ERROR for job in found] == [True, False, False, False]
    assert "somebody else's job needed room" in found[0].description
    assert not queue.spool.result(jobs[0].job_id).exists()
    assert queue.spool.used_bytes < 200_000
    await queue.stop(0)


async def test_nobody_within_his_share_makes_room(tmp_path: Path) -> None:
    queue = a_queue(tmp_path, disk_bytes=200_000)
    await queue.start()
    for owner in (ANNA, BEN):
        for _ in range(2):
            await hand_in(queue, "big 9000", owner)
            await all_done(queue)
    assert not await queue.results.make_room(BEN, 100_000)  # he would have more than his
    assert not await queue.results.make_room(CARL, 80_000)  # he as well
    assert await queue.results.make_room(CARL, 60_000)
    await queue.stop(0)


async def test_one_owner_s_waiting_jobs_take_half_of_the_disk(tmp_path: Path) -> None:
    queue = a_queue(tmp_path, disk_bytes=1000, max_result_bytes=100)
    await queue.start()
    runner_of(queue).obstacle = "Nobody serves it"
    # Also of two that are sent at once.
    both = await asyncio.gather(
        *(hand_in(queue, word * 450, BEN) for word in "ab"), return_exceptions=True
    )
    assert [type(each) for each in both].count(Job) == 1
    with pytest.raises(StorageFull, match="are for one key"):
        await hand_in(queue, "b" * 450, BEN)
    await hand_in(queue, "c" * 450, CARL)
    assert len(list((tmp_path / "jobs/payloads").iterdir())) == 2
    await queue.stop(0)


async def test_a_result_over_the_limit_is_an_error(tmp_path: Path) -> None:
    queue = a_queue(tmp_path)
    await queue.start()
    job = await hand_in(queue, "big 100000")
    await all_done(queue)
    found = await queue.find(job.job_id, None)
    assert found.status is Status.ERROR
    assert "at most 65536" in found.description
    assert not list((tmp_path / "jobs/results").iterdir())
    assert queue.spool.used_bytes == 0
    await queue.stop(0)


async def test_a_damaged_table_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/jobs.sqlite").write_bytes(b"no database" * 1000)
    queue = a_queue(tmp_path)
    await queue.start()
    job = await hand_in(queue, "fine")
    await all_done(queue)
    assert (await queue.find(job.job_id, None)).status is Status.COMPLETED
    assert (tmp_path / "jobs/jobs.damaged").exists()
    await queue.stop(0)


async def test_a_table_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    with sqlite3.connect(tmp_path / "jobs/jobs.sqlite") as made:
        made.execute("PRAGMA user_version = 99")
    made.close()
    with pytest.raises(SchemaTooNew):
        await a_queue(tmp_path).start()


_KILLED = """
import asyncio, os, sys
from pathlib import Path
import aiosqlite
from mesh.interventions.jobs.queue.records import JobRecords
run = aiosqlite.Connection.execute_fetchall
def until_the_version(connection, query, *values):
    if query.startswith("PRAGMA user_version ="):
        os._exit(9)
    return run(connection, query, *values)
aiosqlite.Connection.execute_fetchall = until_the_version
asyncio.run(JobRecords.open(Path(sys.argv[1])))
"""


@pytest.mark.parametrize(
    ("before", "owner"),
    [("0a1b2c3d", Principal(PrincipalKind.KEY, "0a1b2c3d")), ("local", ANONYMOUS)],
)
async def test_jobs_of_the_first_schema_keep_their_owners(
    tmp_path: Path, before: str, owner: Principal
) -> None:
    queue = a_queue(tmp_path)
    await queue.start()
    job = await hand_in(queue, "early")
    await all_done(queue)
    await queue.stop(0)
    with sqlite3.connect(tmp_path / "jobs/jobs.sqlite") as table:
        table.execute("UPDATE jobs SET owner = ?", (before,))
        table.execute("PRAGMA user_version = 1")
    table.close()
    killed = [sys.executable, "-c", _KILLED, str(tmp_path / "jobs/jobs.sqlite")]
    assert await (await asyncio.create_subprocess_exec(*killed)).wait() == 9
    for _ in range(2):
        again = a_queue(tmp_path)
        await again.start()
        assert (await again.find(job.job_id, owner)).asked.owner == owner
        await again.stop(0)


async def test_a_job_is_on_the_disk_before_it_is_accepted(tmp_path: Path) -> None:
    queue = a_queue(tmp_path)
    await queue.start()
    (tmp_path / "jobs/payloads").rmdir()
    with pytest.raises(StorageFull):
        await hand_in(queue, "lost")
    assert not queue.unended
    assert queue.spool.used_bytes == 0
    (tmp_path / "jobs/payloads").mkdir()
    job = await hand_in(queue, "wait")
    with sqlite3.connect(tmp_path / "jobs/jobs.sqlite") as table:
        (row,) = table.execute("SELECT job_id FROM jobs")
    table.close()
    assert row[0] == job.job_id
    assert (tmp_path / "jobs/payloads" / job.job_id).read_bytes() == b"script = 'wait'"
    await queue.stop(0)


async def test_a_slow_reader_loses_lines_but_nothing_else() -> None:
    feed = Feed()
    for number in range(3 * MAX_WAITING):
        feed.put(Update("a", Status.LOG, f"line {number}"))
    feed.put(Update("a", Status.COMPLETED, "done"))
    heard = [await feed.get() for _ in range(MAX_WAITING + 2)]
    assert [each.description for each in heard[:MAX_WAITING]] == [
        f"line {number}" for number in range(MAX_WAITING)
    ]
    assert heard[-2].description.startswith(f"({2 * MAX_WAITING} lines were dropped")
    assert heard[-1].status is Status.COMPLETED


async def test_where_a_job_stood_a_moment_ago_is_forgotten() -> None:
    feed = Feed()
    for position in (3, 2, 1):
        feed.put(Update("a", Status.QUEUED, str(position)))
    feed.put(Update("a", Status.RUNNING))
    assert (await feed.get()).description == "1"
    assert (await feed.get()).status is Status.RUNNING


async def test_a_result_that_was_never_written_is_an_error(tmp_path: Path) -> None:
    queue = a_queue(tmp_path)
    await queue.start()
    waiting = await hand_in(queue, "wait 0")
    await runner_of(queue).began.get()
    (tmp_path / "jobs/results").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o700)
    runner_of(queue).proceed.set()
    await all_done(queue)
    assert (await queue.find(waiting.job_id, None)).status is Status.ERROR
    (tmp_path / "elsewhere").rename(tmp_path / "jobs/results")
    job = await hand_in(queue, "next")
    await all_done(queue)
    assert (await queue.find(job.job_id, None)).status is Status.COMPLETED
    await queue.stop(0)


async def test_jobs_that_lose_patience_together_do_not_cost_the_workers(tmp_path: Path) -> None:
    """Both workers end them at once, and each finds some that the other has ended."""
    queue = a_queue(tmp_path, concurrent=2, patience_s=0.2)
    await queue.start()
    runner_of(queue).obstacle = "no node serves layers 3-5"
    jobs = [await hand_in(queue, f"in vain {n}") for n in range(12)]
    await all_done(queue)
    for job in jobs:
        assert (await queue.find(job.job_id, None)).status is Status.ERROR
    runner_of(queue).obstacle = None
    after = await hand_in(queue, "after that")
    await all_done(queue)
    assert (await queue.find(after.job_id, None)).status is Status.COMPLETED
    await queue.stop(0)


async def test_a_fault_of_ours_costs_no_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def tell(kind: str, _fields: dict[str, Any]) -> None:
        if kind == "job_ended" and not caplog.records:
            raise ZeroDivisionError

    queue = faulty(tmp_path, tell)
    await queue.start()
    for words in ("first", "second"):
        job = await hand_in(queue, words)
        await all_done(queue)
        assert (await queue.find(job.job_id, None)).status is Status.COMPLETED
    assert [record.message for record in caplog.records] == ["a worker of model=m failed"]
    await queue.stop(0)


async def test_a_job_that_we_cannot_conclude_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = a_queue(tmp_path)
    await queue.start()
    with monkeypatch.context() as broken:
        broken.setattr(queue.spool, "settle_result", lambda *_, **__: 1 // 0)
        feed = Feed()
        await hand_in(queue, "first", feed=feed)
        await all_done(queue)
    heard = await heard_until_its_end(feed)
    assert heard[-1].status is Status.ERROR
    assert "nobody foresaw" in heard[-1].description
    job = await hand_in(queue, "second")
    await all_done(queue)
    assert (await queue.find(job.job_id, None)).status is Status.COMPLETED
    await queue.stop(0)


async def test_shards_that_stay_full_are_waited_for_as_long_as_missing_ones(tmp_path: Path) -> None:
    queue = a_queue(tmp_path, patience_s=0.3)
    await queue.start()
    runner_of(queue).is_full = lambda: True
    feed = Feed()
    job = await hand_in(queue, "in vain", feed=feed)
    await all_done(queue)
    assert "has room" in (await queue.find(job.job_id, None)).description
    heard = [each.status for each in await heard_until_its_end(feed)]
    # However often it is tried, it does not seem to run in between.
    assert heard == [Status.QUEUED, Status.DEPLOYING, Status.PROVISIONING, Status.ERROR]
    assert runner_of(queue).refused > 1
    await queue.stop(0)


async def test_a_place_that_our_own_job_takes_is_waited_for_without_end(tmp_path: Path) -> None:
    queue = a_queue(tmp_path, concurrent=2, patience_s=0.0)
    await queue.start()
    runner = runner_of(queue)
    runner.is_full = lambda: runner.running > 0
    await hand_in(queue, "wait")
    await runner.began.get()
    second = await hand_in(queue, "second")
    await until(lambda: runner.refused >= 3)
    assert queue.counts()[0] >= 1
    runner.proceed.set()
    await all_done(queue)
    assert (await queue.find(second.job_id, None)).status is Status.COMPLETED
    await queue.stop(0)


async def test_what_a_job_printed_is_kept_for_its_owner(tmp_path: Path) -> None:
    queue = a_queue(tmp_path)
    await queue.start()
    job = await hand_in(queue, "print 250")
    await until(lambda: not queue.unended)
    printed = await queue.log(job.job_id, ANNA)
    assert (printed["lines"][0], printed["lines"][-1]) == ("line 50", "line 249")
    assert (len(printed["lines"]), printed["dropped"]) == (200, 50)
    with pytest.raises(NotFound):
        await queue.log(job.job_id, BEN)
    with pytest.raises(NotFound):
        await queue.log("nothing", None)


async def test_what_is_printed_takes_bounded_room() -> None:
    printed = Printed()
    for _ in range(100):
        printed.add("x" * 4096)
    assert printed.characters <= MAX_CHARACTERS
    assert len(printed.lines) + printed.dropped == 100
