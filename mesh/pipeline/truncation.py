"""Leaves out a chat's oldest exchanges where the context has no room for all of them.

An exchange is what users said in a row with all that follows, calls of functions and their results
included. What stands before the first, as a system's message does, stays. Knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from mesh.errors import ContextTooLong
from mesh.types import GenerationRequest, SamplingParams

Read = Callable[[GenerationRequest, int | None], list[int]]
"""The token ids of a request. Raises BadRequest, ContextTooLong beyond so many."""

_ANSWER_SHARE = 4
"""An answer that does not say how long it may be is left one part in so many of the context."""
_GRID_SHARE = 2
"""A character for each token of so many parts of the context: some eighth of it in English."""


class Prompt(NamedTuple):
    """The token ids of a request without so many of its messages."""

    ids: list[int]
    left_out: int = 0


def truncated(request: GenerationRequest, most: int, read: Read) -> Prompt:
    """The request in a context of `most` tokens, with room for its answer.

    What is left out goes in steps of an eighth of a context, so that the next questions of a long
    chat begin alike and find what the caches have of that. Raises as `read`, ContextTooLong where
    the newest exchange does not fit.
    """
    messages = request.messages or ()
    begins = _exchanges(messages)
    cuts = [begins[0], *_in_steps(messages, begins, most // _GRID_SHARE)]
    room = most - _answer_room(request.sampling, most)

    def tried(cut: int) -> Prompt | None:
        with suppress(ContextTooLong):
            return _without(request, begins[0], cut, room, read)
        return None

    # Most chats fit as they are; else the first cut that makes room is looked for.
    found, low, high = tried(cuts[0]), 1, len(cuts)
    if found is not None:
        return found
    while low < high:
        middle = (low + high) // 2
        if (fits := tried(cuts[middle])) is None:
            low = middle + 1
        else:
            found, high = fits, middle
    return found or _without(request, begins[0], cuts[-1], most, read)


def _without(request: GenerationRequest, first: int, cut: int, most: int, read: Read) -> Prompt:
    """The request without its messages from `first` to before `cut`."""
    messages = request.messages or ()
    kept = replace(request, messages=(*messages[:first], *messages[cut:]))
    return Prompt(read(kept, most), cut - first)


def _answer_room(sampling: SamplingParams, most: int) -> int:
    """The tokens that are kept for the answer: those it asks for where it is to have them all."""
    share = most // _ANSWER_SHARE
    if sampling.max_tokens is None:
        return share
    return min(sampling.max_tokens, share if sampling.fits_context else most - 1)


def _exchanges(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Where exchanges begin: the first behind the opening system's messages, if only there."""
    roles = [message["role"] for message in messages]
    first = next((n for n, role in enumerate(roles) if role != "system"), len(roles))
    others = range(first + 1, len(roles))
    return [first, *(n for n in others if roles[n] == "user" and roles[n - 1] != "user")]


def _in_steps(messages: Sequence[Mapping[str, Any]], begins: Sequence[int], step: int) -> list[int]:
    """Those behind the first that begin in another step of so many characters than the one before,
    and the last."""
    chars = list(accumulate((len(message["content"]) for message in messages), initial=0))
    steps = [chars[begin] // max(1, step) for begin in begins]
    cuts = [begin for n, begin in enumerate(begins) if n and steps[n] != steps[n - 1]]
    return cuts if begins[-1] in (*cuts, begins[0]) else [*cuts, begins[-1]]
