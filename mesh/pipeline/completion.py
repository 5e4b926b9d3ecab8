"""The text side of one generation: tokens in, text deltas out, and when it is over."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mesh.errors import CacheFull
from mesh.models.calling_thoughts import CallingThoughts
from mesh.models.reasoning import ReasoningMarks
from mesh.models.splitting import Splitter, overlap
from mesh.models.tool_calls import CallReader
from mesh.pipeline.model import Text
from mesh.pipeline.sampler import logprob_of
from mesh.types import GenerationRequest, TokenDelta, TokenLogprob, ToolCallDelta

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from mesh.models.candidates import Candidates
    from mesh.models.constraint import Constraint

_MARK_TOKENS = 16
"""No mark, with the line ends behind it, takes more."""

_Said = tuple[str, str, tuple[ToolCallDelta, ...]]
"""Reasoning, text and calls."""


class Completion:
    """Collects tokens until an end token, a stop string or the limit: see `finish_reason`.

    `note` says why it ended where nobody asked it to; `embedding` is as `Done` has it. Reasoning is
    kept apart (see `thoughts_of`); stop strings do not stop that. So are calls of the request's
    tools, which may end it as well.
    A `constraint` binds what is not reasoning, and ends it when all is said.
    """

    def __init__(
        self,
        text: Text,
        request: GenerationRequest,
        prompt: Sequence[int],
        limit: int,
        started: float,
        constraint: Constraint | None = None,
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason = "" if limit else "length"
        self.note = ""
        self.embedding = b""
        self._text = text
        self._params = request.sampling
        self._limit = limit
        self.prompt = prompt
        self._prompt_tokens = 0 if request.echo else len(prompt)  # what is given back says it
        self._decoder = text.decoder(continues=request.messages is None or bool(request.begun))
        self._stops = StopStrings(request.sampling.stop)
        self._thoughts, unseen = thoughts_of(text, request, prompt, is_bound=constraint is not None)
        self._calls, of_calls = _calls_of(text, request)
        self._unseen = {**unseen, **of_calls}
        self._constraint = constraint
        self._started = started
        self._first_at = started
        self._last_at = started

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def left(self) -> int:
        """How many tokens it may still get."""
        return self._limit - len(self.token_ids)

    @property
    def tells_logprobs(self) -> bool:
        """Whether the request asks how likely its tokens were."""
        return self._params.logprobs is not None

    def allowed(self) -> NDArray[np.bool_] | None:
        """(tokens,) what the next token may be; None where it may be any. Raises as
        `Constraint.allowed`."""
        constraint = self._constraint
        if constraint is None or self._is_thinking:
            return None
        allowed = constraint.allowed()
        if not self.token_ids and self._thoughts is not None and constraint.thinks_with is not None:
            allowed[constraint.thinks_with] = True
        return allowed

    def is_cut_short_by(self, token: int) -> bool:
        """Whether `token` ends the reasoning of an answer that is bound, which then says nothing of
        what is wanted."""
        is_end = token in self._text.eos_ids and not self._params.ignore_eos
        return is_end and self._constraint is not None and self._is_thinking

    def without_ends(self, vocab: int) -> NDArray[np.bool_]:
        """(vocab,) all tokens but those that end an answer are allowed."""
        allowed = np.ones(vocab, dtype=np.bool_)
        allowed[[token for token in self._text.eos_ids if token < vocab]] = False
        return allowed

    def certain(self) -> Sequence[int]:
        """The tokens that must be next, as far as there is no choice."""
        return () if self._constraint is None or self._is_thinking else self._constraint.certain()

    def take(
        self, token: int, candidates: Candidates | None = None, row: torch.Tensor | None = None
    ) -> TokenDelta:
        """The next token with the text it completes; an end token has none.

        `candidates`, and where the token is none of them the `row` (vocab,), are what it was chosen
        from; they are read where it `tells_logprobs`.
        """
        self._last_at = time.monotonic()
        if not self.token_ids:
            self._first_at = self._last_at
        self._heed(token)
        self.token_ids.append(token)
        ends = token in self._text.eos_ids and not self._params.ignore_eos
        said: _Said = ("", "", ()) if ends else self._show(token, self._decoder.push(token))
        if ends or self._stops.hit is not None or self._is_said:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self._limit:
            self.finish_reason = "length"
        if self.finish_reason:
            said = _joined(said, self._flush())
            self._tell_of_calls()
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._params.logprobs is not None and candidates is not None:
            rivals, bytes_of = self._params.logprobs, self._text.token_bytes
            entry = logprob_of(candidates, token, rivals, bytes_of, row)
            logprobs = (replace(entry, is_hidden=self._text.hides(token)),)
        prompt_tokens, self._prompt_tokens = self._prompt_tokens, 0
        thought, shown, calls = said
        return TokenDelta(shown, (token,), logprobs, prompt_tokens, thought, calls)

    def say_nothing(self) -> TokenDelta:
        """In the place of a first token where none is wanted: the prompt is computed."""
        self._first_at = self._last_at = time.monotonic()
        return TokenDelta("", (), prompt_tokens=self._prompt_tokens)

    def end_early(self, full: CacheFull) -> TokenDelta:
        """It cannot go on: the text that was held back. Raises `full` when there is no token."""
        if not self.token_ids:
            raise full
        self.finish_reason, self.note = "length", full.message
        thought, shown, calls = self._flush()
        return TokenDelta(shown, (), reasoning=thought, tool_calls=calls)

    @property
    def stopped_by(self) -> str:
        """The stop text that ended it; empty where none did."""
        return self._stops.hit or ""

    @property
    def first_token_ms(self) -> float:
        """From the request's arrival to its first token, or where none is wanted to the prompt's
        end; 0 where that is given back."""
        return (self._first_at - self._started) * 1e3

    @property
    def tokens_per_second(self) -> float:
        """Over the tokens after the first; 0 when there is only one."""
        elapsed = self._last_at - self._first_at
        return (len(self.token_ids) - 1) / elapsed if elapsed > 0 else 0.0

    @property
    def _is_thinking(self) -> bool:
        return self._thoughts is not None and bool(self._thoughts.is_open)

    def _heed(self, token: int) -> None:
        constraint = self._constraint
        if constraint is None or self._is_thinking:
            return
        if self.token_ids or self._thoughts is None or token != constraint.thinks_with:
            constraint.take(token)

    @property
    def _is_said(self) -> bool:
        """Whether nothing can follow that is wanted."""
        has_all_calls = self._calls is not None and self._calls.is_full
        return has_all_calls or (self._constraint is not None and self._constraint.is_over)

    def _tell_of_calls(self) -> None:
        if self.finish_reason == "stop" and self._calls is not None and self._calls.count:
            self.finish_reason = "tool_calls"

    def _show(self, token: int | None, text: str) -> _Said:
        if token in self._unseen:  # behind all that came before, bytes that wait for more included
            text += self._decoder.flush() + self._unseen[token]
        if self._thoughts is None:
            return "", *self._split(self._stops.push(text))
        thought, said = self._thoughts.push(text)
        return thought, *self._split(self._stops.push(said))

    def _split(self, shown: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        return (shown, ()) if self._calls is None else self._calls.push(shown)

    def _flush(self) -> _Said:
        """What was held back. Behind a stop string that is only what may have been a call."""
        said: _Said = "", "", ()
        if self._stops.hit is None:
            said = self._show(None, self._decoder.flush())
            if self._thoughts is not None:
                thought, rest = self._thoughts.flush()
                said = _joined(said, (thought, *self._split(self._stops.push(rest))))
            said = _joined(said, ("", *self._split(self._stops.flush())))
        if self._calls is not None:
            said = _joined(said, ("", *self._calls.flush()))
        return said


def _joined(first: _Said, second: _Said) -> _Said:
    return first[0] + second[0], first[1] + second[1], first[2] + second[2]


_Unseen = Mapping[int | None, str]
"""Marks that make no text, by their ids."""


def _calls_of(text: Text, request: GenerationRequest) -> tuple[CallReader | None, _Unseen]:
    """What keeps calls apart, where the request has tools, and its marks."""
    marks = text.call_marks if request.tools is not None else None
    if marks is None or request.tools is None:
        return None, {}
    return CallReader(marks.form, request.tools), dict(marks.unseen.items())


def thoughts_of(
    text: Text, request: GenerationRequest, prompt: Sequence[int], *, is_bound: bool = False
) -> tuple[Splitter | None, _Unseen]:
    """What keeps the reasoning of a chat's answer apart, where the model's template marks it, and
    its marks. A text that is only continued is never split. Calls end it as well, but where the
    answer `is_bound`: what binds it begins at the mark."""
    marks = text.reasoning_marks
    if marks is None or request.messages is None:
        return None, {}
    tail = b"".join(map(text.token_bytes, prompt[-_MARK_TOKENS:])).decode(errors="replace")
    has_tools = request.tools is not None
    splitter = marks.splitter(tail, is_begun=bool(request.begun), calls=has_tools)
    if request.tools is not None and not is_bound and isinstance(marks, ReasoningMarks):
        of_calls = text.call_marks
        if of_calls is not None:
            splitter = CallingThoughts(splitter, of_calls.form, request.tools)
    return splitter, dict(marks.unseen.items())


class StopStrings:
    """Feeds text through and holds back what may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now. After `hit` is set nothing more is."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            where, self.hit = min(found)
            shown, self._held = self._held[:where], ""
            return shown
        keep = max(overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        shown, self._held = self._held, ""
        return shown
