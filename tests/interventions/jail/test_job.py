"""The daemon's side: results, output, limits, ends, and that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import platform
import subprocess
import sys
import sysconfig
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from mesh.errors import Busy, JailUnavailable
from mesh.interventions.jail import doctor
from mesh.interventions.jail.canaries import STARTED, canaries_of
from mesh.interventions.jail.doctor import JailStrength, examine
from mesh.interventions.jail.job import Jail, JailedJob, examine_machine
from mesh.interventions.jail.limits import Ending, JobLimits, JobOutcome
from mesh.interventions.jobs import jails
from mesh.types import ModelId
from tests.interventions.jail.processes import Unexamined, run_canary, warmed_parent

STORIES = "tests.interventions.jail.stories:"
_SOON_S = 10
"""On the slowest machine; the limit of a job that nothing else ends is later."""
WARM = jails.WarmUp(ModelId("m"), "", Path("/nowhere"), Path("/nowhere"), "fp32")


@pytest.fixture
async def jail() -> AsyncIterator[Jail]:
    """Without torch and unexamined, so that each test starts in a moment."""
    started = await Unexamined.start(STORIES + "warm", namespaces=False, max_jobs=2)
    yield started
    await started.stop()
    assert not started.alive


async def run(
    jail: Jail,
    story: str,
    payload: bytes = b"",
    limits: JobLimits | None = None,
    on_text: Callable[[str], None] = lambda _: None,
) -> JobOutcome:
    async with await jail.start_job(
        STORIES + story, payload, trusted=False, limits=limits, on_text=on_text
    ) as job:
        return await job.outcome()


async def hear(job: JailedJob) -> bytes:
    async with asyncio.timeout(5):
        return await asyncio.get_running_loop().sock_recv(job.channel, 64)


def children() -> list[psutil.Process]:
    return warmed_parent().children(recursive=True)


async def require_no_children() -> None:
    """Fail unless they are all gone, which the parent may have to hear of first."""
    for _ in range(500):
        if not children():
            return
        await asyncio.sleep(0.01)
    assert children() == []


async def test_bytes_go_in_and_come_out(jail: Jail) -> None:
    payload = os.urandom(3 << 20)
    async with await jail.start_job(STORIES + "echo", payload, trusted=False) as job:
        await asyncio.get_running_loop().sock_sendall(job.channel, b"ab")
        assert await hear(job) == b"abab"
        outcome = await job.outcome()
    assert outcome.ending is Ending.FINISHED
    assert outcome.result == payload[::-1]
    assert outcome.text == ""
    assert outcome.wall_s > 0
    assert outcome.peak_memory_bytes > 1 << 20


async def test_sources_are_found_where_the_environment_is_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(sysconfig.get_path("purelib"))
    story = STORIES + "warm"
    jail = await Unexamined.start(story, str(tmp_path / "link"), namespaces=False, max_jobs=1)
    try:
        outcome = await run(jail, "reading_source")
        assert outcome.ending is Ending.FINISHED, outcome.text
        assert outcome.result is not None
        assert outcome.result.startswith(b"def encode")
    finally:
        await jail.stop()


async def test_output_arrives_as_clean_lines(jail: Jail) -> None:
    lines: list[str] = []
    text = "one\n\x1b[2Jtwo\x07\rforged\nthr\u202eee\x9b31m\n\npartial"
    await run(jail, "printing", text.encode(), on_text=lines.append)
    assert "\n".join(lines).split("\n") == [
        "one",
        "[2Jtwoforged",
        "three31m",
        "",
        "partialfrom the library",
    ]


async def test_output_is_bounded_in_rate_and_amount(jail: Jail) -> None:
    lines: list[str] = []
    limits = JobLimits(wall_s=1.5, log_bytes=64 << 10, log_bytes_per_s=256 << 10)
    outcome = await run(jail, "flood", limits=limits, on_text=lines.append)
    assert outcome.ending is Ending.WALL_LIMIT
    assert sum(map(len, lines)) <= (64 << 10) + 100
    assert lines[-1].split("\n")[-1] == "(the output limit is reached; the rest is dropped)"
    few: list[str] = []
    slow = JobLimits(wall_s=1.0, log_bytes_per_s=32 << 10)
    await run(jail, "flood", limits=slow, on_text=few.append)
    assert 0 < sum(map(len, few)) < 160 << 10  # a second's worth, and what the pipe held


async def test_a_job_that_prints_fast_is_told_that_it_waits_and_does_not_for_what_is_dropped(
    jail: Jail,
) -> None:
    texts: list[str] = []
    limits = JobLimits(wall_s=10, log_bytes=256 << 10, log_bytes_per_s=256 << 10)
    outcome = await run(jail, "spilling", b"100000", limits, texts.append)
    assert outcome.result == b"done"
    lines = "\n".join(texts).split("\n")
    said = "(it prints more than 256 KiB a second: its prints wait, and so does the job)"
    assert lines.count(said) == 1
    assert lines[-1] == "(the output limit is reached; the rest is dropped)"
    few: list[str] = []
    await run(jail, "spilling", b"500", limits, few.append)  # the pipe holds it
    assert said not in "\n".join(few)


async def test_short_lines_come_many_at_a_time(jail: Jail) -> None:
    texts: list[str] = []
    limits = JobLimits(wall_s=1.5, log_bytes=64 << 10, log_bytes_per_s=256 << 10)
    await run(jail, "breaking_lines", limits=limits, on_text=texts.append)
    assert sum(text.count("\n") + 1 for text in texts) >= 64 << 10
    assert len(texts) <= 30  # one per read: ten a second, and what the pipe held


async def test_single_lines_do_not_come_one_by_one(jail: Jail) -> None:
    texts: list[str] = []
    begun_s = time.monotonic()
    await run(jail, "dripping", b"400", on_text=texts.append)
    assert "\n".join(texts).split("\n") == [str(number) for number in range(400)]
    assert len(texts) <= 10 * (time.monotonic() - begun_s) + 10


async def test_an_error_comes_with_its_line_and_without_control_codes(jail: Jail) -> None:
    outcome = await run(jail, "raising", b"12")
    assert outcome.ending is Ending.FAILED
    assert outcome.text.strip().endswith("LookupError: no such [31mlayer[0m 12")
    assert "in raising" in outcome.text
    assert outcome.result == b""


@pytest.mark.parametrize(
    ("story", "payload", "ending", "text"),
    [
        ("leaving", b"3", Ending.CRASHED, "ended by itself and left no valid result."),
        ("leaving", b"0", Ending.CRASHED, "ended by itself and left no valid result."),
        ("crashing", b"", Ending.CRASHED, "The job's process ended by SIGSEGV."),
        ("exits", b"", Ending.FAILED, "SystemExit: 0"),
        ("wrong_type", b"", Ending.FAILED, "the entry point returned no bytes"),
        ("forging", b"", Ending.CRASHED, "ended by itself and left no valid result."),
    ],
)
async def test_other_ends(
    jail: Jail, story: str, payload: bytes, ending: Ending, text: str
) -> None:
    outcome = await run(jail, story, payload)
    assert outcome.ending is ending
    assert outcome.text.strip().endswith(text)
    assert outcome.result == b""


async def test_limits_end_a_job(jail: Jail) -> None:
    outcome = await run(jail, "spinning", limits=JobLimits(wall_s=0.5))
    assert outcome.ending is Ending.WALL_LIMIT
    assert outcome.wall_s < _SOON_S
    outcome = await run(jail, "spinning", limits=JobLimits(wall_s=20, cpu_s=1))
    assert outcome.ending is Ending.CPU_LIMIT
    assert outcome.text == "The job was ended after 1 s of computing, its limit."
    # The kernel counts the limit in ticks and what was used exactly: they may differ by some.
    assert 0.5 <= outcome.cpu_s < 2


async def test_a_result_over_its_limit_is_an_error(jail: Jail) -> None:
    async with await jail.start_job(
        STORIES + "echo", bytes(1 << 20), trusted=False, limits=JobLimits(result_bytes=64 << 10)
    ) as job:
        await asyncio.get_running_loop().sock_sendall(job.channel, b"x")
        outcome = await job.outcome()
    assert outcome.ending is Ending.FAILED
    assert outcome.text.startswith("The result has 1048576 bytes, 65536 are allowed. Save less")


async def test_a_killed_job_is_gone_at_once(jail: Jail) -> None:
    async with await jail.start_job(STORIES + "spinning", b"", trusted=False) as job:
        assert await hear(job) == b"spinning"
        job.kill()
        outcome = await job.outcome()
        assert outcome.ending is Ending.KILLED
        assert outcome.wall_s < _SOON_S
    await require_no_children()
    assert jail.running == 0


async def test_leaving_the_context_ends_the_job(jail: Jail) -> None:
    async def fail() -> None:
        async with await jail.start_job(STORIES + "waiting", b"", trusted=False) as job:
            await hear(job)
            raise KeyError("the other side went wrong")

    with pytest.raises(KeyError):
        await fail()
    await require_no_children()


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 8, 20])
async def test_a_cancelled_start_leaves_no_job_behind(jail: Jail, turns: int) -> None:
    """Wherever between making the files and the parent's answer the cancellation falls."""
    starting = asyncio.create_task(
        jail.start_job(STORIES + "waiting", bytes(1 << 20), trusted=False), name="start"
    )
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        async with await starting as job:  # it was quicker
            job.kill()
    # Commands are obeyed in order: after this one, the kill has been as well.
    assert (await run(jail, "touching")).result == b"1"
    assert jail.running == 0
    await require_no_children()


