"""What is forked from the warm parent: inherits nothing, ends with whom it should, comes back."""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from mesh.processes.child import Child
from mesh.processes.messages import Alive, reader
from mesh.processes.nursery import why_unfit
from mesh.processes.warm_parent import end_warm_parent
from tests.processes.nosy import Said
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")

TIMEOUT_S = 60.0
_PR_SET_CHILD_SUBREAPER = 36
_READ = reader([Said, Alive])


class Nosy:
    """A child of `tests.processes.nosy`."""

    def __init__(self) -> None:
        self._said: asyncio.Queue[Said] = asyncio.Queue()
        self.child: Child

    async def start(self) -> Nosy:
        self.child = await Child.start(
            "tests.processes.nosy",
            name="nosy",
            on_message=self._heard,
            on_closed=lambda: None,
        )
        await self._hears("ready")
        return self

    async def asked(self, op: str, **fields: Any) -> dict[str, Any]:
        self.child.channel.send(Said(op, fields))
        return await self._hears(op)

    def _heard(self, body: bytes) -> None:
        message = _READ(body)
        if isinstance(message, Said):
            self._said.put_nowait(message)

    async def _hears(self, op: str) -> dict[str, Any]:
        async with asyncio.timeout(TIMEOUT_S):
            while (message := await self._said.get()).what != op:
                pass
        return message.fields


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Nosy, Nosy]]:
    """Two that run at the same time, the second one forked when the first had long begun."""
    first = await Nosy().start()
    second = await Nosy().start()
    yield first, second
    for each in (first, second):
        await each.child.stop(TIMEOUT_S)


async def test_a_child_inherits_no_key_no_descriptor_and_no_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await asyncio.to_thread(end_warm_parent)  # the next one starts with the key in sight
    key, prompt = secrets.token_hex(16), secrets.token_hex(16)
    monkeypatch.setenv("HEARTHNET_API_KEY", key)
    monkeypatch.setenv("SOME_SERVICE_TOKEN", key)
    first = await Nosy().start()
    await first.asked("keep", text=f"a prompt: {prompt}")
    second = await Nosy().start()
    assert first.child.why_alone is second.child.why_alone is None

    found = await second.asked("look")
    files = found["files"]
    assert files.pop("0") == files.pop("1") == os.devnull
    files.pop("2")
    kinds = sorted(target.partition(":")[0] for target in files.values())
    # Its channel, once more for the watching thread; its own loop's selector and wake-up pair.
    assert kinds == ["anon_inode", *["socket"] * 4]
    assert not {*files.values()} & {*(await first.asked("look"))["files"].values()} - {
        "anon_inode:[eventpoll]"
    }
    assert key not in str(found["environment"])
    assert key not in found["started_with"]
    assert found["session"]
    assert found["signals"]
    assert found["collects"]

    halves = [(text[:16].encode(), text[16:].encode()) for text in (key, prompt)]
    assert (await first.asked("find", halves=halves))["found"] == [False, True]
    assert (await second.asked("find", halves=halves))["found"] == [False, False]
    for each in (first, second):
        await each.child.stop(TIMEOUT_S)


async def test_children_compute_and_draw_random_numbers_of_their_own(
    pair: tuple[Nosy, Nosy],
) -> None:
    looks = [await each.asked("look") for each in pair]
    assert [look["sum"] for look in looks] == [300.0**3] * 2
    for one, other in zip(*(look["random"] for look in looks), strict=True):
        assert one != other


async def test_how_a_child_ended_is_known_though_another_process_waits_for_it(
    pair: tuple[Nosy, Nosy],
) -> None:
    first, second = pair
    first.child.channel.send(Said("exit", {"status": 7}))
    assert await first.child.wait(TIMEOUT_S) == 7
    second.child.kill()
    assert await second.child.wait(TIMEOUT_S) == -signal.SIGKILL
    second.child.kill()  # does nothing, whoever has that number by now


async def test_how_a_child_ended_is_known_though_this_machine_stood_still_just_then(
    pair: tuple[Nosy, Nosy],
) -> None:
    child = pair[0].child
    parent = psutil.Process(child.pid).parent()
    assert parent is not None
    parent.suspend()
    try:
        child.channel.send(Said("exit", {"status": 7}))
        ending = psutil.Process(child.pid)
        await until(lambda: ending.status() == psutil.STATUS_ZOMBIE)
        await asyncio.sleep(0.1)
        time.sleep(1.5)  # noqa: ASYNC251 - this process stands still as well
    finally:
        parent.resume()
    assert await child.wait(TIMEOUT_S) == 7


