"""One published edit as the log tells of it. Plain data; whether its file is here is not its task.

The log holds what an edit is called, where it belongs and the hash of its file, never the file: a
vector of a 4096-wide model alone is as large as an event may be, and an event stays for ever with
every member. The file is fetched by its hash, from its author or whoever has fetched it before.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from mesh.events.state import Fact
from mesh.models.edits import MAX_EDIT_BYTES, SIDES
from mesh.types import NodeId

_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\w][\w .:+-]{0,63}")
_MAX_TEXT = 512


@dataclass(frozen=True, slots=True)
class Published:
    """An edit with a name. `size` bytes of file have the hash `sha256`."""

    name: str
    model_id: str
    weights_sha256: str
    path: str
    side: str
    kind: str
    sha256: str
    size: int

    def payload(self) -> dict[str, Any]:
        """What the event says."""
        return asdict(self)


def is_name(text: str) -> bool:
    """Whether an edit may be called that: a letter or digit first, 64 characters at most."""
    return _NAME.fullmatch(text) is not None


def read_fact(fact: Fact) -> tuple[Published, NodeId] | None:
    """The edit and its author; None when it was removed or is of a form nobody knows here."""
    names = Published.__dataclass_fields__
    fields: dict[str, Any] = {name: fact.payload.get(name) for name in names}
    texts = [value for name, value in fields.items() if name != "size"]
    size = fields["size"]
    if not all(type(text) is str and len(text) <= _MAX_TEXT for text in texts):
        return None
    if type(size) is not int or not 0 < size <= MAX_EDIT_BYTES:
        return None
    published = Published(**fields)
    if not is_name(published.name) or not _SHA256.fullmatch(published.sha256):
        return None
    return (published, fact.author) if published.side in SIDES else None
