"""Ids as people compare them: four words and six characters. For eyes and ears only.

62 bits of the id, enough to tell a household's machines apart and to compare over the phone; what
may be done is decided by the full id alone.
"""

from __future__ import annotations

import base64

from mesh.errors import BadKey
from mesh.identity.keys import is_node_id, short_id
from mesh.identity.words import WORDS
from mesh.types import NodeId

_WORDS_AT = slice(4, 8)
"""The bytes behind the words: past those that the six characters show already."""


def fingerprint(node_id: NodeId) -> str:
    """``amber-river-piano-moss abc234``. Raises BadKey for text that is no node id."""
    words = "-".join(WORDS[byte] for byte in id_digest(node_id)[_WORDS_AT])
    return f"{words} {short_id(node_id)}"


def id_digest(node_id: NodeId) -> bytes:
    """The SHA-256 inside a node id. Raises BadKey for text that is no node id."""
    if not is_node_id(node_id):
        raise BadKey(f"{node_id!r} is not a node id.", fix="Copy the whole id, starting with hn1.")
    encoded = node_id.removeprefix("hn1").upper()
    return base64.b32decode(encoded + "=" * (-len(encoded) % 8))
