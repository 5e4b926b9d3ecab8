"""A checkpoint spread over hops of a real shard process, asked over real loopback sockets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mesh.clock import SystemClock
from mesh.pipeline import wire_dtype
from mesh.pipeline.checkpoint import load_asker
from mesh.pipeline.commands import AskerOptions, Thin
from mesh.pipeline.drafting import WORTH
from mesh.pipeline.generation import LoopSettings, PipelineOrchestrator
from mesh.pipeline.hop import Patience
from mesh.pipeline.links import HopLinks
from mesh.pipeline.model import AskerModel
from mesh.pipeline.prefill import TokenFeed
from mesh.pipeline.sessions import Sessions
from mesh.pipeline.terms import SessionTerms
from mesh.pipeline.watch.oversight import Oversight
from mesh.routing.cover import Candidate, CoverRules
from mesh.routing.router import ShardRouter
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import (
    Done,
    GenerationRequest,
    LayerRange,
    ModelId,
    SamplingParams,
    ShardDescriptor,
    StreamFrame,
    WireDtype,
)
from tests import secure
from tests.pipeline.toy_mesh import plainly

MODEL = ModelId("spread")
THIN: tuple[Thin, ...] = ("never", "always")


def split(total: int, parts: int) -> list[LayerRange]:
    """`total` layers in `parts` ranges of uneven length."""
    cuts = [round(total * (i / parts) ** 1.2) for i in range(parts + 1)]
    return [LayerRange(a, b) for a, b in itertools.pairwise(cuts)]


class Spread:
    """One model over one real shard process; `use` chooses which of its shards a route may take.

    The process may hold other models' shards as well.
    """

    def __init__(self, model: AskerModel, host: ShardSupervisor, model_id: ModelId = MODEL) -> None:
        self.model = model
        self.model_id = model_id
        self.host = host
        self.draft_worth = WORTH
        """How many times as fast a step with a draft must promise to be."""
        self._allowed: list[ShardDescriptor] = []
        self._router = ShardRouter(self, CoverRules(remote_ends=model.ends is None))
        self._sessions = Sessions(
            HopLinks(secure.dial),
            self._router,
            SystemClock(),
            Patience(),
            Oversight(SystemClock(), ceiling_s=30.0),
        )

    async def use(self, layers: Sequence[LayerRange]) -> None:
        """Route over exactly these shards from now on; nothing kept of earlier requests is used."""
        await self._sessions.close()
        wanted = {str(span) for span in layers}
        self._allowed = [
            hosted.descriptor
            for hosted in self.host.shards.values()
            if hosted.descriptor.model_id == self.model_id
            and str(hosted.descriptor.layers) in wanted
        ]
        assert len(self._allowed) == len(layers)

    def offer(self, shard: ShardDescriptor) -> None:
        """Let routes take this one as well."""
        self._allowed.append(shard)

    def candidates(self, model_id: ModelId) -> list[Candidate]:
        return [Candidate(descriptor, 0) for descriptor in self._allowed]

    def chat(
        self, request: GenerationRequest, wire: WireDtype = WireDtype.FP32
    ) -> AsyncIterator[StreamFrame]:
        """The frames of a request."""
        orchestrator = PipelineOrchestrator(
            self.model, self._sessions, self._router, plainly(self.model, wire),
            settings=LoopSettings(draft_worth=self.draft_worth),
        )  # fmt: skip
        return orchestrator.chat(replace(request, model=self.model_id))

    async def generate(self, request: GenerationRequest, wire: WireDtype = WireDtype.FP32) -> Done:
        """Run a request to its end."""
        done: Done | None = None
        async for frame in self.chat(request, wire):
            if isinstance(frame, Done):
                done = frame
        assert done is not None
        return done

    async def probe(self) -> wire_dtype.WireVerdict:
        """What the probe says of the model on these hops."""
        return await wire_dtype.probe(self.model, self._sessions, self._router)

    async def logits(self, prompt: list[int], forced: list[int]) -> torch.Tensor:
        """(len(forced), vocab) logits before each of `forced`, fed whatever the model would say."""
        terms = SessionTerms(
            self.model_id,
            self.model.weights_sha256,
            len(prompt) + len(forced),
            WireDtype.FP32,
            remote_ends=self.model.remote_ends(),
        )
        session = await self._sessions.open_fresh(terms, self.model.total_layers)
        feed = TokenFeed(self.model, session)
        rows = []
        for ids in [prompt, *([token] for token in forced[:-1])]:
            async for notice in feed.advance(ids):
                raise AssertionError(f"a hop was lost: {notice}")
            rows.append(await feed.logits())
        self._sessions.release(session, keep=False)
        return torch.stack(rows)

    async def close(self) -> None:
        await self._sessions.close()


@asynccontextmanager
async def spread(
    directory: Path,
    layers: Sequence[LayerRange],
    cache_dir: Path,
    **shard: Any,
) -> AsyncIterator[Spread]:
    """Serve these layer ranges of the checkpoint in a shard process of their own."""
    loads = loads_of(directory, layers, **shard)
    start = {"session_lease_s": shard["session_lease_s"]} if "session_lease_s" in shard else {}
    async with (
        secure.hosting(cache_dir, *loads, **start) as host,
        asking(host, directory, MODEL, cache_dir) as mesh,
    ):
        yield mesh


def loads_of(
    directory: Path, layers: Sequence[LayerRange], model_id: ModelId = MODEL, **shard: Any
) -> list[dict[str, Any]]:
    """What makes a shard process load these layer ranges of a checkpoint."""
    return [
        {"directory": str(directory), "model_id": model_id, "layers": str(span), "dtype": "fp32",
         "advertise_host": "127.0.0.1", **shard}
        for span in sorted(set(layers))
    ]  # fmt: skip


@asynccontextmanager
async def asking(
    host: ShardSupervisor,
    directory: Path,
    model_id: ModelId,
    cache_dir: Path,
    *,
    thin: Thin = "auto",
) -> AsyncIterator[Spread]:
    """Ask a model that a running shard process holds in parts."""
    options = AskerOptions("fp32", "cpu", 1, cache_dir, thin=thin)
    model, _ = await asyncio.to_thread(load_asker, directory, model_id, options)
    mesh = Spread(model, host, model_id)
    yield mesh
    await mesh.close()


@asynccontextmanager
async def asking_both_ways(
    directory: Path, ways: Iterable[Sequence[LayerRange]], model_id: ModelId, cache_dir: Path
) -> AsyncIterator[dict[Thin, Spread]]:
    """Serve the layers of all these ways in one shard process, for who holds the model's ends and
    for who does not."""
    loads = loads_of(directory, [span for way in ways for span in way], model_id)
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(secure.hosting(cache_dir, *loads))
        made: dict[Thin, Spread] = {}
        for thin in THIN:
            asker = asking(host, directory, model_id, cache_dir, thin=thin)
            made[thin] = await stack.enter_async_context(asker)
        yield made


def hugging_face(directory: Path, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Greedy ids and (count, vocab) logits of the whole model on one machine, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # ours ignores it as well
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    ids = out.sequences[0, len(prompt) :].tolist()
    return ids, torch.stack([step[0].float() for step in out.logits])


def greedy(prompt: list[int], count: int, request_id: str = "r") -> GenerationRequest:
    return GenerationRequest(
        request_id,
        MODEL,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=count, ignore_eos=True),
    )
