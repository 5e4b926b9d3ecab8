"""Takes tokens through the hops of one session to logits: a prompt in chunks, an answer row by row.

Feeds and waits; `mesh.pipeline.failover` repairs. The caller only sees notices of it.

Where `noise` is asked for, it is added to what goes into the first layer, against hosts that read
the prompt out of it; what that costs and what it does not hide is in docs/explanation/privacy.md.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import AsyncGenerator, Sequence

import numpy as np
import torch

from mesh.models.candidates import Candidates
from mesh.pipeline.failover import NO_ROOM, Failover
from mesh.pipeline.history import chunk_rows
from mesh.pipeline.model import AskerModel
from mesh.pipeline.route import READABLE, HopLost
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
        self._rows = chunk_rows(model.row_size)
        self._session = session
        self._failover = failover
        self._noise = RowNoise(noise)

    async def logits(self) -> torch.Tensor:
        """(vocab,) of the token behind the last one fed. Runs the head: read it once. Raises
        as `advance` where a hop runs it."""
        last = self.length - 1
        if self._model.ends is None:
            return await self.row(last, [])
        return self._model.ends.logits(self.rows(last, last + 1))[0, -1]

    @property
    def length(self) -> int:
        """How many tokens were fed."""
        return len(self._session.token_ids)

    @property
    def limit(self) -> int:
        """How many tokens the session may have."""
        return self._session.route.terms.limit

    def fed(self, position: int) -> int | None:
        """The token that was fed for `position`; None where none was."""
        token_ids = self._session.token_ids
        return token_ids[position] if position < len(token_ids) else None

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """(1, stop - start, hidden): what the last hop made of these tokens, fed together."""
        return to_torch(self._session.route.rows(start, stop))

    @property
    def has_candidates(self) -> bool:
        """Whether a hop runs the head."""
        ends = self._session.route.terms.remote_ends
        return ends is not None and ends.candidates > 0

    def candidates(self, start: int, stop: int) -> list[Candidates]:
        """The same rows where a hop runs the head: what may follow each of them."""
        said = top_from_wire(self._session.route.rows(start, stop))
        vocab = self._model.vocab_size
        return [
            Candidates(row["ids"].astype(np.int64), row["logits"], float(row["total"]), vocab)
            for row in said
        ]

    async def row(self, position: int, notices: list[StreamFrame]) -> torch.Tensor:
        """(vocab,) all logits of one of those rows, fp32, while nothing else is under way;
        `notices` get what happens meanwhile.

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
                notices.extend([notice async for notice in self.reach(self.length)])

    def keep(self, position: int) -> None:
        """Forget what was fed from `position` on."""
        if position < self.length:
            self._session.cut(position)

    async def advance(self, ids: Sequence[int]) -> AsyncGenerator[StreamFrame, None]:
        """Feed `ids` after what the session holds, until their last row is back; yields notices.

        Raises HopLost without a failover, and what `Failover.recover` raises with one.
        """
        async for notice in self.feed(ids):
            yield notice
        async for notice in self.reach(self.length):
            yield notice

    async def feed(self, ids: Sequence[int]) -> AsyncGenerator[StreamFrame, None]:
        """Feed `ids` after what the session holds; `reach` waits for the last of them.

        Chunks follow each other through the hops. At most one more than there are hops is on its
        way at once, so that every hop is busy and memory stays bounded. Yields and raises as
        `advance`.
        """
        rows = self._rows
        if self._failover is not None:
            async for notice in self._failover.leave_draining_hops():
                yield notice
        for start in range(0, len(ids), rows):
            self.follow(list(ids[start : start + rows]))
            behind = rows * (len(self._session.route.hops) + 1)
            if start + rows < len(ids) and self.length > behind:
                async for notice in self.reach(self.length - behind):
                    yield notice

    async def read(self, ids: Sequence[int]) -> AsyncGenerator[StreamFrame | range, None]:
        """Feed `ids` for who reads all their rows: beside notices, the positions of each chunk once
        its rows, or candidates, are here, until the next is asked for. Raises as `advance`."""
        if self._failover is not None:
            async for notice in self._failover.leave_draining_hops():
                yield notice
        chunks = deque(list(ids[at : at + self._rows]) for at in range(0, len(ids), self._rows))
        under_way: deque[range] = deque()
        while chunks or under_way:
            # A hop that runs the head gives all logits of a row of what it answered last.
            most = 1 if self.has_candidates else len(self._session.route.hops) + 1
            while chunks and len(under_way) < min(most, READABLE):
                first = self.length
                self.follow(chunks.popleft())
                under_way.append(range(first, self.length))
            async for notice in self.reach(under_way[0].stop):
                yield notice
            yield under_way.popleft()

    def follow(self, ids: list[int]) -> None:
        """Feed so few that they are one chunk, whatever is under way."""
        self._session.route.feed(self._input(ids, self.length))
        self._session.token_ids += ids

    def _input(self, ids: list[int], position: int) -> WireTensor:
        """What the first hop is given for these tokens."""
        if self._model.ends is None:
            return ids_to_wire(ids)
        hidden = self._model.ends.embed(torch.tensor([ids]), position)
        return to_wire(self._noise.add(hidden), self._session.route.terms.wire_dtype)

    async def reach(
        self, position: int, spare: int | None = None
    ) -> AsyncGenerator[StreamFrame, None]:
        """Wait until all before `position` has come out of the last hop, recovering as often as it
        takes. With a `spare`, the last so many of these tokens and all that follow are forgotten
        where a hop has no room for them: it goes on without. Yields and raises as `advance`."""
        while True:
            try:
                await self._session.route.output(position)
            except HopLost as lost:
                if self._failover is None:
                    raise
                if spare is not None and isinstance(lost.error, NO_ROOM):
                    position, spare = position - spare, None
                    if position < self.length and self._goes_on_without(position):
                        continue
                async for notice in self._failover.recover(lost):
                    yield notice
            else:
                return

    def _goes_on_without(self, position: int) -> bool:
        """Forget what was fed from `position` on; whether hops that had no room go on with the
        rest."""
        self.keep(position)
        full = [hop for hop in self._session.route.hops if isinstance(hop.error, NO_ROOM)]
        return all(hop.go_on(self._rows) for hop in full)
