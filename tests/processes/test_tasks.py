"""Work on threads, and what becomes of it when who waits is cancelled."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from asyncio.subprocess import PIPE

import pytest

from mesh.logs import REQUEST
from mesh.processes.tasks import abandonable, end, spawn, to_its_end


async def test_what_is_not_to_be_left_alone_ends_before_the_cancellation_is_heard() -> None:
    proceed, ended = threading.Event(), threading.Event()

    def work() -> None:
        proceed.wait(20)
        ended.set()

    running = asyncio.create_task(to_its_end(work))
    await asyncio.sleep(0.05)
    for _ in range(2):
        running.cancel()
        await asyncio.sleep(0.05)
    assert not running.done()
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()


async def test_what_may_be_left_alone_gives_its_result_or_its_error() -> None:
    assert await abandonable(sum, [1, 2]) == 3
    with pytest.raises(ZeroDivisionError):
        await abandonable(divmod, 1, 0)


async def test_a_process_that_is_interrupted_does_not_wait_for_what_may_be_left_alone() -> None:
    script = (
        "import asyncio, time\n"
        "from mesh.processes.tasks import abandonable\n"
        "async def main():\n"
        "    print('begun', flush=True)\n"
        "    await abandonable(time.sleep, 60)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=PIPE, stderr=PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    began = time.monotonic()
    await asyncio.sleep(0.1)
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(20):
        await process.communicate()
    assert time.monotonic() - began < 15


async def test_what_goes_on_in_the_background_is_on_behalf_of_no_request() -> None:
    seen: list[str] = []

    async def work() -> None:
        seen.append(REQUEST.get())

    token = REQUEST.set("family-4")
    try:
        task = spawn(work(), "work")
        await task
    finally:
        REQUEST.reset(token)
    await end([task])
    assert seen == [""]
