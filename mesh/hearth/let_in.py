"""Whether the members of its hearth let this node in: people are told where none does.

One that has just joined is refused for a moment by those that have not heard of it yet: what is
said is what lasts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mesh.discovery.sightings import NOT_KNOWN_THERE, PeerState, PeerView

TOLD_AFTER_S = 5.0


class WhetherLetIn:
    """`look` whenever something in `peers` is other than before; `tell` is called with the names of
    those that refuse this node once none is linked for `after_s`, and not again before one is."""

    def __init__(
        self,
        peers: Callable[[], Sequence[PeerView]],
        tell: Callable[[Sequence[str]], None],
        after_s: float = TOLD_AFTER_S,
    ) -> None:
        self._peers = peers
        self._tell = tell
        self._after_s = after_s
        self._due: asyncio.TimerHandle | None = None
        self._is_told = False

    def look(self) -> None:
        """Who is put out while others are linked is cut off, and hears no more of why."""
        refusing, is_linked = self._now()
        if is_linked:
            self.close()
            self._is_told = False
        elif refusing and not self._is_told and self._due is None:
            self._due = asyncio.get_running_loop().call_later(self._after_s, self._say)

    def close(self) -> None:
        """Say nothing more of what was seen."""
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _say(self) -> None:
        self._due = None
        refusing, is_linked = self._now()
        if refusing and not is_linked:
            self._is_told = True
            self._tell(refusing)

    def _now(self) -> tuple[list[str], bool]:
        rows = self._peers()
        refusing = [row.name for row in rows if row.reason == NOT_KNOWN_THERE]
        return refusing, any(row.state is PeerState.UP for row in rows)
