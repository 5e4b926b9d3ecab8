"""A real API on a real socket with a real queue; only the jobs themselves follow a script.

What a job does is told by the trace's own source: a line ``script = "sleep"`` and the like. The
payload is never unpickled here; the words are looked for in its bytes.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import zstandard

from mesh.api.app import create_app
from mesh.api.ndif.results import ResultUrls, load_key
from mesh.api.ndif.routes import JobsApi
from mesh.api.server import ApiServer, serve_api
from mesh.api.services import ApiSettings
from mesh.api.tls import ApiTls
from mesh.clock import Clock, SystemClock
from mesh.errors import Busy, JobFailed, MeshError, NoRoute
from mesh.identity.api_keys import ApiKeys
from mesh.interventions.jobs.queue.service import JobQueue
from mesh.interventions.jobs.queue.spool import Spool
from mesh.interventions.jobs.queue.types import QueueSettings
from mesh.interventions.jobs.types import JobHearer, JobReport, JobSpec
from mesh.models.builtin import checkpoint_dir
from mesh.types import BringingUp, ModelId
from tests.fakes import ScriptedGenerations, ScriptedView

MODEL = ModelId("builtin")
REPORT = JobReport(0, 0.25, 0.125, 4096, ("attic", "kitchen"))
TRACEBACK = "Traceback (most recent call last):\n  x = 1 / 0\n"
_WORDS = re.compile(rb"script = '([\w ]+)'")


class ScriptedRunner:
    """Runs what the payload's words say; remembers what it was given."""

    def __init__(self) -> None:
        self.specs: list[JobSpec] = []
        self.words: list[str] = []
        self.began: asyncio.Queue[str] = asyncio.Queue()
        self.proceed = asyncio.Event()
        self.running = 0
        self.most_running = 0
        self.ended_by_cancel: list[str] = []
        self.obstacle: str | None = None
        self.coming: BringingUp | MeshError | None = None
        self.woken: list[bool] = []
        self.refusals = 0
        self.losses = 0
        self.is_full: Callable[[], bool] = lambda: False
        self.refused = 0

    def why_not(self, model_id: ModelId) -> str | None:
        return self.obstacle

    async def on_its_way(self, model_id: ModelId, *, may_wake: bool) -> BringingUp | None:
        self.woken.append(may_wake)
        if isinstance(self.coming, MeshError):
            raise self.coming
        return self.coming

    async def run(self, spec: JobSpec, hearer: JobHearer) -> JobReport:
        payload = await asyncio.to_thread(spec.payload.read_bytes)
        words = said_in(payload, compress=spec.compress)
        if self.refusals:
            self.refusals -= 1
            raise (Busy if self.refusals % 2 else NoRoute)("Layers 3-5 are missing.", fix="Wait.")
        if self.is_full():
            self.refused += 1
            raise Busy("No shard has room for a job.", fix="Wait.")
        hearer.begins()
        self.specs.append(spec)
        self.words.append(words)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.began.put_nowait(spec.job_id)
        try:
            if words == "lose a hop" and self.losses:
                self.losses -= 1
                raise NoRoute("no node serves layers 3-5.", fix="Wait.")
            value = await self._play(words, hearer.prints)
        except asyncio.CancelledError:
            self.ended_by_cancel.append(spec.job_id)
            raise
        finally:
            self.running -= 1
        result = saved({"value": value, "words": words}, compress=spec.compress)
        await asyncio.to_thread(spec.result.write_bytes, result)
        return replace(REPORT, result_bytes=len(result))

    async def _play(self, words: str, on_text: Callable[[str], None]) -> Any:
        verb, _, rest = words.partition(" ")
        match verb:
            case "wait":
                await self.proceed.wait()
            case "print":
                for number in range(int(rest)):
                    on_text(f"line {number}")
            case "fail":
                took = {**asdict(REPORT), "hops": list(REPORT.hops)}
                raise JobFailed(f"{TRACEBACK}ZeroDivisionError: no", fix="", took=took)
            case "break":
                raise ZeroDivisionError("a bug of ours")
            case "big":
                return torch.arange(int(rest), dtype=torch.float32)
        return torch.ones(2, 3)


def said_in(payload: bytes, *, compress: bool) -> str:
    """The words that a trace's source carries."""
    if compress:
        payload = zstandard.ZstdDecompressor().decompress(payload, max_output_size=64 << 20)
    match = _WORDS.search(payload)
    return match[1].decode() if match else ""


def saved(values: dict[str, Any], *, compress: bool) -> bytes:
    """What a job leaves: ``torch.save`` of names and values."""
    file = io.BytesIO()
    torch.save(values, file)
    return zstandard.ZstdCompressor(3).compress(file.getvalue()) if compress else file.getvalue()


class OwnView(ScriptedView):
    """A node that holds the built-in model as a whole."""

    def models(self) -> list[dict[str, Any]]:
        row = {"id": MODEL, "total_layers": 6, "runnable": True, "missing": [], "local": True}
        more = {"level": "HOT", "context": 512, "nodes": ["here"]}
        return [{**row, **more, "directory": str(checkpoint_dir())}]


@dataclass
class Node:
    """The parts of a running API."""

    root: Path
    settings: QueueSettings = field(default_factory=QueueSettings)
    api: ApiSettings = field(default_factory=ApiSettings)
    disk_bytes: int = 1 << 30
    clock: Clock = field(default_factory=SystemClock)
    runner: ScriptedRunner = field(default_factory=ScriptedRunner)
    view: ScriptedView = field(default_factory=OwnView)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    queue: JobQueue = field(init=False)
    keys: ApiKeys = field(init=False)
    tls: ApiTls | None = None
    urls: ResultUrls = field(init=False)
    server: ApiServer = field(init=False)

    @property
    def url(self) -> str:
        return self.server.url()

    async def start(self) -> None:
        spool = Spool(self.root / "jobs", self.disk_bytes)
        self.queue = JobQueue(
            self.runner,
            spool,
            self.settings,
            self.clock,
            lambda kind, fields: self.events.append((kind, fields)),
        )
        await self.queue.start()
        key = await asyncio.to_thread(load_key, spool.root / "urls.key")
        self.keys = await asyncio.to_thread(ApiKeys.load, self.root / "api-keys.json")
        self.urls = ResultUrls(key, self.clock)
        app = create_app(
            ScriptedGenerations(),
            self.view,
            self.api,
            api_keys=self.keys,
            jobs=JobsApi(self.queue, self.urls),
        )
        self.server = await serve_api(app, "127.0.0.1", 0, self.tls)

    async def stop(self, grace_s: float = 0.0) -> None:
        await self.queue.stop(grace_s)
        await self.server.close(1.0)


@asynccontextmanager
async def serving(root: Path, **parts: Any) -> AsyncIterator[Node]:
    """Run a node's API on a free loopback port until the block is left."""
    node = Node(root, **parts)
    await node.start()
    try:
        yield node
    finally:
        node.runner.proceed.set()
        await node.stop()


def with_key(key: str) -> ApiSettings:
    """An API that needs keys, with the owner's."""
    return replace(ApiSettings(), api_key=key, keyless=False)
