"""The daemon's side of the jobs: a process of their own, which may die and does not outlive it."""

# ruff: noqa: F841 - names of a trace are what comes back from its job

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from nnsight.modeling.transformers import TransformersModel

from mesh.errors import JobFailed, ModelNotFound, NoRoute
from mesh.identity.tls import TlsMaterial
from mesh.interventions.jail.limits import JobLimits
from mesh.interventions.jobs.commands import StartJobs
from mesh.interventions.jobs.routes import RoutedModel
from mesh.interventions.jobs.supervisor import JobsSupervisor
from mesh.interventions.jobs.types import JobHearer, JobReport, JobSpec, RunnerSettings
from mesh.models.local import LocalModel
from mesh.pipeline.commands import Offer, RouteLimits
from mesh.processes.lifecycle import SilenceLimits
from mesh.processes.messages import ProcessMessage
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import LayerRange, ModelId
from tests import secure
from tests.interventions.cases import PROMPT
from tests.interventions.jobworld import ROUTES, checkpoint, loaded, request_of, served, shards

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
LLAMA = ModelId("llama")


class Here:
    """A daemon's jobs, as a `JobsOwner` with what it needs."""

    def __init__(
        self, host: ShardSupervisor, directory: Path, limits: SilenceLimits | None = None
    ) -> None:
        bounds = JobLimits(
            wall_s=60, cpu_s=60, memory_bytes=1 << 30, result_bytes=16 << 20
        )  # fmt: skip
        tls, routes = TlsMaterial.of(secure.KEY, []), RouteLimits(16, allow_self_as_first=True)
        settings = RunnerSettings(2, 600.0, directory, bounds)
        start = StartJobs(routes, settings, hello=secure.HELLO, tls=tls)
        llama = checkpoint("llama")
        model = LocalModel(
            LLAMA, str(llama.directory), llama.weights_sha256, llama.total_layers, None, None
        )
        self.jobs = JobsSupervisor(start, {LLAMA: model}, self, limits)
        self.lines: list[str] = []
        self.begun: list[str] = []
        self.spoke = asyncio.Event()
        self.host = host
        self.offers: tuple[Offer, ...] | None = None
        """Who serves the model; None: `host`."""
        self._directory = directory

    def routable(self, model_id: ModelId) -> tuple[Offer, ...]:
        if self.offers is not None:
            return self.offers
        return served(self.host, family=model_id, spans=ROUTES[2])

    async def on_its_way(self, model_id: ModelId, *, may_wake: bool) -> None:
        """It is up."""

    def _on_text(self, text: str) -> None:
        self.lines += text.split("\n")
        self.spoke.set()

    async def said(self, line: str) -> None:
        async with asyncio.timeout(60):
            while line not in self.lines:
                self.spoke.clear()
                await self.spoke.wait()

    async def run(self, name: str, request: bytes, model_id: str = "llama") -> JobReport:
        payload = self._directory / f"payload-{name}"
        await asyncio.to_thread(payload.write_bytes, request)
        spec = JobSpec(name, ModelId(model_id), payload, self.result(name), True, {}, trusted=False)
        return await self.jobs.run(spec, JobHearer(lambda: self.begun.append(name), self._on_text))

    def result(self, name: str) -> Path:
        return self._directory / f"result-{name}"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Here]:
    directory = tmp_path_factory.mktemp("jobs")
    async with shards(["llama"], directory, ROUTES[2]) as host:
        here = Here(host, directory)
        yield here
        await here.jobs.stop()


@pytest.fixture
def here(running: Here) -> Here:
    running.lines.clear()
    running.begun.clear()
    running.offers = None
    return running


def lingering(model: TransformersModel) -> None:
    with model.trace(PROMPT):
        early = model.model.layers[1].output.save()
        print("half way")
        import time

        time.sleep(1)
        logits = model.output.logits.save()


async def test_a_job_from_payload_to_result(here: Here) -> None:
    report = await here.run("first", await asyncio.to_thread(request_of, lingering))
    assert here.begun == ["first"]
    assert here.lines == ["half way"]
    assert report.hops == ("node", "node")
    result = await asyncio.to_thread(here.result("first").read_bytes)
    assert report.result_bytes == len(result)
    assert loaded(result).keys() == {"early", "logits"}
    assert here.result("first").stat().st_mode & 0o777 == 0o600


async def test_errors_come_back_as_they_were_raised(here: Here) -> None:
    with pytest.raises(JobFailed) as failed:
        await here.run("broken", b"no request")
    assert failed.value.took["hops"] == ["node", "node"]
    assert failed.value.took["peak_memory_bytes"] > 1 << 20
    with pytest.raises(ModelNotFound, match="no files of 'other'"):
        await here.run("other", b"", model_id="other")
    assert here.jobs.why_not(LLAMA) is None
    assert "llama" in str(here.jobs.why_not(ModelId("other")))


