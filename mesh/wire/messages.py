"""What two nodes say to each other, as plain data. Knows nothing of sockets or torch.

A new message is one class here, and its number in `mesh.wire.frames.FrameType`. The class states
the frame that carries it and the links that it belongs on; its annotations are all that `control`
reads and writes by, its fields in their order are the keys of the body.

The tensor path is hub and spoke: the asker opens a session on each hop (`Open`, `Opened`), sends it
`Step`s and gets one `Result` or `Failure` for each. A decode step is one frame each way.

`session` is a number the asker picks, unique on its link. `step` grows by one per step of a
session; a hop that sees the last step again repeats its answer. `position` is where the step's
first row stands: a hop whose cache is longer cuts it to `position` first (rollback); a step beyond
the cache's end is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from mesh.codec import Int63, Sha256, UInt32
from mesh.types import WireDtype
from mesh.wire.frames import FrameType

PROTOCOL_VERSION = 1

TENSORS, CONTROL, WEIGHTS, EVERY = "tensors", "control", "weights", ""
"""The purposes of links, and all of them."""

Digest = Annotated[str, Meta(max_length=128)]
ModelName = Annotated[str, Meta(max_length=512)]
Token = Annotated[str, Meta(max_length=2048)]
Reason = Annotated[str, Meta(max_length=1024)]

MAX_CANDIDATES, MAX_HEAD_ROWS = 1024, 256
"""What an `OpenEnds` may ask for."""


class Message:
    """Root of all messages. Those with a `frame` travel as its control body, on links for `link`;
    the others have a binary form of their own (`steps`, `protocol`)."""

    __slots__ = ()
    frame: ClassVar[FrameType]
    link: ClassVar[str]

    def __init_subclass__(cls, frame: FrameType | None = None, link: str = TENSORS) -> None:
        super().__init_subclass__()
        if frame is not None:
            cls.frame, cls.link = frame, link
        if "frame" in cls.__dict__:  # without the keywords for the class that `slots` makes anew
            CONTROL_MESSAGES[cls.frame] = cls


CONTROL_MESSAGES: dict[FrameType, type[Message]] = {}
"""The message of each control body."""


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A dense row-major little-endian tensor; ``len(data)`` is the shape's product * itemsize."""

    dtype: str  # "fp16" | "fp32" | "bf16" | "int8"
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview
    gradient: bool = False


@dataclass(frozen=True, slots=True)
class Hello(Message, frame=FrameType.HELLO, link=EVERY):
    """First message of each side. `purpose` is ``tensors`` (asker to shard), ``control``, or
    ``weights`` (who fetches a checkpoint to who has it).

    `fields` carries what a purpose adds (listening port, hearth id, limits); unknown keys are kept
    and ignored, so that older nodes understand newer ones.
    """

    node_id: Annotated[str, Meta(max_length=128)]
    node_name: Annotated[str, Meta(max_length=128)]
    purpose: Annotated[str, Meta(max_length=32)]
    software: Annotated[str, Meta(max_length=64)]
    version: UInt32 = PROTOCOL_VERSION
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bye(Message, frame=FrameType.BYE, link=EVERY):
    """The sender closes the link on purpose."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Answered at once with a `Pong` of the same token; measures the round trip."""

    token: int


@dataclass(frozen=True, slots=True)
class Pong(Message):
    """The answer to `Ping`."""

    token: int


@dataclass(frozen=True, slots=True)
class OpenPart(Message, frame=FrameType.OPEN_PART):
    """Bytes that the next `Open` of this session speaks of; those of several parts are joined."""

    session: UInt32
    data: bytes


