"""What the log asks of whoever knows keys and membership. Protocols only.

Everything here must be a pure function of its arguments: two nodes with the same events must get
the same answers, in whatever order the events came.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from mesh.events.types import Event
from mesh.types import NodeId


class Membership(Protocol):
    """Who is in, as the membership events say. Immutable, comparable with ``==``."""

    def limit(self, author: NodeId) -> int | None:
        """The author's last sequence number that counts: its revocation's cut; None for no end."""

    def standing(self, author: NodeId) -> Hashable:
        """All that `admits` looks at for this author; a change folds the author's events again."""

    def admits(self, event: Event) -> bool:
        """Whether an event has an effect; depends on the event and its author's standing only.

        What is not admitted is still stored and passed on.
        """


class Rules(Protocol):
    """How membership events make a `Membership`."""

    version: str
    """Changes whenever the same events may give another membership than before."""

    def concerns(self, event_type: str) -> bool:
        """Whether events of this type are membership events."""

    def derive(self, events: Sequence[Event]) -> Membership:
        """The membership after these events, which are all there are, in canonical order.

        An event that its author had no right to, or that lies beyond its author's cut, has no
        effect; that cuts reach back to events that sort earlier is this function's business.
        """


class Verify(Protocol):
    """Checks signatures with the keys that a membership, or the event itself, introduces."""

    def __call__(self, event: Event, membership: Membership) -> bool | None:
        """Whether `event.signature` covers `event.signed_bytes`; None when the key is unknown yet.

        An event with an unknown author waits a while for the event that introduces it. A founding
        event may introduce its own author's key, as a node id is a key's hash.
        """