async def test_a_start_cancelled_in_the_turn_of_its_answer_leaves_nothing_open(
    jail: Jail, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = jail._parent._resolve_start

    def answer_and_cancel(number: int, fds: list[int]) -> None:
        answer(number, fds)
        starting.cancel()

    monkeypatch.setattr(jail._parent, "_resolve_start", answer_and_cancel)
    starting = asyncio.create_task(jail.start_job(STORIES + "waiting", b"", trusted=False))
    with pytest.raises(asyncio.CancelledError):
        await starting
    monkeypatch.undo()
    assert (await run(jail, "touching")).result == b"1"
    await require_no_children()


@pytest.mark.parametrize("turns", [1, 3])
async def test_a_parent_that_is_given_up_as_it_starts_is_no_more(turns: int) -> None:
    before = psutil.Process().children()
    starting = asyncio.create_task(Unexamined.start(STORIES + "warm", namespaces=False))
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert psutil.Process().children() == before


async def test_the_number_of_jobs_is_bounded(jail: Jail) -> None:
    first = await jail.start_job(STORIES + "waiting", b"", trusted=False)
    second = await jail.start_job(STORIES + "waiting", b"", trusted=False)
    with pytest.raises(Busy):
        await jail.start_job(STORIES + "waiting", b"", trusted=False)
    for job in (first, second):
        async with job:
            job.kill()
    assert (await run(jail, "touching")).ending is Ending.FINISHED


async def test_a_job_sees_nothing_of_the_one_before(jail: Jail) -> None:
    assert [(await run(jail, "touching")).result for _ in range(3)] == [b"1"] * 3


async def test_the_end_of_the_parent_ends_its_jobs(jail: Jail) -> None:
    async with await jail.start_job(STORIES + "spinning", b"", trusted=False) as job:
        await hear(job)
        (process,) = children()
        warmed_parent().kill()
        outcome = await job.outcome()
        assert outcome.ending is Ending.CRASHED
        await asyncio.to_thread(process.wait, 20)
    assert not jail.alive
    with pytest.raises(JailUnavailable, match=r"gone\. It is restarted; try again\.$"):
        await jail.start_job(STORIES + "touching", b"", trusted=False)
    await asyncio.sleep(0)
    assert jail.running == 0


async def test_a_parent_that_stops_answering_does_not_keep_a_job_alive(jail: Jail) -> None:
    """The wall limit holds even when the zygote is stopped."""
    limits = JobLimits(wall_s=0.3)
    async with await jail.start_job(STORIES + "waiting", b"", trusted=False, limits=limits) as job:
        await hear(job)
        (process,) = children()
        warmed_parent().suspend()
        outcome = await job.outcome()
        assert outcome.ending is Ending.WALL_LIMIT
        await asyncio.to_thread(process.wait, 20)


async def test_a_machine_that_stands_still_while_a_job_ends_costs_no_other_job(jail: Jail) -> None:
    other = await jail.start_job(STORIES + "echo", b"ab", trusted=False)
    job = await jail.start_job(STORIES + "waiting", b"", trusted=False)
    async with other, job:
        await hear(job)
        parent = warmed_parent()
        parent.suspend()
        job.kill()
        time.sleep(2.5)  # noqa: ASYNC251 - this process stands still as well
        parent.resume()
        assert (await job.outcome()).ending is Ending.KILLED
        await asyncio.get_running_loop().sock_sendall(other.channel, b"x")
        assert (await other.outcome()).result == b"ba"
        assert jail.alive


async def test_a_machine_that_stands_still_while_a_job_starts_costs_no_job(jail: Jail) -> None:
    other = await jail.start_job(STORIES + "echo", b"ab", trusted=False)
    parent = warmed_parent()
    parent.suspend()
    starting = asyncio.create_task(jail.start_job(STORIES + "echo", b"cd", trusted=False))
    await asyncio.sleep(0)
    time.sleep(5.5)  # noqa: ASYNC251 - this process stands still as well
    parent.resume()
    async with other, await starting as job:
        for each in (job, other):
            await asyncio.get_running_loop().sock_sendall(each.channel, b"x")
        assert [(await each.outcome()).result for each in (job, other)] == [b"dc", b"ba"]


async def test_two_hundred_jobs_leave_nothing(jail: Jail) -> None:
    before = psutil.Process().num_fds()
    gate = asyncio.Semaphore(2)

    async def one(number: int) -> bytes:
        async with (
            gate,
            await jail.start_job(STORIES + "echo", b"%d" % number, trusted=False) as job,
        ):
            await asyncio.get_running_loop().sock_sendall(job.channel, b"x")
            return (await job.outcome()).result

    results = await asyncio.gather(*(one(number) for number in range(200)))
    assert results == [str(number)[::-1].encode() for number in range(200)]
    await require_no_children()
    assert jail.running == 0
    assert psutil.Process().num_fds() == before
    parent = warmed_parent()
    assert parent.num_threads() == 1
    assert parent.num_fds() < 12


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("raise", "the model is not there"),
        ("thread", "threads running, which a fork would lose: .+"),
    ],
)
async def test_a_failing_warm_up_says_why(argument: str, why: str) -> None:
    with pytest.raises(JailUnavailable, match=why):
        await Jail.start(STORIES + "warm", argument, namespaces=False)


