"""The product's asker with a real tokenizer and chat template; its model says what it is told to.

Real are the engine, its loop, the sampler and the texts. The one hop gives back what it is sent,
and the head knows by the position what comes next.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from tokenizers import AddedToken

from mesh.discovery.advertisement import Advertisement
from mesh.errors import NoRoute
from mesh.models.tokenizer import Tokenizer
from mesh.pipeline.checkpoint import CheckpointText
from mesh.pipeline.commands import EngineSettings, Offer, RouteLimits
from mesh.pipeline.engine import Engine
from mesh.pipeline.model import AskerModel
from mesh.types import (
    Done,
    GenerationRequest,
    LayerRange,
    NodeId,
    RouteHop,
    ShardHealth,
    StreamFrame,
)
from mesh.wire.messages import Step, WireTensor
from tests.checkpoints import make_tokenizer
from tests.pipeline.toy_mesh import HIDDEN, MODEL, TOTAL_LAYERS, WEIGHTS, ToyEnds, ToyNetwork

VOCAB = 384
EOS = 2


def tokenizer_with(
    template: str, *, special: Sequence[str] = (), sentencepiece: bool = False
) -> Any:
    """A tokenizer of transformers with this chat template; `special` tokens make no text."""
    tokenizer = make_tokenizer.__wrapped__(VOCAB, sentencepiece=sentencepiece)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in special], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


class Script(ToyEnds):
    """Ends that say `ids` behind a prompt of `begins` tokens, then the end token."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.begins = 0
        self.ids: Sequence[int] = ()
        self.rivals = torch.zeros(vocab)
        """Logits that every row has besides; the script's token has 9."""

    def embed(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        rows = torch.zeros(1, ids.shape[1], HIDDEN)
        rows[0, :, 0] = torch.arange(position, position + ids.shape[1])
        return rows

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = self.rivals.repeat(1, hidden.shape[1], 1)
        for row, position in enumerate(hidden[0, :, 0].long().tolist()):
            said = position + 1 - self.begins
            scores[0, row, self.ids[said] if 0 <= said < len(self.ids) else EOS] = 9.0
        return scores


class ScriptedAsker:
    """An engine to ask over two hosts, as `mesh.api.services.Generations`. Call `close` at the
    end."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text = CheckpointText(Tokenizer(tokenizer, frozenset({EOS})), len(tokenizer))
        self.script = Script(len(tokenizer))
        self.requests: list[GenerationRequest] = []
        self._put: list[int] = []
        network = ToyNetwork()
        self.shards = [network.add(f"0-{TOTAL_LAYERS - 1}") for _ in range(2)]
        for shard in self.shards:
            shard.answer = _as_it_came
        model = AskerModel(
            MODEL, WEIGHTS, TOTAL_LAYERS, HIDDEN, self.script.vocab, 4096, self.script, self.text,
            head_rows=8,
        )  # fmt: skip
        settings = EngineSettings(RouteLimits(16, False), 30.0, "fp32", "", False, 99)
        self.engine = Engine(model, NodeId("asker"), settings, _nobody, _no_judge, network.dial)
        now, offers = datetime.now(UTC), []
        for shard in self.shards:
            health = ShardHealth(True, now, 1.0, 1.0, 0, 0)
            offers.append(Offer(Advertisement(shard.descriptor, health)))
        self.engine.shards.replace(offers)

    def says(self, said: str) -> None:
        """From now on the model answers so; special tokens are written as their text."""
        self.script.ids = self._tokenizer(said, add_special_tokens=False)["input_ids"]

    def dies_after(self, steps: int) -> None:
        """Whichever host answers is gone after so many more steps, once."""
        left = [steps]

        def before(step: Step) -> bool:
            left[0] -= 1
            if left[0] == 0:
                using = next(shard for shard in self.shards if shard.open_streams())
                using.kill()
            return bool(left[0])

        for shard in self.shards:
            shard.before_step = before

    def prompt(self) -> str:
        """What the last request put to the model, special tokens included."""
        text: str = self._tokenizer.decode(self._put)
        return text

    def generate(self, request: GenerationRequest) -> AsyncGenerator[StreamFrame, None]:
        self.requests.append(request)
        return self._generate(request)

    async def load(self, request: GenerationRequest) -> None:
        """It is up."""

    async def count(self, request: GenerationRequest) -> int:
        await self._read(request)
        self.requests.append(request)
        return await self.engine.count(request)

    async def lens(self, request: GenerationRequest, top: int) -> dict[str, Any]:
        return await self.engine.lens(request, top)

    async def done(self, request: GenerationRequest) -> Done:
        """The end of the answer."""
        frames = [frame async for frame in self.generate(request)]
        assert isinstance(frames[-1], Done)
        return frames[-1]

    async def close(self) -> None:
        await self.engine.close()

    async def _generate(self, request: GenerationRequest) -> AsyncGenerator[StreamFrame, None]:
        self.script.begins = len(await self._read(request))
        async for frame in self.engine.chat(request):
            yield frame

    async def _read(self, request: GenerationRequest) -> list[int]:
        self._put = await asyncio.to_thread(self.text.prompt_ids, request, None)
        return self._put


def _as_it_came(step: Step, _: WireTensor) -> WireTensor:
    return step.tensor


async def _nobody() -> Sequence[RouteHop]:
    raise NoRoute("nothing is loaded here.", fix="None.")


async def _no_judge(_: LayerRange) -> RouteHop:
    raise NoRoute("nothing is checked here.", fix="None.")
