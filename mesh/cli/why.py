"""`/why`: how sure the model was of each token, and what else it could have said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mesh.cli.output import one_line

SHOWN = 40
"""Of a longer answer only the tokens that were least sure."""
_WIDTH = 16


def table(tokens: Sequence[dict[str, Any]], *, everything: bool = False) -> str:
    """A line for each token, in their order, from OpenAI's `logprobs`; empty without tokens."""
    numbers = range(len(tokens))
    if not everything and len(tokens) > SHOWN:
        numbers_by_sureness = sorted(numbers, key=lambda number: tokens[number]["logprob"])
        lines = [_line(number, tokens[number]) for number in sorted(numbers_by_sureness[:SHOWN])]
        lines.append(f"These {SHOWN} of {len(tokens)} were least sure; /why all shows the others.")
        return "\n".join(lines)
    return "\n".join(_line(number, tokens[number]) for number in numbers)


def fitted(table: str, width: int) -> str:
    """A table as far as lines of so many columns have room: what is likeliest comes first."""
    return "\n".join(_cut(line, width) for line in table.splitlines())


def _cut(line: str, width: int) -> str:
    end = line.rfind("%  ", 0, width + 1)
    return line if len(line) <= width or end < 0 else line[: end + 1]


def _line(number: int, token: dict[str, Any]) -> str:
    others = [
        f"{visible(other['token'])} {percent(other['logprob'])}"
        for other in token["top_logprobs"]
        if other["token"] != token["token"]
    ]
    chosen = f"{visible(token['token']):{_WIDTH}} {percent(token['logprob']):>7}"
    return f"{number + 1:4}  {chosen}   {'  '.join(others)}".rstrip()


def visible(token: str) -> str:
    """A token with its spaces and line ends visible."""
    return one_line(repr(token))


def percent(logprob: float) -> str:
    """A natural-log probability in per cent."""
    share = math.exp(logprob) * 100
    return f"{share:.1f} %" if share >= 0.05 else "<0.1 %"
