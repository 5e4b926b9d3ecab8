"""How much of everything one link may hold, and how long. Enforced elsewhere.

Both sides of a link must agree on `chunk_bytes`, `window` and the two tensor limits: they are part
of the protocol. The rest is local policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mesh.accounts.ledger import ResourceLedger

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one link; bytes unless the name says otherwise.

    A receiver holds at most `reassembly_bytes` of incomplete tensors, `unanswered_bytes` plus one
    tensor of complete but unanswered ones, and a window of chunks. A sender holds at most
    `queued_bytes`; above `high_water_bytes` `drain` waits.

    A link pings every `ping_interval_s`, is lost after `silence_s` without a byte, and has to be
    open `handshake_s` after the TCP connection. A server holds at most `half_open` connections that
    are not open yet, and `half_open_per_host` of one address. How many links one node may open, and
    what all of them may hold together, is on its account among `accounts`; a server without any
    has `mesh.accounts.allowances.LINKS`.
    """

    chunk_bytes: int = MIB
    window: int = 16
    tensor_bytes: int = 64 * MIB
    reassembly_bytes: int = 64 * MIB
    unanswered_bytes: int = 64 * MIB
    control_bytes: int = 256 * KIB
    hello_bytes: int = 16 * KIB
    high_water_bytes: int = 8 * MIB
    queued_bytes: int = 256 * MIB
    ping_interval_s: float = 5.0
    silence_s: float = 20.0
    handshake_s: float = 5.0
    half_open: int = 256
    half_open_per_host: int = 16
    accounts: ResourceLedger | None = field(default=None, repr=False, compare=False)

    @property
    def message_bytes(self) -> int:
        """The largest websocket message: one chunk (or control body) and the headers before it."""
        return max(self.chunk_bytes, self.control_bytes) + KIB

    @property
    def unread_bytes(self) -> int:
        """Encoded bytes that may wait for a peer that does not read, before we stop reading it.

        More than a full window, so that two honest peers never stop reading each other at once.
        """
        return (self.window + 1) * self.message_bytes + self.high_water_bytes


DEFAULT_LIMITS = Limits()
"""Of a link for tensors."""

CONTROL_LIMITS = replace(
    DEFAULT_LIMITS,
    # No frame of a control link bears a tensor: a message is a control body at most.
    chunk_bytes=DEFAULT_LIMITS.control_bytes,
    tensor_bytes=0,
    reassembly_bytes=0,
    unanswered_bytes=0,
    high_water_bytes=2 * MIB,
    queued_bytes=8 * MIB,
)
"""Of a link between daemons."""

WEIGHTS_LIMITS = replace(
    DEFAULT_LIMITS,
    # Answers come in blobs of one chunk, and are read as they come.
    tensor_bytes=DEFAULT_LIMITS.chunk_bytes,
    reassembly_bytes=0,
    unanswered_bytes=0,
    high_water_bytes=2 * MIB,
    queued_bytes=16 * MIB,
)
"""Of a link over which weights are fetched."""
