"""The receiving half of flow control: which chunks the peer has in flight, and what we owe it back.

A chunk is any frame that bears tensor bytes. The peer may have a window of them uncredited. A chunk
of a multi-frame tensor is credited when it has been taken in; the last chunk of a `Step` only when
the step is answered, so that unanswered steps are bounded by the window too, and the credit rides
on the answer: a decode step is one message out and one back.

Sends nothing itself.
"""

from __future__ import annotations

from mesh.errors import SAME_VERSION, BadFrame
from mesh.wire.limits import Limits


class Credits:
    """What one link owes its peer."""

    def __init__(self, limits: Limits) -> None:
        self._window = limits.window
        self._return_at = limits.window // 2
        self._budget = limits.unanswered_bytes
        self._held: dict[tuple[int, int], list[int]] = {}
        self._withheld = 0
        self.owed = 0
        """Credits that the next frame can give back."""
        self.outstanding = 0
        """Chunks received and not yet credited on the wire."""
        self.unanswered_bytes = 0
        """Bytes of complete steps that were not answered yet."""

    @property
    def due(self) -> bool:
        """Whether enough is owed that it should not wait for a frame to ride on."""
        return self.owed >= self._return_at

    @property
    def is_full(self) -> bool:
        """Whether one more chunk would overrun the window."""
        return self.outstanding >= self._window

    def arrived(self) -> None:
        """Count one chunk; raises BadFrame when the peer overruns its window."""
        if self.outstanding >= self._window:
            raise BadFrame(
                f"More than {self._window} unacknowledged chunks in flight.",
                fix=SAME_VERSION,
            )
        self.outstanding += 1

    def consumed(self) -> None:
        """A chunk was taken in. Its credit waits while unanswered steps are over their budget."""
        if self.unanswered_bytes > self._budget:
            self._withheld += 1
        else:
            self.owed += 1

    def hold(self, session: int, step: int, size_bytes: int) -> None:
        """A step is complete: keep the credit of its last chunk until it is answered."""
        self._held.setdefault((session, step), []).append(size_bytes)
        self.unanswered_bytes += size_bytes

    def holds(self, session: int, step: int) -> bool:
        """Whether this step still waits for its answer."""
        return (session, step) in self._held

    def answered(self, session: int, step: int) -> None:
        """The answer to one such step is on its way; does nothing for a step not held."""
        sizes = self._held.get((session, step))
        if sizes is None:
            return
        self._release(sizes.pop())
        if not sizes:
            del self._held[(session, step)]

    def forget(self, session: int) -> None:
        """None of the session's steps will be answered any more."""
        for key in [key for key in self._held if key[0] == session]:
            for size in self._held.pop(key):
                self._release(size)

    def take(self) -> int:
        """All credits owed now; the caller puts them on the wire."""
        owed, self.owed = self.owed, 0
        self.outstanding -= owed
        return owed

    def _release(self, size_bytes: int) -> None:
        self.unanswered_bytes -= size_bytes
        self.owed += 1
        if self._withheld and self.unanswered_bytes <= self._budget:
            self.owed += self._withheld
            self._withheld = 0
