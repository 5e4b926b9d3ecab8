"""A prompt that is given back, and how likely each of its tokens was behind those before it.

What leaves the last hop comes here anyway. Where the prompt is to be scored all of its rows go
through the head, in pieces, and not only the last one; an asker that holds no head reads what the
last hop says of them. The last token is not fed: what follows it is for the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import torch

from mesh.models.candidates import Candidates, candidates_of
from mesh.pipeline.model import AskerModel, Text
from mesh.pipeline.prefill import TokenFeed
from mesh.pipeline.sampler import logprob_of
from mesh.types import GenerationRequest, PromptPiece, StreamFrame, TokenLogprob
from mesh.units import characters

SCORED_BYTES = 8 << 20
"""Logits, in fp32, that are computed at once: between two such pieces others have their turn."""


async def given_back(
    model: AskerModel,
    feed: TokenFeed,
    request: GenerationRequest,
    prompt: Sequence[int],
) -> AsyncGenerator[StreamFrame, None]:
    """The whole `prompt` as `PromptPiece`s, where the request wants that.

    Its text is as the request has it, or what its tokens make. Where it is scored all but its last
    token are fed then. Yields notices as well, and raises as `TokenFeed.advance`.
    """
    if not request.echo:
        return
    text = request.prompt
    if text is None:
        text = await asyncio.to_thread(_decoded, model.text, prompt)
    if request.sampling.logprobs is None:
        yield PromptPiece(text, tuple(prompt))
        return
    places, bytes_of = TokenPlaces(text), model.text.token_bytes
    first = TokenLogprob(prompt[0], bytes_of(prompt[0]), None)
    yield PromptPiece(text, (prompt[0],), (first,), (places.take(first.token),))
    scores = _Scores(model, feed, request.sampling.logprobs)
    async for read in feed.read(prompt[:-1]):
        if not isinstance(read, range):
            yield read
            continue
        following = prompt[read.start + 1 : read.stop + 1]
        scored = scores.of_candidates if feed.has_candidates else scores.of_rows
        notices: list[StreamFrame] = []
        logprobs = await scored(read, following, notices)
        for notice in notices:
            yield notice
        offsets = tuple(places.take(each.token) for each in logprobs)
        yield PromptPiece("", tuple(following), logprobs, offsets)


class TokenPlaces:
    """Where in a text its tokens begin, told one after the other, in characters.

    A token that the text does not show (one that begins every text, say) has the place of what
    follows it; the rest of a character has the place behind that. A tokenizer that rewrites the
    text is followed as far as what it wrote stands near where it should.
    """

    _NEAR = 64
    """Bytes that a rewritten piece of text may be long."""

    def __init__(self, text: str) -> None:
        self._left = text.encode()
        self._at = 0
        self._characters = 0

    def take(self, token: bytes) -> int:
        """The place of the next token."""
        spelled = token
        if self._at == 0 and token.startswith(b" ") and self._left.startswith(token[1:]):
            spelled = token[1:]  # many tokenizers write a space before a text
        at = self._left.find(spelled, self._at, self._at + self._NEAR + len(spelled))
        if at < 0 or not spelled:
            return self._characters
        self._characters += characters(self._left[self._at : at])
        begins = self._characters
        self._at = at + len(spelled)
        self._characters += characters(spelled)
        return begins


class _Scores:
    """What is said of the prompt's tokens: its log-probability and the `top` strongest rivals."""

    def __init__(self, model: AskerModel, feed: TokenFeed, top: int) -> None:
        self._model = model
        self._feed = feed
        self._top = top
        self._at_once = max(1, SCORED_BYTES // (4 * model.vocab_size))

    async def of_rows(
        self, read: range, following: Sequence[int], _notices: list[StreamFrame]
    ) -> tuple[TokenLogprob, ...]:
        """Of the tokens behind each of these positions; the head is run here."""
        rows, found = self._feed.rows(read.start, read.stop), list[TokenLogprob]()
        for part in torch.split(rows, self._at_once, dim=1):
            for row in self._model.own_ends.logits(part)[0]:
                token = following[len(found)]
                found.append(self._logprob(candidates_of(row), token, row))
            await asyncio.sleep(0)
        return tuple(found)

    async def of_candidates(
        self, read: range, following: Sequence[int], notices: list[StreamFrame]
    ) -> tuple[TokenLogprob, ...]:
        """The same where the last hop has run it. It is asked for all logits of a row where the
        token is none of the strongest."""
        found = []
        said = self._feed.candidates(read.start, read.stop)
        for position, token, candidates in zip(read, following, said, strict=True):
            row = None
            if token not in candidates.ids:
                row = await self._feed.row(position, notices)
            found.append(self._logprob(candidates, token, row))
        return tuple(found)

    def _logprob(
        self, candidates: Candidates, token: int, row: torch.Tensor | None
    ) -> TokenLogprob:
        return logprob_of(candidates, token, self._top, self._model.text.token_bytes, row)


def _decoded(text: Text, ids: Sequence[int]) -> str:
    decoder = text.decoder(continues=False)
    return "".join([*map(decoder.push, ids), decoder.flush()])
