"""What became of an event or a decision that somebody offered."""

from __future__ import annotations

from enum import StrEnum


class EventVerdict(StrEnum):
    """What became of an offered event."""

    ACCEPTED = "accepted"
    KNOWN = "known"
    HELD = "held"
    """It waits for an earlier event of its chain or for its author's key."""
    VOID = "void"
    """It lies beyond where its author was cut or forked."""
    DIVERGED = "diverged"
    """It continues another chain than ours; looking for where they part will show a fork."""
    FORKED = "forked"
    """It is properly signed and differs from ours of the same author and sequence number."""
    FULL = "full"
    """Its author has signed as much as a hearth keeps of one."""
    LATER = "later"
    """Its author has signed too much within a minute; it is fetched again."""
    MALFORMED = "malformed"
    FOREIGN = "foreign"
    """It belongs to another hearth."""
    TOO_FAR = "too_far"
    BROKEN = "broken"
    """Its number does not fit what it names before it."""
    UNLAWFUL = "unlawful"
    """A decision by somebody who was no anchor in what it had seen."""
    FORGED = "forged"

    @property
    def is_bad(self) -> bool:
        """Whether no honest peer would have sent it."""
        return self in _BAD


_BAD = frozenset(
    {
        EventVerdict.MALFORMED, EventVerdict.FOREIGN, EventVerdict.TOO_FAR, EventVerdict.BROKEN,
        EventVerdict.UNLAWFUL, EventVerdict.FORGED,
    }
)  # fmt: skip
