"""Jobs from an nnsight client's payload to its result: real shards, real jails, no HTTP."""

from __future__ import annotations

import asyncio
import io
import tempfile
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import zstandard
from nnsight.modeling.huggingface import _ID_CACHE
from nnsight.modeling.transformers import TransformersModel
from nnsight.ndif import pull_env
from nnsight.schema.request import RequestModel
from nnsight.tracing.backend import Backend
from nnsight.tracing.tracer import Tracer, save
from nnsight.tracing.util import push

from mesh.discovery.advertisement import Advertisement
from mesh.interventions.jail.limits import JobLimits
from mesh.interventions.jobs.routes import Routes
from mesh.interventions.jobs.runner import JailRunner
from mesh.interventions.jobs.types import JobHearer, JobPlace, JobReport, JobSpec, RunnerSettings
from mesh.pipeline.commands import Offer
from mesh.pipeline.dialing import secured
from mesh.pipeline.links import HopLinks
from mesh.routing.cover import CoverRules
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import LayerRange, ModelId
from tests import secure
from tests.interventions.worlds import checkpoint

ROUTES: dict[int, tuple[LayerRange, ...]] = {
    1: (LayerRange(0, 6),),
    2: (LayerRange(0, 4), LayerRange(1, 6)),
    3: (LayerRange(0, 2), LayerRange(1, 4), LayerRange(4, 6)),
}
"""The shards that a job may use, by how many hops its route then has; overlapping ones."""

HELD = sorted({span for spans in ROUTES.values() for span in spans}, key=str)
_CACHE = tempfile.TemporaryDirectory(prefix="hearthnet-cache-")
LIMITS = JobLimits(wall_s=60.0, cpu_s=60, memory_bytes=1 << 30, result_bytes=64 << 20)


@asynccontextmanager
async def shards(
    families: Sequence[str], cache_dir: Path, held: Sequence[LayerRange] = HELD, **more: Any
) -> AsyncIterator[ShardSupervisor]:
    """A shard process that serves these ranges of these families; model ids are family names."""
    directories = [await asyncio.to_thread(lambda f=f: checkpoint(f).directory) for f in families]
    loads = (
        {"directory": str(directory), "model_id": family, "layers": str(span), "dtype": "fp32",
         "advertise_host": "127.0.0.1", **more}
        for family, directory in zip(families, directories, strict=True)
        for span in held
    )  # fmt: skip
    async with secure.hosting(cache_dir, *loads) as host:
        yield host


def served(*hosts: ShardSupervisor, family: str, spans: Sequence[LayerRange]) -> tuple[Offer, ...]:
    """What a daemon knows of these shards."""
    return tuple(
        Offer(Advertisement(hosted.descriptor, hosted.health))
        for host in hosts
        for hosted in host.shards.values()
        if hosted.descriptor.model_id == family and hosted.descriptor.layers in spans
    )


@dataclass
class Bench:
    """A runner and what a test wants to know of its jobs."""

    runner: JailRunner
    hosts: tuple[ShardSupervisor, ...]
    directory: Path
    lines: list[str] = field(default_factory=list)
    reports: list[JobReport] = field(default_factory=list)
    trusted: bool = True
    jobs: int = 0
    spoke: asyncio.Event = field(default_factory=asyncio.Event)
    newest: Sequence[Offer] = ()
    """Who serves the model when a job is run again; empty: whoever did at its start."""

    def on_text(self, text: str) -> None:
        self.lines += text.split("\n")
        self.spoke.set()

    async def said(self, line: str) -> None:
        """Until a job has printed `line`."""
        async with asyncio.timeout(60):
            while line not in self.lines:
                self.spoke.clear()
                await self.spoke.wait()

    def set(self, **changes: Any) -> None:
        """Change the runner's settings."""
        self.runner.settings = replace(self.runner.settings, **changes)

    def place(self, family: str, hops: int) -> JobPlace:
        shards = served(*self.hosts, family=family, spans=ROUTES[hops])
        model = checkpoint(family)
        return JobPlace(ModelId(family), model.weights_sha256, Path(model.directory), shards)

    async def run(self, request: bytes, place: JobPlace, **more: Any) -> bytes:
        """The result's bytes. Raises what `JailRunner.run` raises."""
        self.jobs += 1
        payload = self.directory / f"payload-{self.jobs}"
        result = self.directory / f"result-{self.jobs}"
        await asyncio.to_thread(payload.write_bytes, request)
        fields = {"compress": True, "env": {}, "trusted": self.trusted, **more}
        spec = JobSpec(f"job-{self.jobs}", place.model_id, payload, result, **fields)
        newest = self.newest or place.shards

        async def ask() -> Sequence[Offer]:
            return newest

        hearer = JobHearer(lambda: None, self.on_text)
        self.reports.append(await self.runner.run(spec, place, hearer, ask))
        return await asyncio.to_thread(result.read_bytes)


