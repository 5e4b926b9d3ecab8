"""A link between two nodes as the code above the wire sees it, whatever carries it.

`Link` sends messages, `LinkHandler` gets them. Messages are delivered by plain calls in the event
loop's thread, in order, without a task in between: a task switch costs more than a decode step's
whole framing.
"""

from __future__ import annotations

from typing import Protocol

from mesh.errors import MeshError
from mesh.wire.messages import Hello, Message


class LinkHandler(Protocol):
    """What happens with what arrives on one link."""

    def message(self, message: Message) -> None:
        """One message; Hello, Ping/Pong keepalive and flow control never get here."""

    def closed(self, error: MeshError | None) -> None:
        """The link is gone, called once; `error` is None after a `Bye` or our own close."""


class Link(Protocol):
    """One live connection after both hellos."""

    @property
    def peer(self) -> Hello:
        """The other side's hello."""

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be sent any more."""

    @property
    def rtt_ms(self) -> float | None:
        """The last measured round trip, None before the first."""

    @property
    def silent_s(self) -> float:
        """Seconds since anything last arrived, keepalive included."""

    def send(self, message: Message) -> None:
        """Queue one message. Raises LinkLost when closed; never blocks.

        What the peer's window does not admit yet is kept; `drain` tells when there is room again.
        """

    async def drain(self, timeout_s: float) -> None:
        """Wait until less than the high-water mark is queued. Raises PipelineStalled, LinkLost."""

    def close(self, reason: str = "") -> None:
        """Say bye and close; safe to call twice."""
