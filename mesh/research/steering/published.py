"""One published edit as the log tells of it. Plain data; whether its file is here is not its task.

The log holds what an edit is called, where it belongs and the hash of its file, never the file: a
vector of a 4096-wide model alone is as large as an event may be, and an event stays for ever with
every member. The file is fetched by its hash, from its author or whoever has fetched it before.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from msgspec import Meta

from mesh import codec
from mesh.codec import Fault, Sha256
from mesh.events.state import Fact
from mesh.models.edits import MAX_EDIT_BYTES, Side
from mesh.types import NodeId

_NAME = re.compile(r"[\w][\w .:+-]{0,63}")
_Short = Annotated[str, Meta(max_length=512)]


@dataclass(frozen=True, slots=True)
class Published:
    """An edit with a name. `size` bytes of file have the hash `sha256`."""

    name: Annotated[str, Meta(pattern=rf"\A{_NAME.pattern}\Z")]
    model_id: _Short
    weights_sha256: _Short
    path: _Short
    side: Side
    kind: _Short
    sha256: Sha256
    size: Annotated[int, Meta(ge=1, le=MAX_EDIT_BYTES)]

    def payload(self) -> dict[str, Any]:
        """What the event says."""
        return asdict(self)


def is_name(text: str) -> bool:
    """Whether an edit may be called that: a letter or digit first, 64 characters at most."""
    return _NAME.fullmatch(text) is not None


def read_fact(fact: Fact) -> tuple[Published, NodeId] | None:
    """The edit and its author; None when it was removed or is of a form nobody knows here."""
    try:
        published = codec.convert(fact.payload, Published)
    except Fault:
        return None
    return published, fact.author
