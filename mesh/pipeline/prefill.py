"""Takes tokens through the hops of one session to logits: a prompt in chunks, an answer row by row.

Feeds and waits; `mesh.pipeline.failover` repairs. The caller only sees notices of it.

Where `noise` is asked for, it is added to what goes into the first layer, against hosts that read
the prompt out of it; what that costs and what it does not hide is in docs/explanation/privacy.md.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence

import numpy as np
import torch

from mesh.models.candidates import Candidates
from mesh.pipeline.failover import NO_ROOM, Failover
from mesh.pipeline.history import chunk_rows
from mesh.pipeline.model import AskerModel
from mesh.pipeline.route import HopLost
from mesh.pipeline.sessions import GenerationSession
from mesh.types import StreamFrame
from mesh.wire.activations import to_torch, to_wire
from mesh.wire.messages import WireTensor
from mesh.wire.token_rows import ids_to_wire, top_from_wire


class RowNoise:
    """Gaussian noise with a standard deviation of `relative` times each row's root mean square.

    Drawn from a generator that nobody else can seed; 0 adds nothing and draws nothing.
    """

    def __init__(self, relative: float) -> None:
        self._relative = relative
        self._generator = torch.Generator().manual_seed(secrets.randbits(63))

    def add(self, hidden: torch.Tensor) -> torch.Tensor:
        """(1, rows, hidden) of any float dtype; the same shape and dtype."""
        if not self._relative:
            return hidden
        rows = hidden.float()
        scale = self._relative * rows.square().mean(dim=-1, keepdim=True).sqrt()
        drawn = torch.randn(rows.shape, generator=self._generator).to(rows.device)
        return (rows + scale * drawn).to(hidden.dtype)


class TokenFeed:
    """Moves one session forward. Without a `failover` a lost hop ends it.

    `noise` is added to what leaves here, see `mesh.pipeline.prefill`.
    """

    def __init__(
        self,
        model: AskerModel,
        session: GenerationSession,
        failover: Failover | None = None,
        *,
        noise: float = 0.0,
    ) -> None:
        self._model = model
        self._rows = chunk_rows(model.hidden_size)
        self._session = session
        self._failover = failover
        self._noise = RowNoise(noise)

    async def logits(self) -> torch.Tensor:
        """(vocab,) of the token behind the last one fed. Runs the head: read it once. Raises
        as `advance` where a hop runs it."""
        last = len(self._session.token_ids) - 1
        if self._model.ends is None:
            return await self.row(last, [])
        return self._model.ends.logits(self.rows_from(last))[0, -1]

    def rows_from(self, position: int) -> torch.Tensor:
        """(1, rows, hidden): what the last hop made of each token fed from `position` on, all of
        which were fed together."""
        return to_torch(self._session.route.latest(len(self._session.token_ids) - position))

    @property
    def has_candidates(self) -> bool:
        """Whether a hop runs the head."""
        return self._model.ends is None

    def candidates_from(self, position: int) -> list[Candidates]:
        """The same rows where a hop runs the head: what may follow each of them."""
        said = top_from_wire(self._session.route.latest(len(self._session.token_ids) - position))
        vocab = self._model.vocab_size
        return [
            Candidates(row["ids"].astype(np.int64), row["logits"], float(row["total"]), vocab)
            for row in said
        ]

    async def row(self, position: int, notices: list[StreamFrame]) -> torch.Tensor:
        """(vocab,) all logits of one of those rows, fp32; `notices` get what happens meanwhile.

        Raises as `advance`.
        """
        session, vocab = self._session, self._model.vocab_size
        while True:
            try:
                return to_torch(await session.route.row(position, vocab))[0, 0]
            except HopLost as lost:
                if self._failover is None:
                    raise
                notices.extend([notice async for notice in self._failover.recover(lost)])
                notices.extend([notice async for notice in self._reach(len(session.token_ids), 0)])

    def keep(self, position: int) -> None:
        """Forget what was fed from `position` on."""
        if position < len(self._session.token_ids):
            self._session.cut(position)

    async def advance(
        self, ids: Sequence[int], spare: int = 0
    ) -> AsyncGenerator[StreamFrame, None]:
        """Feed `ids` after what the session holds, until their last row is back; yields notices.

        The last `spare` of them, all of the last chunk, are left out where a hop has no room.
        Chunks follow each other through the hops. At most one more than there are hops is on its
        way at once, so that every hop is busy and memory stays bounded. Raises HopLost without a
        failover, and what `Failover.recover` raises with one.
        """
        session, rows = self._session, self._rows
        if self._failover is not None:
            async for notice in self._failover.leave_draining_hops():
                yield notice
        for start in range(0, len(ids), rows):
            chunk = list(ids[start : start + rows])
            session.route.feed(self._input(chunk, len(session.token_ids)))
            session.token_ids += chunk
            behind = 0 if start + rows >= len(ids) else rows * (len(session.route.hops) + 1)
            if len(session.token_ids) <= behind:
                continue
            async for notice in self._reach(len(session.token_ids) - behind, spare):
                yield notice

    def _input(self, ids: list[int], position: int) -> WireTensor:
        """What the first hop is given for these tokens."""
        if self._model.ends is None:
            return ids_to_wire(ids)
        hidden = self._model.ends.embed(torch.tensor([ids]), position)
        return to_wire(self._noise.add(hidden), self._session.route.terms.wire_dtype)

    async def _reach(self, position: int, spare: int) -> AsyncGenerator[StreamFrame, None]:
        """Wait for a position to come out of the last hop, recovering as often as it takes."""
        while True:
            try:
                await self._session.route.output(position)
            except HopLost as lost:
                if self._failover is None:
                    raise
                if spare and isinstance(lost.error, NO_ROOM):
                    position, spare = position - spare, 0
                    self.keep(position)
                async for notice in self._failover.recover(lost):
                    yield notice
            else:
                return
