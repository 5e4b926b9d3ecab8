"""Texts as OpenAI's bodies have them: one, or token ids, or several of either."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag

from mesh.api.openai.sampling import INT32
from mesh.errors import BadRequest

_MAX_PROMPT_IDS = 2**20
"""Above the context of every model that could run here; a model's own limit is checked later."""

TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=INT32)]], Field(max_length=_MAX_PROMPT_IDS, fail_fast=True)
]


def at_most(count: int) -> BeforeValidator:
    """A `Prompt` that is a list of so many texts, or lists of ids, at most."""

    def check(value: Any) -> Any:
        if _form(value) in ("texts", "lists") and len(value) > count:
            raise ValueError(f"{len(value)} prompts are too many; one request takes {count}")
        return value

    return BeforeValidator(check)


def each_of(prompt: Any) -> list[Any]:
    """Each text, or list of ids, of a `Prompt`."""
    return list(prompt) if _form(prompt) in ("texts", "lists") else [prompt]


def texts_of(prompt: Any, param: str) -> list[Any]:
    """The same. Raises BadRequest when one of them is empty, or there is none."""
    found = each_of(prompt)
    if not found or not all(found):
        where = found.index(next(each for each in found if not each)) if found else 0
        param = f"{param}.{where}" if len(found) > 1 else param
        raise BadRequest(f"{param}: it is empty.", fix="Send some text.", param=param)
    return found


def _form(value: Any) -> str | None:
    """Which form of a prompt its first element makes it."""
    if not isinstance(value, list):
        return "text" if isinstance(value, str) else None
    first = value[0] if value else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


# Not a plain union: that validates a long list, and reports on it, once for every form.
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[str], Tag("texts")]
    | Annotated[list[TokenIds], Tag("lists")],
    Discriminator(
        _form,
        custom_error_type="prompt_form",
        custom_error_message="Input should be a text, a list of token ids, or a list of either",
    ),
]
