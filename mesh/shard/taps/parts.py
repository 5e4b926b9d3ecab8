"""How an intervention message is cut into the steps of a link session. Both ends agree on it.

`Step.position` says how many parts follow; an answer's first byte whether more of it is to be
fetched, by a step at position `FETCH`.
"""

from __future__ import annotations

PART_BYTES = 16 << 20
FETCH = 0xFFFFFFFF
MAX_MESSAGE_BYTES = 1 << 30
"""The largest message, whole."""