async def test_a_cancelled_job_is_gone_within_a_second(here: Here) -> None:
    request = await asyncio.to_thread(request_of, lingering)
    job = asyncio.create_task(here.run("cancelled", request))
    await here.said("half way")
    assert here.jobs.pid is not None
    before = await asyncio.to_thread(_childless, psutil.Process(here.jobs.pid))
    assert len(before) <= 2, "the job, and who may stand by for the next"
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    # No second later: who cancelled it may take away the files that it wrote.
    gone, left = await asyncio.to_thread(psutil.wait_procs, list(before), 0)
    assert len(gone) == 1
    assert len(left) == len(before) - 1
    assert not here.result("cancelled").exists()


def _childless(process: psutil.Process) -> set[psutil.Process]:
    """Its descendants that began no process of their own."""
    return {each for each in process.children(recursive=True) if not each.children()}


async def test_a_job_survives_the_death_of_the_jobs_process(here: Here) -> None:
    request = await asyncio.to_thread(request_of, lingering)
    job = asyncio.create_task(here.run("survivor", request))
    await here.said("half way")
    assert here.jobs.pid is not None
    first = here.jobs.pid
    family = await asyncio.to_thread(lambda: psutil.Process(first).children(recursive=True))
    os.kill(first, signal.SIGKILL)
    report = await job
    assert report.result_bytes > 0
    assert here.lines[0] == here.lines[2] == "half way"
    assert "run again" in here.lines[1]
    assert here.jobs.pid != first
    _, left = await asyncio.to_thread(psutil.wait_procs, family, 5)
    assert not left  # neither the warmed parent nor the job outlived it


class OfAnotherVersion(ProcessMessage, frozen=True):
    """What the process finds no meaning in, as one whose package was updated meanwhile."""


async def test_a_job_whose_process_ends_itself_each_time_is_told_why_and_what_to_do(
    here: Here,
) -> None:
    job = asyncio.create_task(here.run("misread", await asyncio.to_thread(request_of, lingering)))
    for _ in range(2):
        await here.said("half way")
        here.lines.clear()
        here.jobs.send(OfAnotherVersion())
    with pytest.raises(JobFailed, match="is not understood") as failed:
        await job
    assert "Start the daemon anew" in str(failed.value.fix)


async def test_a_jobs_process_that_stands_still_is_replaced_and_its_job_run_again(
    here: Here, tmp_path: Path
) -> None:
    request = await asyncio.to_thread(request_of, lingering)
    other = Here(here.host, tmp_path, SilenceLimits(suspect_s=2.0, replace_s=4.0))
    try:
        job = asyncio.create_task(other.run("stuck", request))
        await other.said("half way")
        stuck = other.jobs.pid
        assert stuck is not None
        os.kill(stuck, signal.SIGSTOP)
        report = await job
        assert report.result_bytes > 0
        assert other.lines[0] == other.lines[2] == "half way"
        assert other.jobs.pid != stuck
        assert other.jobs.ending is not None
        assert other.jobs.ending.hung
    finally:
        await other.jobs.stop()


async def test_a_job_that_is_run_again_asks_who_serves_its_model_by_then(
    here: Here, tmp_path: Path
) -> None:
    request = await asyncio.to_thread(request_of, lingering)
    everybody = here.routable(LLAMA)
    whole = LayerRange(0, 6)
    async with shards(["llama"], tmp_path, [whole]) as doomed:
        alone = served(doomed, family="llama", spans=[whole])
        here.offers = alone
        job = asyncio.create_task(here.run("moved", request))
        await here.said("half way")
        here.offers = (*alone, *everybody)
        assert doomed.pid is not None
        os.kill(doomed.pid, signal.SIGKILL)
        report = await job
    assert report.hops == ("node", "node")


async def test_nobody_serves_the_model(here: Here) -> None:
    here.offers = ()
    with pytest.raises(NoRoute):
        await here.run("nobody", await asyncio.to_thread(request_of, lingering))
    assert here.begun == []


async def test_layers_that_stay_at_home_for_chat_stay_there_for_jobs() -> None:
    limits = RouteLimits(4, allow_self_as_first=False, keep_first=2, keep_last=1)
    rules = limits.cover_rules(RoutedModel(ModelId("m"), "", 8))
    assert rules.home == (LayerRange(0, 2), LayerRange(7, 8))
    assert [layer for layer in range(8) if rules.keeps(layer)] == [0, 1, 7]