async def test_the_parent_holds_no_secret(jail: Jail) -> None:
    def look() -> tuple[bytes, Path, set[str]]:
        root = Path("/proc") / str(warmed_parent().pid)
        opened = {str(fd.readlink()) for fd in (root / "fd").iterdir()}
        return (root / "environ").read_bytes(), (root / "cwd").readlink(), opened

    environment, folder, opened = await asyncio.to_thread(look)
    assert b"HF_HUB_OFFLINE" in environment
    assert b"HEARTHNET" not in environment
    assert folder == Path("/")
    kinds = ("socket:", "pipe:", "/dev/null")
    # libffi keeps itself open where it maps its trampolines from its own file.
    assert {n for n in opened if not n.startswith(kinds) and "/libffi.so" not in n} == set()


async def test_killing_twice_does_not_cost_the_parent(jail: Jail) -> None:
    async with await jail.start_job(STORIES + "spinning", b"", trusted=False) as job:
        await hear(job)
        job.kill()
        job.kill(Ending.WALL_LIMIT)
        assert (await job.outcome()).ending is Ending.KILLED
    outcome = await run(jail, "spinning", limits=JobLimits(wall_s=0.5))
    assert outcome.ending is Ending.WALL_LIMIT
    assert jail.alive


async def test_a_line_arrives_while_the_job_runs(jail: Jail) -> None:
    arrived = asyncio.Event()
    async with await jail.start_job(
        STORIES + "waiting", b"", trusted=False, on_text=lambda _: arrived.set()
    ):
        async with asyncio.timeout(5):
            await arrived.wait()