@dataclass(frozen=True, slots=True)
class Open(Message, frame=FrameType.OPEN):
    """Ask for a session on layers [start, stop) of a checkpoint, with `max_tokens` positions.

    It gets more as its steps need them, while there is room; a step that finds none fails with
    cache_full, and the session is as before. Hosts of earlier versions give no more.

    `edits` are changes of hidden states, see `mesh.models.edits`; what they consist of has come
    before in `OpenPart`s. `token` says that the sender may, see `mesh.shard.permits`.
    `harvest`, a batch as `mesh.models.harvest` has it, is what the hop writes to its own disk.
    """

    session: UInt32
    model_id: ModelName
    weights_sha256: Digest
    start: UInt32
    stop: UInt32
    max_tokens: UInt32
    wire_dtype: WireDtype
    edits: list[dict[str, Any]] = field(default_factory=list)
    harvest: dict[str, Any] = field(default_factory=dict)
    token: Token = ""


@dataclass(frozen=True, slots=True)
class OpenEnds(Open, frame=FrameType.OPEN_ENDS):
    """As `Open`, for an asker without the model's embedding and head: the host runs them.

    With `ids` steps bear token ids; with `candidates` results bear the so many strongest next
    tokens of a step's last rows (`since`, `rows`), as `mesh.wire.token_rows` has both. Only for
    hosts whose shard says `embeds`, or `head`.
    """

    ids: bool = False
    candidates: Annotated[int, Meta(ge=0, le=MAX_CANDIDATES)] = 0
    rows: Annotated[int, Meta(ge=0, le=MAX_HEAD_ROWS)] = 0
    since: UInt32 = 0


@dataclass(frozen=True, slots=True)
class OpenNormed(OpenEnds, frame=FrameType.OPEN_NORMED):
    """As `OpenEnds`, but results are rows behind the final norm. Only where a shard `norms`."""


@dataclass(frozen=True, slots=True)
class Loading(Message, frame=FrameType.LOADING):
    """The session was admitted, and the weights it needs are being read; `Opened` follows."""

    session: UInt32


@dataclass(frozen=True, slots=True)
class Opened(Message, frame=FrameType.OPENED):
    """The session is ready and counts as one stream from now on."""

    session: UInt32
    max_tokens: UInt32


@dataclass(frozen=True, slots=True)
class OpenTaps(Message, frame=FrameType.OPEN_TAPS):
    """Ask for an intervention session on layers [start, stop) of a checkpoint, where `Blob`s are
    said (`mesh.shard.taps.server`). Answered with `Opened` or `Failure`. `token` as in `Open`."""

    session: UInt32
    model_id: ModelName
    weights_sha256: Digest
    start: UInt32
    stop: UInt32
    token: Token = ""


@dataclass(frozen=True, slots=True)
class Step(Message):
    """Run `tensor` (1, rows, row size) at positions position..position+rows-1."""

    session: int
    step: int
    position: int
    tensor: WireTensor


@dataclass(frozen=True, slots=True)
class Result(Message):
    """The rows after the hop's last layer, as many; times as spent on the hop."""

    session: int
    step: int
    tensor: WireTensor
    compute_us: int
    queue_us: int


@dataclass(frozen=True, slots=True)
class RowAsk(Message, frame=FrameType.ROW_ASK):
    """Ask a session with `candidates` for all logits at `position`, one of those that its last
    result has some of. Answered as a step is: the `Result` of number `step` is fp32 (1, 1, vocab).
    """

    session: UInt32
    step: UInt32
    position: UInt32


class BlobKind(IntEnum):
    """Which way the bytes of a `Blob` go."""

    QUESTION = 1
    ANSWER = 2


@dataclass(frozen=True, slots=True)
class Blob(Message):
    """A part of `length` bytes, the one that begins at `offset`.

    An asker sends a question in parts, and gets its answer in parts. Who has a part and is owed
    more asks for it: with a blob of the same kind without data, at the offset of the next one. A
    host answers instead with a `Failure` what it does not take; all of the question is then void.
    An asker that owes and is owed nothing may send an empty answer to say that it is still there.
    """

    session: int
    kind: BlobKind
    length: int
    offset: int
    data: bytes | bytearray | memoryview = b""

    @property
    def end(self) -> int:
        """Where the next part begins; `length` when there is none."""
        return self.offset + len(self.data)

    @property
    def tensor(self) -> WireTensor:
        """The bytes in the form in which a link sends them."""
        return WireTensor("int8", (len(self.data),), self.data)


