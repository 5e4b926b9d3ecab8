"""What a job and a shard say to each other in an intervention session: a class for each message.

The job says one, a `TapRequest`, and the shard answers with one, a `TapReply`. A forward
(`TapSpan`, `TapCall`) answers with `TapHit`, `TapDrill` or `TapMore` where it stands still, goes on
with `TapResume` or ends with `TapAbort`, and answers with `TapDone` or `TapAborted` at its end; all
other requests are answered at once with a `TapValue`. Each may be answered with a `TapRefusal`.

`value`, `changed`, `observed` and what else is `Any` here are values as `mesh.shard.taps.codec`
writes them, and entries of tensors; it reads them one by one. A location is the path of a module
from its layer's number on, with what is seen there: ``3.mlp.output``. A visit is how often it was
passed before. The classes' fields are the keys of a message's header, their tag its ``op``.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from mesh import codec
from mesh.codec import Buffer, Int63
from mesh.shard.taps.codec import Buffers, malformed, pack, unpack

_encoder = msgspec.msgpack.Encoder()
_MOST = 1 << 17
_LONGEST = 1000

Location = Annotated[str, Meta(max_length=_LONGEST)]
Locations = Annotated[list[Location], Meta(max_length=_MOST)]
Wanted = tuple[Location, list[Int63]]
Passed = tuple[Location, Int63]
Growth = tuple[Int63, Int63, Int63, Int63, int]
"""A cache's number, its first layer and the one behind its last, sequences, positions added."""


class _Message(Struct, kw_only=True, tag_field="op"):
    """`sizes` are the bytes of the tensors behind the header, in their order."""

    sizes: list[Int63] = []


class _Request(_Message, kw_only=True):
    """`free` are the numbers of caches and `unreachable` those of joints that nobody asks for any
    more. `release`: a trace has ended."""

    free: list[Int63] = []
    unreachable: list[Int63] = []
    release: bool = False


class _Turn(_Request, kw_only=True):
    """A value on its way into a forward, with the tensors that were `changed` in place since.

    `grad` is whether a graph is built from here on. The forward stands still at the visits in
    `want`, counted from this message on, and tells of the locations in `obs`, None: of the same as
    before, with their history where `obs_grad`. Operations in `sourced` are opened up.
    """

    value: Any = None
    changed: list[Any] = []
    grad: bool = False
    want: Annotated[list[Wanted], Meta(max_length=_MOST)] = []
    obs: Locations | None = None
    obs_grad: bool = False
    sourced: Locations = []


class _Forward(_Turn, kw_only=True):
    """`watch`: somebody may look at what is inside. `attn` is transformers' name of an
    attention."""

    watch: bool = False
    attn: str = "sdpa"


class TapSpan(_Forward, tag="span", kw_only=True):
    """Run the layers from `start` up to `stop` over hidden states and the arguments of groups of
    layers; `calls` are the groups' numbers, layer by layer. `between`: give the states between them
    as well; `capture` what transformers collects by these names."""

    start: Int63
    stop: Int63
    calls: Annotated[list[Int63], Meta(max_length=_MOST)]
    between: bool = False
    capture: list[str] = []


class TapCall(_Forward, tag="call", kw_only=True):
    """Run the module at `path` over arguments."""

    path: str


class TapResume(_Turn, tag="resume", kw_only=True):
    """Go on with this in the place of what was shown."""


class TapAbort(_Request, tag="abort", kw_only=True):
    """End the forward that stands still."""

    grad: bool | None = None


class TapBackward(_Request, tag="backward", kw_only=True):
    """What arrives of `grad`, at the joint with this number, at each of the `earlier` ones."""

    joint: Int63
    grad: Any
    earlier: list[Int63]


class TapWeight(_Request, tag="weight", kw_only=True):
    """The weight or buffer of this `name` of the module at `path`."""

    path: str
    name: str


class TapCacheOperation(_Request, tag="cacheop", kw_only=True):
    """Do what transformers calls `name` to a cache, with the arguments in `args`."""

    cache: Int63
    name: str
    args: Any
    grad: bool = True


class TapCacheContents(_Request, tag="kv", kw_only=True):
    """Keys and values of one layer of a cache."""

    cache: Int63
    layer: Int63


TapForward = TapSpan | TapCall
TapAtOnce = TapBackward | TapWeight | TapCacheOperation | TapCacheContents
TapRequest = TapForward | TapResume | TapAbort | TapAtOnce


class _Reply(_Message, kw_only=True):
    """`sources` are the joints that joints depend on, by their number, of those that are told first
    in this message."""

    sources: list[tuple[Int63, list[Int63]]] = []


class _OfForward(_Reply, kw_only=True):
    """`grad` is whether a graph is built now, `kv` what caches have grown by since it was told
    last."""

    grad: bool | None = None
    kv: list[Growth] = []


class _Standing(_OfForward, kw_only=True):
    """What happened since the last message: how often which locations were passed (a number stands
    for a pattern that was told with it before), what was observed where, which tensors were changed
    in place; and the value that it is about."""

    # Bounds on a number beside a tuple crash the garbage collection of msgspec 0.22.
    visits: int | tuple[int, list[Passed]]
    observed: list[tuple[Location, Any]] = []
    changed: list[Any] = []
    value: Any = None


class TapHit(_Standing, tag="hit", kw_only=True):
    """The value at a location that was wanted."""

    provider: Location


class TapSource(Struct):
    """What an operation calls: a ``function`` with its text, the `names` of the operations in it
    and their `lines`; a ``module``, nnsight's ``bind``, or ``none`` that has a source, and
    `why`."""

    kind: str
    names: list[str] = []
    lines: list[tuple[str, Int63]] = []
    source: str = ""
    why: str = ""


class TapDrill(_Standing, tag="drill", kw_only=True):
    """What the operation at a location calls."""

    provider: Location
    info: TapSource


class TapMore(_Standing, tag="more", kw_only=True):
    """Much was observed: there is more to come."""


class TapDone(_Standing, tag="done", kw_only=True):
    """What came out of the forward."""


class TapAborted(_Standing, tag="aborted", kw_only=True):
    """It was ended."""


class TapValue(_Reply, tag="value", kw_only=True):
    """What was asked for."""

    value: Any = None


class TapRefusal(_OfForward, tag="error", kw_only=True, omit_defaults=True):
    """It was not done, or ended so; `error` as `MeshError.to_dict` has it."""

    error: dict[str, Any]


TapStop = TapHit | TapDrill | TapMore | TapDone | TapAborted
TapReply = TapStop | TapValue | TapRefusal


def to_bytes(message: TapRequest | TapReply, buffers: Buffers) -> bytes:
    """The bytes of a message and its tensors. Raises BadRequest for what cannot go."""
    message.sizes = list(map(len, buffers))
    try:
        header = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise malformed(str(error)) from error
    return pack(header, buffers)


def read_request(message: Buffer) -> tuple[TapRequest, Buffers]:
    """What a job asks, and the tensors of that. Raises BadRequest."""
    header, buffers = unpack(message)
    request: TapRequest = _read(header, TapRequest)
    return request, buffers


def read_reply(message: Buffer) -> tuple[TapReply, Buffers]:
    """What a shard answers, and the tensors of that. Raises BadRequest."""
    header, buffers = unpack(message)
    reply: TapReply = _read(header, TapReply)
    return reply, buffers


def _read(header: dict[str, Any], form: Any) -> Any:
    try:
        return codec.convert(header, form)
    except codec.Fault as fault:
        raise malformed(str(fault)) from fault
