"""How large intervention messages and their parts may be. Both ends of a session agree on it."""

from __future__ import annotations

PART_BYTES = 16 << 20
MAX_MESSAGE_BYTES = 1 << 30
"""The largest message, whole."""