async def test_a_machine_is_examined() -> None:
    report = await examine_machine(namespaces=False)
    assert report.level is JailStrength.OS, report.to_text()
    assert "read_file" in report.held
    assert report.to_text().startswith("jail: os (every member's code may run)")
    assert report.to_dict()["level"] == "os"


async def test_weak_walls_are_for_trusted_keys_and_none_for_nobody(jail: Jail) -> None:
    for level, trusted, may_run in [
        (JailStrength.OS, False, True), (JailStrength.WEAK, False, False),
        (JailStrength.WEAK, True, True), (JailStrength.NONE, True, False), (None, True, False),
    ]:  # fmt: skip
        jail.report = None if level is None else doctor.JailReport(level, (), {}, False, 0, True)
        if may_run:
            job = await jail.start_job(STORIES + "touching", b"", trusted=trusted)
            async with job:
                assert (await job.outcome()).ending is Ending.FINISHED
        else:
            with pytest.raises(JailUnavailable, match="cannot wall in"):
                await jail.start_job(STORIES + "touching", b"", trusted=trusted)


def slowed(name: str, times: int, jail: Jail) -> tuple[doctor.RunCanary, list[float]]:
    """Runs canaries; the one called `name` finds no time to begin the first so many times."""
    walls: list[float] = []

    async def fly(payload: bytes, limits: JobLimits) -> tuple[JobOutcome, bytes]:
        if f'"name": "{name}"'.encode() in payload:
            walls.append(limits.wall_s)
            if len(walls) <= times:
                return JobOutcome(Ending.WALL_LIMIT, b"", "ended", limits.wall_s, 0.0, 0), b""
        return await run_canary(jail, payload, limits)

    return fly, walls


