"""The decode steps of one generation: tokens are fed, some of them guessed; the rows are read.

A step feeds the last token and a draft behind it, waits for their rows and takes the tokens that
the sampler chooses, as far as they are those that were fed. Where that pays, a second draft follows
before the first is answered: then one hop computes the second while the next one computes the
first, and on slow links both are on their way. If the first holds, and the second begins with what
was chosen behind it, the next step finds its rows on their way already; else they are forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mesh.clock import loop_time
from mesh.models.candidates import Candidates, candidates_of
from mesh.pipeline.completion import Completion
from mesh.pipeline.drafting import Drafter
from mesh.pipeline.head import OutputHead
from mesh.pipeline.model import TextReader
from mesh.pipeline.prefill import TokenFeed
from mesh.pipeline.sampler import Sampler
from mesh.types import StreamFrame, TokenDelta

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class _Fed:
    """What was fed together: tokens up to position `stop`, of which the last `spare` are guesses
    that nothing vouches for yet."""

    stop: int
    spare: int


class DecodeSteps:
    """Those of one generation: `advance`, then `take`, until the answer has its end."""

    def __init__(
        self,
        feed: TokenFeed,
        head: OutputHead,
        drafter: Drafter,
        reader: TextReader | None,
        sampler: Sampler,
        answer: Completion,
    ) -> None:
        """`reader` is the draft model, if there is one for this answer."""
        self.drafter = drafter
        self.feed = feed
        self._head = head
        self._reader = reader
        self._sampler = sampler
        self.answer = answer
        self._under_way: deque[_Fed] = deque()
        self._begun_s = 0.0

    async def advance(self, ids: Sequence[int]) -> AsyncGenerator[StreamFrame, None]:
        """Feed `ids`, which are the prompt or the last token, unless they were already, and what is
        guessed to follow; until what was fed first is back. Yields and raises as `TokenFeed`."""
        self._begun_s = loop_time()
        feed, under_way = self.feed, self._under_way
        if not under_way:
            draft = await self._draft()
            async for notice in feed.feed([*ids, *draft]):
                yield notice
            under_way.append(_Fed(feed.length, len(draft)))
        if len(under_way) == 1 and (following := self._following()):
            feed.follow(following)
            under_way.append(_Fed(feed.length, len(following) - 1))
        first = under_way[0]
        async for notice in feed.reach(first.stop, first.spare):
            yield notice

    async def take(self) -> list[StreamFrame]:
        """What the answer gains: a token, and one more after each guess that the sampler chooses as
        well. The session forgets the others."""
        feed, answer, first = self.feed, self.answer, self.answer.end - 1
        if feed.length < self._under_way[-1].stop:  # there was no room for guesses
            self.drafter.had_no_room()
        fed = self._under_way.popleft()
        stop = min(fed.stop, feed.length)
        rows: Sequence[torch.Tensor | Candidates]
        if feed.has_candidates:
            rows = feed.candidates(first, stop)
        else:
            rows = list(await self._head.logits(feed.rows(first, stop)))
        self.drafter.took(len(rows), loop_time() - self._begun_s)
        taken: list[TokenDelta] = []
        notices: list[StreamFrame] = []
        for position, row in enumerate(rows, first):
            taken.append(await self._chosen(row, position, notices))
            if answer.finish_reason or answer.token_ids[-1] != feed.fed(position + 1):
                self._under_way.clear()
                feed.keep(answer.end - 1)  # the last token was not fed
                break
        self.drafter.add(answer.token_ids[-len(taken) :])
        return [*notices, *taken]

    # Private

    async def _draft(self) -> list[int]:
        """What to send behind the last token: what has to follow it, or what is guessed from what
        the text said before or by the draft model."""
        drafter, answer = self.drafter, self.answer
        if certain := drafter.insist(answer.certain(), room := self._room):
            return certain
        draft = drafter.propose(room)
        if not draft and self._reader is not None and (count := drafter.wanted(room)):
            draft = await self._reader.guess([*answer.prompt, *answer.token_ids], count)
            if draft:
                drafter.adopt(draft)
        return draft

    def _following(self) -> list[int]:
        """What to send behind the draft that is under way."""
        if self.feed.has_candidates:
            return []  # a hop gives all logits of a row of what it answered last
        return self.drafter.follow(self.answer.end + self._room - self.feed.length)

    @property
    def _room(self) -> int:
        """How many tokens may be fed behind the last one: what the answer may get, of which the
        session may end before."""
        return min(self.answer.left - 1, self.feed.limit - self.answer.end)

    async def _chosen(
        self, said: torch.Tensor | Candidates, position: int, notices: list[StreamFrame]
    ) -> TokenDelta:
        """The token behind `position`, of all logits or of the strongest; what happened while those
        that are not here were asked for joins the `notices`."""
        answer = self.answer
        candidates = said if isinstance(said, Candidates) else None
        if not isinstance(said, Candidates) and answer.tells_logprobs:
            candidates = candidates_of(said)
        chosen = partial(self._choice, said, candidates, position, notices)
        token, row = await chosen(answer.allowed())
        if answer.is_cut_short_by(token):
            token, row = await chosen(answer.without_ends(_vocab(said)))
        return answer.take(token, candidates, row)

    async def _choice(
        self,
        said: torch.Tensor | Candidates,
        candidates: Candidates | None,
        position: int,
        notices: list[StreamFrame],
        allowed: NDArray[np.bool_] | None,
    ) -> tuple[int, torch.Tensor | None]:
        """The sampler's token, and the whole row where that is here."""
        sampler = self._sampler
        if not isinstance(said, Candidates):
            return sampler.choose(said, candidates, allowed), said
        token = sampler.choose_among(said, allowed)
        if token is not None:
            return token, None
        row = await self.feed.row(position, notices)
        if allowed is not None:
            return sampler.choose(row, None, allowed), row
        return sampler.choose_from(row), row


def _vocab(said: torch.Tensor | Candidates) -> int:
    return said.vocab if isinstance(said, Candidates) else len(said)
