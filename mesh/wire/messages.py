"""What two nodes say to each other, as plain data. Knows nothing of frames, sockets or torch.

The tensor path is hub and spoke: the asker opens a session on each hop (`Open`, `Opened`), sends it
`Step`s and gets one `Result` or `Failure` for each. A decode step is one frame each way.

`session` is a number the asker picks, unique on its link. `step` grows by one per step of a
session; a hop that sees the last step again repeats its answer. `position` is where the step's
first row stands: a hop whose cache is longer cuts it to `position` first (rollback); a step beyond
the cache's end is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mesh.types import WireDtype

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A dense row-major little-endian tensor; ``len(data)`` is the shape's product * itemsize."""

    dtype: str  # "fp16" | "fp32" | "bf16" | "int8"
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview
    gradient: bool = False


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of each side. `purpose` is ``tensors`` (asker to shard) or ``control``.

    `fields` carries what a purpose adds (listening port, hearth id, limits); unknown keys are kept
    and ignored, so that older nodes understand newer ones.
    """

    node_id: str
    node_name: str
    purpose: str
    software: str
    version: int = PROTOCOL_VERSION
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bye:
    """The sender closes the link on purpose."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Answered at once with a `Pong` of the same token; measures the round trip."""

    token: int


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to `Ping`."""

    token: int


@dataclass(frozen=True, slots=True)
class OpenPart:
    """Bytes that the next `Open` of this session speaks of; those of several parts are joined."""

    session: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Open:
    """Ask for a session on layers [start, stop) of a checkpoint, with `max_tokens` positions.

    It gets more as its steps need them, while there is room; a step that finds none fails with
    cache_full, and the session is as before. Hosts of earlier versions give no more.

    `edits` are changes of hidden states, see `mesh.models.edits`; what they consist of has come
    before in `OpenPart`s. `token` says that the sender may, see `mesh.shard.permits`.
    `harvest`, a batch as `mesh.models.harvest` has it, is what the hop writes to its own disk.
    """

    session: int
    model_id: str
    weights_sha256: str
    start: int
    stop: int
    max_tokens: int
    wire_dtype: WireDtype
    edits: list[dict[str, Any]] = field(default_factory=list)
    token: str = ""
    harvest: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loading:
    """The session was admitted, and the weights it needs are being read; `Opened` follows."""

    session: int


@dataclass(frozen=True, slots=True)
class Opened:
    """The session is ready and counts as one stream from now on."""

    session: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class OpenTaps:
    """Ask for an intervention session on layers [start, stop) of a checkpoint.

    Answered with `Opened` or `Failure`. Its steps are bytes, see `mesh.shard.taps.server`. `token`
    as in `Open`.
    """

    session: int
    model_id: str
    weights_sha256: str
    start: int
    stop: int
    token: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """Run `tensor` (1, rows, hidden) at positions position..position+rows-1."""

    session: int
    step: int
    position: int
    tensor: WireTensor


@dataclass(frozen=True, slots=True)
class Result:
    """The hidden states after the hop's last layer, same rows; times as spent on the hop."""

    session: int
    step: int
    tensor: WireTensor
    compute_us: int
    queue_us: int


@dataclass(frozen=True, slots=True)
class Park:
    """Keep the session's cache but give its stream back until `Resume`."""

    session: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Take a stream for a parked session again, with room for at least `max_tokens` positions.

    Answered with `Opened` or `Failure`.
    """

    session: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Seal:
    """All rows of the session's harvest were sent. Answered with `Sealed` or `Failure`."""

    session: int


@dataclass(frozen=True, slots=True)
class Sealed:
    """The harvest is on the hop's disk: module, file, rows, dtype, sha256 and more of each file."""

    session: int
    files: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Close:
    """Free the session now; a running step's result is dropped. Never answered."""

    session: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A `mesh.errors.MeshError` as `to_dict` gives it, about a step, a session or the link."""

    error: dict[str, Any]
    session: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Advertise:
    """All shards the sender serves now, as it signed them; replaces the last one.

    See `mesh.events.ephemera` for the form, `mesh.discovery.notices` for what it says.
    """

    body: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Gossip:
    """Something about the event log, as `mesh.events.messages` writes and reads it."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FileAsk:
    """Ask another daemon for a part of the steering edit whose file has this hash."""

    number: int
    sha256: str
    offset: int


@dataclass(frozen=True, slots=True)
class FilePart:
    """The answer to the `FileAsk` of this number; empty when there is nothing to give."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Drain:
    """The shard host is about to stop: running sessions go on, but should move while they can.

    An empty reason takes it back.
    """

    reason: str


Message = (
    Hello | Bye | Ping | Pong | OpenPart | Open | OpenTaps | Loading | Opened | Step | Result | Park
    | Resume | Seal | Sealed | Close | Failure | Advertise | Gossip | FileAsk | FilePart | Drain
)  # fmt: skip