@asynccontextmanager
async def bench(
    *hosts: ShardSupervisor, limits: JobLimits = LIMITS, max_running: int = 4
) -> AsyncIterator[Bench]:
    """A runner over the shards of these processes."""
    directory = tempfile.TemporaryDirectory(prefix="hearthnet-jobs-")
    routes = Routes(
        secure.KEY.node_id, HopLinks(secured(secure.HELLO, secure.TLS)), lambda _: CoverRules()
    )
    settings = RunnerSettings(max_running, 600.0, Path(_CACHE.name), limits)
    runner = JailRunner(routes, settings)
    try:
        yield Bench(runner, hosts, Path(directory.name))
    finally:
        await runner.close()
        directory.cleanup()


def loaded(result: bytes, *, compress: bool = True) -> dict[str, Any]:
    """A result as the client opens it."""
    if compress:
        result = zstandard.ZstdDecompressor().decompressobj().decompress(result)
    saved: dict[str, Any] = torch.load(io.BytesIO(result), weights_only=False)
    return saved


# An unmodified client


Submit = Callable[[bytes, dict[str, Any]], dict[str, Any]]
"""Runs a request's bytes with the client's `env`; returns what was saved."""


@cache
def client(family: str) -> TransformersModel:
    """What a researcher has: the model on the meta device."""
    directory = str(checkpoint(family).directory)
    _ID_CACHE[directory] = directory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformersModel(directory, task="text-generation")


class Submitting(Backend):
    """Does what the client's own backend does, with `submit` in the place of HTTP."""

    def __init__(self, model: TransformersModel, submit: Submit, *, compress: bool) -> None:
        self._model = model
        self._submit = submit
        self._compress = compress

    def __call__(self, tracer: Tracer) -> None:
        pull_env()
        request = RequestModel.serialize(tracer, compress=self._compress)
        result = self._submit(request, self._model._remoteable_get_env())
        for value in result.values():
            save(value)
        push(tracer.info.frame, result)


@contextmanager
def submitting(submit: Submit, *, compress: bool = True) -> Iterator[None]:
    """Meanwhile every trace of a client's model is submitted."""

    def backend(model: TransformersModel) -> dict[str, Any]:
        return {"backend": Submitting(model, submit, compress=compress)}

    with tracing_with(backend):
        yield


@contextmanager
def tracing_with(options: Callable[[TransformersModel], dict[str, Any]]) -> Iterator[None]:
    """Meanwhile every trace and session of a client's model is given these keywords as well."""
    original = {name: getattr(TransformersModel, name) for name in ("trace", "session")}

    def patched(name: str) -> Callable[..., Any]:
        def begin(self: TransformersModel, *args: Any, **kwargs: Any) -> Any:
            more = {} if self.dispatched else options(self)
            return original[name](self, *args, **{**kwargs, **more})

        return begin

    for name in original:
        setattr(TransformersModel, name, patched(name))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in original:
            delattr(TransformersModel, name)


def request_of(
    work: Callable[[TransformersModel], Any], family: str = "llama", *, compress: bool = True
) -> bytes:
    """What a client would post for the one trace that `work` has."""
    requests: list[bytes] = []

    def keep(request: bytes, _env: dict[str, Any]) -> dict[str, Any]:
        requests.append(request)
        return {}

    with submitting(keep, compress=compress):
        work(client(family))
    (request,) = requests
    return request


async def as_client(
    here: Bench, family: str, hops: int, work: Callable[[TransformersModel], Any]
) -> Any:
    """Run client code, whose traces become jobs, in a thread."""
    loop = asyncio.get_running_loop()
    place = here.place(family, hops)

    def submit(request: bytes, env: dict[str, Any]) -> dict[str, Any]:
        running = asyncio.run_coroutine_threadsafe(here.run(request, place, env=env), loop)
        return loaded(running.result(120))

    def in_thread() -> Any:
        torch.set_num_threads(1)
        with submitting(submit):
            return work(client(family))

    return await asyncio.to_thread(in_thread)
