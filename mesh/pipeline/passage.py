"""Takes tokens through the hops of one session to logits, whatever happens to a hop.

Feeds and waits; `mesh.pipeline.recovery` repairs. The caller only sees notices of it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import torch

from mesh.pipeline.chain import HopLost
from mesh.pipeline.model import AskerModel
from mesh.pipeline.noise import RowNoise
from mesh.pipeline.recovery import Recovery, chunk_rows
from mesh.pipeline.sessions import GenerationSession
from mesh.types import HopTiming, RouteHop, StreamFrame
from mesh.wire.activations import to_torch, to_wire
from mesh.wire.messages import WireTensor


class Passage:
    """Moves one session forward; `logits` (vocab,) belong to the last token fed.

    `noise` is added to what leaves here, see `mesh.pipeline.noise`.
    """

    def __init__(
        self,
        model: AskerModel,
        session: GenerationSession,
        recovery: Recovery,
        *,
        noise: float = 0.0,
    ) -> None:
        self.logits = torch.empty(0)
        self._ends = model.ends
        self._hidden_size = model.hidden_size
        self._session = session
        self._widened_before = session.chain.widened
        self._recovery = recovery
        self._noise = RowNoise(noise)
        self._row = WireTensor("fp32", (1, 0, model.hidden_size), b"")

    @property
    def route(self) -> tuple[RouteHop, ...]:
        """The hops as they are now."""
        return self._session.pipeline.hops

    @property
    def failovers(self) -> int:
        """How many hops were replaced so far."""
        return self._session.failovers

    @property
    def fallback(self) -> bool:
        """Whether the generation went on at home."""
        return self._session.fallback

    @property
    def widened(self) -> int:
        """How many tensors overflowed the wire dtype so far."""
        return self._session.chain.widened - self._widened_before

    def timings(self) -> tuple[HopTiming, ...]:
        """Percentiles per hop."""
        return tuple(station.timing() for station in self._session.chain.stations)

    async def advance(self, ids: Sequence[int]) -> AsyncGenerator[StreamFrame, None]:
        """Feed `ids` after what the session holds and set `logits`; yields notices only.

        Chunks follow each other through the hops. At most one more than there are hops is on its
        way at once, so that every hop is busy and memory stays bounded.
        """
        session = self._session
        rows = chunk_rows(self._hidden_size)
        async for notice in self._recovery.leave_draining_hops():
            yield notice
        for start in range(0, len(ids), rows):
            chunk = list(ids[start : start + rows])
            hidden = self._ends.embed(torch.tensor([chunk]), len(session.token_ids))
            noisy = self._noise.add(hidden)
            session.chain.feed(to_wire(noisy, session.chain.terms.wire_dtype))
            session.token_ids += chunk
            under_way = rows * (len(session.chain.stations) + 1)
            if start + rows < len(ids) and len(session.token_ids) > under_way:
                async for notice in self._reach(len(session.token_ids) - under_way):
                    yield notice
        async for notice in self._reach(len(session.token_ids)):
            yield notice
        self.logits = self._ends.logits(to_torch(self._row))[0, -1]

    async def _reach(self, position: int) -> AsyncGenerator[StreamFrame, None]:
        """Wait for a position to come out of the last hop, recovering as often as it takes."""
        while True:
            try:
                self._row = await self._session.chain.output(position)
            except HopLost as lost:
                async for notice in self._recovery.recover(lost):
                    yield notice
            else:
                return