@pytest.mark.parametrize("name", ["control", "never_ends", "read_file", "signal"])
async def test_a_canary_that_was_too_slow_gets_more_time(jail: Jail, name: str) -> None:
    fly, walls = slowed(name, 1, jail)
    report = await examine(fly, namespaces=False)
    assert report.level is JailStrength.OS, report.to_text()
    assert walls[1] == 4 * walls[0]


async def test_a_canary_that_stays_too_slow_is_a_wall_that_does_not_stand(jail: Jail) -> None:
    fly, walls = slowed("read_file", 9, jail)
    report = await examine(fly, namespaces=False)
    assert report.level is JailStrength.WEAK
    assert len(walls) == 2


async def test_a_canary_that_was_stopped_before_its_attack_proves_nothing(jail: Jail) -> None:
    async def halfway(payload: bytes, limits: JobLimits) -> tuple[JobOutcome, bytes]:
        if b'"name": "read_file"' in payload:
            return JobOutcome(Ending.WALL_LIMIT, b"", "ended", 5.0, 0.0, 0), STARTED
        return await run_canary(jail, payload, limits)

    report = await examine(halfway, namespaces=False)
    assert report.broken == {"read_file": "the canary was too slow to tell"}


class Looking:
    """Starts jails whose walls are found so strong, one look after the other."""

    def __init__(self, *found: JailStrength) -> None:
        self.looks = 0
        self.found = found

    async def start(self, _: jails.WarmUp, max_jobs: int) -> Jail:
        looking = self

        class Looked(Jail):
            async def examine(self) -> None:
                level = looking.found[min(looking.looks, len(looking.found) - 1)]
                looking.looks += 1
                self.report = doctor.JailReport(level, (), {}, False, 0, True)

        return await Looked.start(STORIES + "warm", namespaces=False, max_jobs=max_jobs)


