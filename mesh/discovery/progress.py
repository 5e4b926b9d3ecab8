"""How far a node is with what it was given to hold, and the dict that carries it in a notice.

It stands beside the shards in the same notice, as strictly read (`advertisement`). Older nodes
neither say it nor read it. Whoever plans for others counts with it, and people are shown it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from mesh import codec
from mesh.codec import MAX_TEXT, Int63, Text
from mesh.errors import in_one_line

MAX_SPANS = 64
MAX_MODELS = 64
_Said = Annotated[str, Meta(max_length=MAX_TEXT), codec.printable]


@dataclass(frozen=True, slots=True)
class SpanProgress:
    """A shard that is to be there and is not yet. `phase` is a word of `mesh.deployments.phases`,
    `done_bytes` of `total_bytes` have come; `reason` says what it waits for or why it failed.
    `lacks_memory`: the node has no room for it. Of one that failed, `code` is that of the error,
    and `fix` the end of `reason`; earlier versions say neither."""

    shard_id: Text
    phase: Text
    done_bytes: Int63 = 0
    total_bytes: Int63 = 0
    reason: _Said = ""
    lacks_memory: bool = False
    code: _Said = ""
    fix: _Said = ""


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """The spans that a node still works at, the models whose ends it has loaded to ask, and whether
    it is paused, of which earlier versions say nothing."""

    spans: Annotated[tuple[SpanProgress, ...], Meta(max_length=MAX_SPANS)] = ()
    asks: Annotated[tuple[Text, ...], Meta(max_length=MAX_MODELS)] = ()
    paused: bool = False


def shortened(reason: str) -> str:
    """A reason as it may be told."""
    return in_one_line(reason, MAX_TEXT)
