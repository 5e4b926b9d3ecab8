"""The one tree of errors: what crosses a process or a link comes back as what it was."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace

from mesh import errors

SHARED = {
    "bad_request": errors.BadRequest,
    "internal": errors.InternalError,
    "link_lost": errors.LinkLost,
}
"""Codes that several classes carry, and the one that such an error comes back as."""


def below(kind: type[errors.MeshError]) -> Iterator[type[errors.MeshError]]:
    for child in kind.__subclasses__():
        yield child
        yield from below(child)


CLASSES = [
    kind
    for kind in below(errors.MeshError)
    # What others derive for themselves has no code of its own, and never travels.
    if kind is not errors.RemoteError
    and (kind.__module__ == errors.__name__ or "code" in vars(kind))
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_comes_back_as_what_it_was(kind: type[errors.MeshError]) -> None:
    sent = kind("The disk is full.", fix="Free some.", param="disk")
    back = errors.from_dict(sent.to_dict())
    assert type(back) is SHARED.get(kind.code, kind)
    assert back.to_dict() == sent.to_dict() | {"retryable": back.retryable}


def test_only_the_named_codes_are_shared() -> None:
    codes = [kind.code for kind in CLASSES]
    assert {code for code in codes if codes.count(code) > 1} <= set(SHARED)


def test_an_error_of_a_newer_node_keeps_its_code() -> None:
    told = {"code": "moon_phase", "message": "Not tonight.", "fix": "Wait.", "retryable": True}
    back = errors.from_dict(told)
    assert isinstance(back, errors.RemoteError)
    assert (back.code, back.message, back.fix, back.retryable) == (
        "moon_phase",
        "Not tonight.",
        "Wait.",
        True,
    )


async def test_who_waits_is_told_of_a_panic_in_a_tokenizer() -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))  # noqa: S106 - no password
    tokenizer.normalizer = Replace(Regex("(a+)+$"), "b")  # more ways to try than are tried
    with pytest.raises(errors.InternalError, match="retry-limit"):
        await errors.as_mesh_error(asyncio.to_thread(tokenizer.encode, "a" * 40 + "!"), "reading")
