"""Which of a chat's oldest exchanges are left out where the context has no room for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mesh.errors import ContextTooLong
from mesh.pipeline.truncation import truncated
from mesh.types import GenerationRequest, ModelId, SamplingParams

MOST = 800
"""Leaves 600 for a prompt where the answer does not say how long it may be."""


def read(request: GenerationRequest, most: int | None) -> list[int]:
    """A token for each character."""
    ids = [ord(sign) for each in request.messages or () for sign in each["content"]]
    if most is not None and len(ids) > most:
        raise ContextTooLong(f"{len(ids)} tokens.", fix="Shorten it.")
    return ids


def message(role: str, sign: str, size: int) -> dict[str, Any]:
    return {"role": role, "content": sign * size}


def chat(exchanges: int, *, size: int = 50, system: bool = True) -> GenerationRequest:
    opening = [message("system", "s", 40)] if system else []
    said = [
        message(role, chr(ord("A") + number), size)
        for number in range(exchanges)
        for role in ("user", "assistant")
    ]
    asked = message("user", "?", 10)
    return GenerationRequest("r", ModelId("m"), messages=(*opening, *said, asked))


def left(request: GenerationRequest, most: int = MOST) -> tuple[str, int]:
    """The prompt's different characters, and how many messages were left out."""
    ids, left_out = truncated(request, most, read)
    return "".join(dict.fromkeys(map(chr, ids))), left_out


def test_what_fits_stays_as_it_is() -> None:
    assert left(chat(5)) == ("sABCDE?", 0)


def test_the_oldest_exchanges_go_and_the_systems_message_stays() -> None:
    kept, left_out = left(chat(8))
    assert (kept[0], kept[-1]) == ("s", "?")
    assert "H" in kept
    assert "A" not in kept
    assert left_out % 2 == 0
    ids, _ = truncated(chat(8), MOST, read)
    assert len(ids) <= 600


def test_the_next_questions_begin_where_this_one_does() -> None:
    """So that most of them find their beginning in the caches."""
    cuts = [left(chat(exchanges, size=20, system=False))[1] for exchanges in range(15, 60)]
    assert len(set(cuts)) < len(cuts) / 4
    assert cuts == sorted(cuts)


def test_an_answer_has_the_room_it_asks_for() -> None:
    request = replace(chat(4), sampling=SamplingParams(max_tokens=500))
    ids, left_out = truncated(request, MOST, read)
    assert len(ids) <= 300
    assert left_out
    capped = replace(request, sampling=SamplingParams(max_tokens=500, fits_context=True))
    assert truncated(capped, MOST, read).left_out == 0


def test_the_newest_exchange_may_take_the_answers_share_and_no_more() -> None:
    long = replace(chat(3), messages=(*(chat(3).messages or ()), message("user", "!", 700)))
    assert left(long) == ("s?!", 6)
    with pytest.raises(ContextTooLong):
        truncated(long, 700, read)
    alone = replace(chat(0), messages=(message("user", "!", 700),))
    assert left(alone) == ("!", 0)


def test_calls_stay_with_the_question_they_belong_to() -> None:
    calls = [
        message("assistant", "c", 200),
        message("tool", "t", 200),
        message("assistant", "d", 9),
    ]
    request = replace(
        chat(0), messages=(message("user", "A", 300), *calls, *(chat(0).messages or ())[1:])
    )
    assert left(request) == ("?", 4)