@dataclass(frozen=True, slots=True)
class Park(Message, frame=FrameType.PARK):
    """Keep the session's cache but give its stream back until `Resume`."""

    session: UInt32


@dataclass(frozen=True, slots=True)
class Resume(Message, frame=FrameType.RESUME):
    """Take a stream for a parked session again, with room for at least `max_tokens` positions.

    Answered with `Opened` or `Failure`.
    """

    session: UInt32
    max_tokens: UInt32


@dataclass(frozen=True, slots=True)
class CopyPrefix(Message, frame=FrameType.COPY_PREFIX):
    """Have a session that was fed nothing yet begin as session `source` of this link does, with its
    first `positions` positions. Answered with `PrefixCopied` or `Failure`.

    Sent only to hosts whose hello says `COPIES`.
    """

    session: UInt32
    source: UInt32
    positions: UInt32


@dataclass(frozen=True, slots=True)
class PrefixCopied(Message, frame=FrameType.PREFIX_COPIED):
    """The session holds so many `positions` now: as many as were asked for, fewer, or none."""

    session: UInt32
    positions: UInt32


@dataclass(frozen=True, slots=True)
class Seal(Message, frame=FrameType.SEAL):
    """All rows of the session's harvest were sent. Answered with `Sealed` or `Failure`."""

    session: UInt32


@dataclass(frozen=True, slots=True)
class Sealed(Message, frame=FrameType.SEALED):
    """The harvest is on the hop's disk: module, file, rows, dtype, sha256 and more of each file."""

    session: UInt32
    files: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Close(Message, frame=FrameType.CLOSE):
    """Free the session now; a running step's result is dropped. Never answered."""

    session: UInt32


@dataclass(frozen=True, slots=True)
class Failure(Message, frame=FrameType.FAILURE):
    """A `mesh.errors.MeshError` as `to_dict` gives it, about a step, a session or the link."""

    error: dict[str, Any]
    session: UInt32 | None = None
    step: UInt32 | None = None


@dataclass(frozen=True, slots=True)
class Advertise(Message, frame=FrameType.ADVERTISE, link=CONTROL):
    """All shards the sender serves now, as it signed them; replaces the last one.

    See `mesh.events.ephemera` for the form, `mesh.discovery.notices` for what it says.
    """

    body: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Gossip(Message, frame=FrameType.GOSSIP, link=CONTROL):
    """Something about the event log, as `mesh.events.messages` writes and reads it."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FileAsk(Message, frame=FrameType.FILE_ASK, link=CONTROL):
    """Ask another daemon for a part of the steering edit whose file has this hash."""

    number: UInt32
    sha256: Annotated[str, Meta(max_length=64)]
    offset: UInt32


@dataclass(frozen=True, slots=True)
class FilePart(Message, frame=FrameType.FILE_PART, link=CONTROL):
    """The answer to the `FileAsk` of this number; empty when there is nothing to give."""

    number: UInt32
    data: bytes


class Part(StrEnum):
    """What of a checkpoint is asked for."""

    DOCUMENT = "document"
    """What `mesh.transfers.documents` says of it."""
    FILE = "file"
    """One of its small files."""
    HEADER = "header"
    """The beginning of one of its weights files, up to the first tensor."""
    TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class WeightsAsk(Message, frame=FrameType.WEIGHTS_ASK, link=WEIGHTS):
    """Ask for the bytes [start, stop) of a part of a checkpoint, or what there is of them.

    Answered in `Blob`s that follow one another, whose `length` is that of the whole answer and
    whose offsets count from `start`; or with `Failure`. Questions of a link are answered in order.
    """

    session: UInt32
    weights_sha256: Sha256
    part: Part
    name: Annotated[str, Meta(max_length=512)]
    start: Int63
    stop: Int63


@dataclass(frozen=True, slots=True)
class Drain(Message, frame=FrameType.DRAIN):
    """The shard host is about to stop: running sessions go on, but should move while they can.

    An empty reason takes it back.
    """

    reason: Reason


Bearer = Step | Result | Blob
"""The messages that bear a tensor, or bytes in the form of one."""
