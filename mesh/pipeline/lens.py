"""A logit lens: what each layer would have said next, were it the last one.

The text goes through the mesh one layer at a time. What a layer puts out comes here anyway, on its
way to the next; its last row goes through the final norm and the head. So the hops are asked
for what chat asks them, of every version, and learn no more than in a chat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mesh.errors import BadRequest, ContextTooLong, PipelineStalled
from mesh.pipeline.history import chunk_rows, slice_rows
from mesh.pipeline.hop import GenerationHop, Patience
from mesh.pipeline.links import HopLinks
from mesh.pipeline.model import AskerModel
from mesh.pipeline.prefill import RowNoise
from mesh.pipeline.route import FULL_DELAYS_S, HopLost, open_route, open_sessions
from mesh.pipeline.terms import SessionTerms
from mesh.pipeline.watch.oversight import Oversight
from mesh.routing.cover import ShardKey
from mesh.routing.router import ShardRouter
from mesh.types import GenerationRequest, LayerRange, RouteHop, WireDtype
from mesh.wire.activations import to_torch, to_wire
from mesh.wire.messages import WireTensor

MAX_BYTES = 1 << 30
"""All rows in fp32, once for each layer: what a lens brings here at most, and sends as well."""


@dataclass(frozen=True, slots=True)
class LensSettings:
    """`stall_s` is how long a layer may take for a chunk; `noise` as in `mesh.pipeline.prefill`."""

    stall_s: float
    noise: float = 0.0


class LogitLens:
    """Reads one model's layers."""

    def __init__(
        self,
        model: AskerModel,
        links: HopLinks,
        router: ShardRouter,
        observer: Oversight,
        patience: Patience,
        settings: LensSettings,
    ) -> None:
        self._model = model
        self._links = links
        self._router = router
        self._observer = observer
        self._patience = patience
        self._settings = settings

    async def read(
        self, request: GenerationRequest, ids: Sequence[int], top: int
    ) -> dict[str, Any]:
        """``{"prompt_tokens", "layers": [{"layer", "node", "top": [{"token", "logprob"}]}]}``: the
        `top` likeliest tokens behind the last of `ids`, after each layer, likeliest first.

        Values are those of fp32 between the hops. A layer whose node is lost is computed by another
        one. Raises ContextTooLong, BadRequest without a token, and what `open_route` raises.
        """
        model = self._model
        _ = model.own_ends  # a lens reads with the head
        self._require_fits(len(ids))
        terms = SessionTerms(
            model.model_id, model.weights_sha256, len(ids), WireDtype.FP32, request.edits
        )
        rows, layers = self._embedded(ids), list[dict[str, Any]]()
        served: list[RouteHop] = []
        before = rows  # what goes into the last layer that needs none of those before it

        def pick(refused: Collection[ShardKey]) -> tuple[RouteHop, ...]:
            left = LayerRange(len(layers), model.total_layers)
            return self._router.cover(model.model_id, model.weights_sha256, left, refused)

        async def through(hops: tuple[RouteHop, ...]) -> None:
            nonlocal rows, before
            for hop in hops:
                for layer in range(hop.layers.start, hop.layers.stop):
                    first = model.cuts.first(layer)
                    before = rows if layer == first else before
                    alone = RouteHop(hop.shard, LayerRange(first, layer + 1))
                    rows = await self._through(alone, terms, before)
                    said = self._top(rows[-1], top)
                    layers.append({"layer": layer, "node": hop.shard.node_name, "top": said})
                    served.append(alone)

        await open_route(pick, through, FULL_DELAYS_S)
        for hop in served:
            if (lie := self._observer.lie_of(hop)) is not None:
                raise lie  # found while later layers were computed from it
        return {"prompt_tokens": len(ids), "layers": layers}

    # Private

    def _require_fits(self, count: int) -> None:
        model = self._model
        if not count:
            raise BadRequest("The text has no tokens.", fix="Send some text.", param="prompt")
        most = MAX_BYTES // (4 * model.row_size * model.total_layers)
        if count > most:
            raise ContextTooLong(
                f"The text has {count} tokens; a lens over this model's {model.total_layers} layers"
                f" takes {most}, because all of them travel once for each layer.",
                fix="Shorten the text.",
                param="prompt",
            )

    def _embedded(self, ids: Sequence[int]) -> list[WireTensor]:
        count, noise = chunk_rows(self._model.row_size), RowNoise(self._settings.noise)
        chunks = [(first, ids[first : first + count]) for first in range(0, len(ids), count)]
        return [
            to_wire(
                noise.add(self._model.own_ends.embed(torch.tensor([list(chunk)]), first)),
                WireDtype.FP32,
            )
            for first, chunk in chunks
        ]

    async def _through(
        self, hop: RouteHop, terms: SessionTerms, rows: list[WireTensor]
    ) -> list[WireTensor]:
        """What one layer makes of all rows. Raises HopLost."""
        try:
            (session,) = await open_sessions(
                [hop],
                self._links,
                self._observer.claim,
                lambda hop, link, claim: GenerationHop(
                    hop, link, claim, terms, self._patience, self._observer
                ),
            )
        except HopLost as lost:
            self._observer.failed(lost.hop, lost.error)
            raise
        arrived: asyncio.Queue[WireTensor | None] = asyncio.Queue()  # one for each of `rows`
        session.on_output = lambda _, tensor: arrived.put_nowait(tensor)
        session.on_lost = lambda: arrived.put_nowait(None)
        try:
            for tensor in rows:
                session.accept(tensor)
            return [await self._next(arrived, session) for _ in rows]
        finally:
            session.close()

    async def _next(
        self, arrived: asyncio.Queue[WireTensor | None], session: GenerationHop
    ) -> WireTensor:
        try:
            async with asyncio.timeout(self._settings.stall_s):
                tensor = await arrived.get()
        except TimeoutError:
            stalled = f"{session.hop.shard.node_name} computed nothing for a lens"
            session.fail(
                PipelineStalled(f"{stalled} in {self._settings.stall_s:g} s.", fix="Ask again.")
            )
            tensor = None
        if session.error is not None or tensor is None:
            error = session.error or PipelineStalled("The layer was lost.", fix="Ask again.")
            raise HopLost(0, session.hop, error)
        return tensor

    def _top(self, rows: WireTensor, top: int) -> list[dict[str, Any]]:
        last = slice_rows(rows, rows.shape[1] - 1, rows.shape[1])
        logits = self._model.own_ends.logits(to_torch(last))[0, -1].float()
        values, tokens = logits.log_softmax(-1).topk(min(top, logits.shape[-1]))
        return [
            {
                "token": self._model.text.token_bytes(token).decode(errors="replace"),
                "logprob": value,
            }
            for token, value in zip(tokens.tolist(), values.tolist(), strict=True)
        ]
