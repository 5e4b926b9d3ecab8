"""Many jobs at once: nobody gets anybody else's values, and nothing piles up."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from nnsight.modeling.transformers import TransformersModel

from mesh.cli.local_node import LocalNode
from tests.interventions.households import HOUSES, move_in, remotely
from tests.interventions.jobs.storm_client import work
from tests.interventions.jobworld import Bench, bench, client, loaded, request_of, shards
from tests.interventions.worlds import checkpoint, equal, whole
from tests.mesh_e2e.conftest import starter

CLIENTS, JOBS_EACH = 8, 25
_GROWTH_BYTES = 64 << 20

pytestmark = pytest.mark.timeout(900)


def request_for(number: int) -> bytes:
    def trace(model: TransformersModel) -> None:
        with suppress(UnboundLocalError):  # of what it would have saved
            work(model, number)

    return request_of(trace)


def expected(number: int) -> dict[str, Any]:
    return work(whole("llama"), number)


Prepared = list[tuple[bytes, dict[str, Any]]]


async def _client(here: Bench, jobs: Prepared) -> None:
    for number, (request, values) in enumerate(jobs):
        saved = loaded(await here.run(request, here.place("llama", number % 3 + 1)))
        equal(saved, values, 0.0)


@pytest.mark.chaos
async def test_two_hundred_jobs_of_eight_clients_do_not_mix(tmp_path: Path) -> None:
    async with (
        shards(["llama"], tmp_path, max_tap_sessions=CLIENTS) as host,
        bench(host, max_running=CLIENTS) as here,
    ):
        # By one thread: neither nnsight's tracing nor the model it traces is for several.
        jobs = await asyncio.to_thread(
            lambda: [(request_for(n), expected(n)) for n in range(CLIENTS * JOBS_EACH)]
        )
        await _client(here, jobs[:2])
        assert host.pid is not None
        watched = [psutil.Process(), psutil.Process(host.pid)]
        before = [process.memory_info().rss for process in watched]
        await asyncio.gather(*(_client(here, jobs[c::CLIENTS]) for c in range(CLIENTS)))
        after = [process.memory_info().rss for process in watched]
        assert all(b - a < _GROWTH_BYTES for a, b in zip(before, after, strict=True))
        (jail,) = here.runner.jails.live
        assert jail.running == 0
        assert here.jobs == 2 + CLIENTS * JOBS_EACH


def _memory(node: LocalNode) -> dict[int, int]:
    """Resident bytes of a daemon and of all that descends from it, by process."""
    assert node.process is not None
    daemon = psutil.Process(node.process.pid)
    return {p.pid: p.memory_info().rss for p in [daemon, *daemon.children(recursive=True)]}


def _settled(node: LocalNode) -> dict[int, int]:
    """The same, once no process comes or goes for a second: one stands by a while after each
    job."""
    found = _memory(node)
    for _ in range(30):
        time.sleep(1)
        last, found = found, _memory(node)
        if last.keys() == found.keys():
            break
    return found


def _start_client(node: LocalNode, first: int, count: int, file: Path) -> subprocess.Popen[bytes]:
    directory = str(checkpoint("llama").directory)
    module = "tests.interventions.jobs.storm_client"
    local = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
    return subprocess.Popen(
        [sys.executable, "-m", module, directory, str(first), str(count), str(file)],
        env={**os.environ, **local, "OMP_NUM_THREADS": "1", "NDIF_HOST": node.url,
             "NDIF_API_KEY": node.record.api_key or ""},
    )  # fmt: skip


@pytest.mark.chaos
def test_two_hundred_jobs_of_eight_clients_of_a_daemon_do_not_mix(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    environment = {"HEARTHNET_JOBS__MAX_RUNNING": "4"}
    with starter(tmp_path) as start, ExitStack() as clients:
        node = move_in(start, HOUSES[2], ["llama"], environment=environment)
        with remotely(node):  # what the first jobs start is there before it is weighed
            for number in range(2):
                equal(work(client("llama"), number), expected(number), 0.0)
        before = _settled(node)
        files = [tmp_path / f"client-{n}" for n in range(CLIENTS)]
        running = [
            clients.enter_context(_start_client(node, n * JOBS_EACH, JOBS_EACH, file))
            for n, file in enumerate(files)
        ]
        assert [process.wait(600) for process in running] == [0] * CLIENTS
        found = {n: one for file in files for n, one in torch.load(file).items()}
        assert sorted(found) == list(range(CLIENTS * JOBS_EACH))
        for number, values in found.items():
            equal(values, expected(number), 0.0)
        # One process stands by for the next job, and is another one after each.
        after = _memory(node)
        for _ in range(100):
            if len(after) <= len(before):
                break
            time.sleep(0.1)
            after = _memory(node)
        assert len(after.keys() & before.keys()) >= len(before) - 1
        assert len(after) <= len(before)
        grown = {pid: after[pid] - before[pid] for pid in after.keys() & before.keys()}
        assert max(grown.values()) < _GROWTH_BYTES, grown
        assert node.get("/mesh/v1/jobs")["jobs"] == []