async def test_weak_walls_are_looked_at_again_after_a_while() -> None:
    found = [JailStrength.NONE, JailStrength.WEAK, JailStrength.OS]
    looking, hours = Looking(*found), itertools.count(step=3600.0)
    warm = jails.WarmJails(
        max_jobs=1, idle_s=60, start=looking.start, monotonic=lambda: next(hours)
    )
    try:
        for level in [*found, JailStrength.OS]:
            jail = await warm.get(WARM)
            assert jail.report is not None
            assert jail.report.level is level
        assert looking.looks == 3  # strong walls are not looked at again
    finally:
        await warm.close()


async def test_weak_walls_are_not_looked_at_before_every_job() -> None:
    looking, now = Looking(JailStrength.WEAK), [0.0]
    warm = jails.WarmJails(max_jobs=1, idle_s=60, start=looking.start, monotonic=lambda: now[0])
    try:
        for _ in range(3):
            await warm.get(WARM)
        assert looking.looks == 1
        now[0] += 31
        await warm.get(WARM)
        await warm.get(WARM)
        assert looking.looks == 2
    finally:
        await warm.close()


def test_elsewhere_nothing_is_tried_that_goes_by_the_numbers_and_names_of_linux() -> None:
    """There each would fail for want of them, or call something else: neither says of a wall."""
    ours, elsewhere = set(canaries_of("linux")), set(canaries_of("darwin"))
    assert elsewhere < ours
    assert {"ptrace", "socket", "memory_file", "read_environment"} <= ours - elsewhere
    assert {"control", "never_ends", "read_file", "connect", "exec", "memory"} <= elsewhere


async def test_an_examination_without_canaries_finds_no_walls() -> None:
    """Fails closed: what did not run did not hold."""

    async def never_runs(payload: bytes, limits: JobLimits) -> tuple[JobOutcome, bytes]:
        return JobOutcome(Ending.FAILED, b"", "no such module", 0.0, 0.0, 0), b""

    report = await examine(never_runs, namespaces=False)
    assert report.level is JailStrength.NONE
    assert report.held == ()
    assert "the canary did not run" in report.broken["control"]


async def test_a_wall_that_cannot_be_put_up_lets_nothing_run() -> None:
    jail = await Jail.start(STORIES + "warm", "no landlock", namespaces=False)
    try:
        assert jail.report is not None
        assert jail.report.level is JailStrength.NONE
        assert "the walls could not be put up" in jail.report.broken["control"]
        with pytest.raises(JailUnavailable):
            await jail.start_job(STORIES + "touching", b"", trusted=True)
    finally:
        await jail.stop()


_COLLAPSING = """
import mmap, re
from pathlib import Path
from mesh.interventions.jail.pages import HugePages
area = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
area.write(bytes(range(256)) * (16 << 12))
def huge_kb():
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"AnonHugePages:\\s+(\\d+)", rollup)[1])
before, pages = huge_kb(), HugePages()
while pages.step():
    pass
assert area[:] == bytes(range(256)) * (16 << 12)
print(huge_kb() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="madvise(2) of Linux")
async def test_memory_is_gathered_into_huge_pages_and_says_the_same() -> None:
    if tuple(map(int, platform.release().split(".")[:2])) < (6, 1):
        pytest.skip("this kernel does not collapse pages on request")
    ended = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", _COLLAPSING], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) >= 8 << 10
