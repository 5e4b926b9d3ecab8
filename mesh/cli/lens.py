"""`/why --lens`: what each layer would have said at a token of an answer, were it the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mesh.cli.output import one_line
from mesh.cli.why import percent, visible
from mesh.errors import BadRequest

if TYPE_CHECKING:
    from mesh.client import Client

FLAG = "--lens"
TOP = 3
"""Tokens shown of each layer."""


async def look(
    client: Client,
    model: str,
    messages: Sequence[dict[str, str]],
    tokens: Sequence[dict[str, Any]],
    number: int | None = None,
) -> dict[str, Any]:
    """The daemon's lens at token `number` (from 1) of an answer to `messages`, else at its last.

    ``{"number", "of", "token", "layers", ...}``. Raises MeshError, BadRequest for no such token.
    """
    number = len(tokens) if number is None else number
    if not 0 < number <= len(tokens):
        raise BadRequest(
            f"The answer has {len(tokens)} tokens, and no token {number}.",
            fix=f"Choose one: {FLAG} 1 is the first.",
        )
    begun = b"".join(bytes(token["bytes"]) for token in tokens[: number - 1]).decode(
        errors="replace"
    )
    if "\ufffd" in begun:
        raise BadRequest(
            f"What comes before token {number} is no whole characters.",
            fix="Choose an earlier one.",
        )
    found = await client.lens(model=model, messages=list(messages), begun=begun, top=TOP)
    said = str(tokens[number - 1]["token"])
    return {"number": number, "of": len(tokens), "token": said, **found}


def table(found: dict[str, Any]) -> str:
    """A line for each layer; an asterisk where it says already what was said."""
    layers = found["layers"]
    width = max((len(one_line(layer["node"])) for layer in layers), default=0)
    lines = [f"token {found['number']} of {found['of']}, {visible(found['token'])}, by layer:"]
    for layer in layers:
        best = layer["top"][0]["token"] if layer["top"] else None
        mark = "*" if best == found["token"] else " "
        said = "  ".join(f"{visible(t['token'])} {percent(t['logprob'])}" for t in layer["top"])
        lines.append(
            f"{layer['layer']:4} {mark} {one_line(layer['node']):{width}}  {said}".rstrip()
        )
    return "\n".join([*lines, "Computed by the nodes that hold the layers; norm and head here."])