@pytest.fixture
def adopting() -> Iterator[None]:
    """Orphans of this process's descendants become its own children, as those of process 1."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0
    yield
    assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 0) == 0


async def test_children_end_with_the_warm_parent_and_another_one_forks_the_next(
    pair: tuple[Nosy, Nosy], adopting: None
) -> None:
    first, second = pair
    (parent,) = [
        each
        for each in psutil.Process().children()
        if each.status() != psutil.STATUS_ZOMBIE and "nursery" in str(each.cmdline())
    ]
    os.kill(second.child.pid, signal.SIGSTOP)  # neither its loop nor its watching thread can end it
    parent.kill()
    assert await first.child.wait(TIMEOUT_S) == await second.child.wait(TIMEOUT_S)
    # In a container this process may be the only one that could wait for them.
    left = {each.pid for each in psutil.Process().children()}
    assert left.isdisjoint({first.child.pid, second.child.pid})
    again = await Nosy().start()
    assert again.child.why_alone is None
    assert psutil.Process(again.child.pid).ppid() != parent.pid
    await again.child.stop(TIMEOUT_S)


@asynccontextmanager
async def started(script: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A daemon that runs this script; what it prints can be read. At the end it is gone."""
    daemon = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=subprocess.PIPE
    )
    try:
        yield daemon
    finally:
        if daemon.returncode is None:
            daemon.kill()
        await daemon.communicate()


async def test_a_start_that_finds_no_descriptor_leaves_the_others_alone() -> None:
    script = (
        "import asyncio, os, resource\n"
        "from mesh.processes.child import Child\n"
        "async def start(heard):\n"
        "    return await Child.start('tests.processes.nosy', name='n', on_message=heard,\n"
        "        on_closed=lambda: None)\n"
        "async def main():\n"
        "    said = asyncio.Queue()\n"
        "    first = await start(said.put_nowait)\n"
        "    await said.get()\n"
        "    held, most = [], resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (64, most[1]))\n"
        "    try:\n"
        "        while True:\n"
        "            held.append(os.open('/dev/null', os.O_RDONLY))\n"
        "    except OSError:\n"
        "        pass\n"
        "    for _ in range(2):\n"  # for its channel, and none for what comes then
        "        os.close(held.pop())\n"
        "    try:\n"
        "        await start(lambda body: None)\n"
        "        print('started')\n"
        "    except OSError:\n"
        "        print('refused')\n"
        "    for fd in held:\n"
        "        os.close(fd)\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, most)\n"
        "    try:\n"
        "        print('ended', await first.wait(2.0))\n"
        "    except TimeoutError:\n"
        "        print('runs')\n"
        "    second = await start(said.put_nowait)\n"
        "    print(second.why_alone)\n"
        "    os._exit(0)\n"
        "asyncio.run(main())\n"
    )
    async with started(script) as daemon, asyncio.timeout(TIMEOUT_S):
        output, _ = await daemon.communicate()
    assert output.decode().split() == ["refused", "runs", "None"]


async def test_all_end_with_the_daemon_however_it_ends() -> None:
    script = (
        "import asyncio, psutil\n"
        "from mesh.processes.child import Child\n"
        "async def main():\n"
        "    said = asyncio.Queue()\n"
        "    await Child.start('tests.processes.nosy', name='n', on_message=said.put_nowait,\n"
        "        on_closed=print)\n"
        "    await said.get()\n"
        "    print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    async with started(script) as daemon:
        assert daemon.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            left = [psutil.Process(int(pid)) for pid in (await daemon.stdout.readline()).split()]
        assert len(left) == 2
        left[-1].suspend()
    _, alive = await asyncio.to_thread(psutil.wait_procs, left, TIMEOUT_S)
    for each in alive:
        each.kill()
    assert not alive


async def test_where_nothing_is_forked_a_child_imports_for_itself_and_why_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    alone = await Nosy().start()
    monkeypatch.undo()
    assert "not safe on darwin" in str(alone.child.why_alone)
    assert "not safe on darwin" in caplog.text
    assert psutil.Process(alone.child.pid).ppid() == os.getpid()
    assert await alone.child.stop(TIMEOUT_S) == 0


def test_a_process_with_threads_or_an_open_device_is_not_forked() -> None:
    script = (
        "import threading\n"
        "from mesh.processes.nursery import why_unfit\n"
        "print(why_unfit())\n"
        "device = open('/dev/full', 'wb')\n"
        "print(why_unfit())\n"
        "device.close()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "print(why_unfit())\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    assert said[0] == "None"
    assert "/dev/full" in said[1]
    assert said[2].startswith("importing started threads, which a fork would lose: ")
    assert threading.active_count() == 1 or why_unfit() is not None
