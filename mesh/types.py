"""The vocabulary that every package shares: ids, layer ranges, shard advertisements.

Plain data only. Nothing here does I/O, reads a clock or imports torch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import total_ordering
from ipaddress import IPv6Address
from itertools import pairwise
from typing import Annotated, Any, Final, NewType

from msgspec import Meta

from mesh.codec import MAX_TEXT, Sha256, Text, printable

NodeId = NewType("NodeId", str)
ModelId = NewType("ModelId", str)
ShardId = NewType("ShardId", str)
Endpoint = NewType("Endpoint", str)
"""Where a shard listens: ``wss://HOST:PORT``."""

_ENDPOINT = re.compile(
    r"wss://(\[[0-9A-Fa-f:.]{2,45}(%[\w.-]{1,15})?\]|[A-Za-z0-9._-]{1,253}):(\d{1,5})"
)


def is_whole(text: str, digits: int) -> bool:
    """Whether that is a whole number of at most so many digits: what others send may have more
    than Python reads, and of other scripts."""
    return text.isascii() and text.isdecimal() and len(text) <= digits


def is_port(text: str) -> bool:
    """Whether that names one."""
    return is_whole(text, 5) and 0 < int(text) < 65536


def _can_be_listened_at(endpoint: str) -> None:
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or not is_port(endpoint.rpartition(":")[2]):
        raise ValueError("must be wss://HOST:PORT")
    try:
        if found[1].startswith("["):
            IPv6Address(found[1][1:-1])
        else:
            found[1].encode("idna")
    except ValueError:
        raise ValueError(f"must name a host, not {found[1]!r}") from None


def _is_in_utc(moment: datetime) -> None:
    try:
        moment.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("must be a time in UTC") from error


HALVED_FORMAT = "halved"
"""Of weights that stay in the 16 bits they are stored in where a CPU computes them in fp32."""

MAX_LAYERS = 10_000
MAX_COUNT = 2**31 - 1

# As they come from outside (`mesh.codec`).
_TEXT = Meta(min_length=1, max_length=MAX_TEXT)
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Milliseconds = Annotated[float, Meta(ge=0, le=MAX_COUNT)]
Moment = Annotated[datetime, Meta(tz=True), _is_in_utc]
ModelName = Annotated[ModelId, _TEXT, printable]
Address = Annotated[Endpoint, _TEXT, printable, _can_be_listened_at]
"""Of a node in this machine's network."""


def host_port(host: str, port: int | str) -> str:
    """``HOST:PORT``, an IPv6 address in brackets, as RFC 3986 has it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_INCLUSIVE = re.compile(r"(\d{1,6})-(\d{1,6})")


class PrincipalKind(StrEnum):
    """What a principal is, and so what its name says."""

    PEER = "peer"
    """Another node, by its id."""
    KEY = "key"
    """An API key, by its id; the one of this node's owner is called `OWNER`."""
    LOCAL = "local"
    """Somebody on this machine without a key: ``uid:1000``, or a name of this connection only."""
    NODE = "node"
    """This node itself: its probes and checks."""


OWNER = "owner"
_CONNECTION = "connection:"


@dataclass(frozen=True, slots=True)
class Principal:
    """On whose behalf something is asked. What is kept for one is never used for another."""

    kind: PrincipalKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> Principal:
        """The inverse of `str`. Raises ValueError."""
        kind, _, name = text.partition(":")
        return cls(PrincipalKind(kind), name)

    @classmethod
    def user(cls, uid: int) -> Principal:
        """A user of this machine."""
        return cls(PrincipalKind.LOCAL, f"uid:{uid}")

    @classmethod
    def connection(cls, nonce: str) -> Principal:
        """Whoever is at the other end of one connection from this machine, unknown otherwise."""
        return cls(PrincipalKind.LOCAL, _CONNECTION + nonce)

    @property
    def account(self) -> Principal:
        """Who pays, and whose jobs and streams these are.

        Unknown users are one account: one for each connection would give to him most who opens
        most. What tells them apart there is an id that only one of them was told.
        """
        if self.kind is PrincipalKind.LOCAL and self.name.startswith(_CONNECTION):
            return ANONYMOUS
        return self


ANONYMOUS = Principal(PrincipalKind.LOCAL, "anonymous")
"""All users of this machine together of whom no more is known."""

THIS_NODE = Principal(PrincipalKind.NODE, "self")


def shown_id(secret_id: str) -> str:
    """A name for what must not be asked for by everybody who hears of it: 16 hexadecimal digits."""
    return hashlib.sha256(secret_id.encode()).hexdigest()[:16]


class WireDtype(StrEnum):
    """How activations are written between nodes."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


HIDDEN_DTYPES: frozenset[str] = frozenset(WireDtype)
"""What a tensor of hidden states between nodes says that it is made of."""


@total_ordering
class LayerRange:
    """A contiguous range of decoder layers, half-open: ``start <= layer < stop``.

    Outside memory, in messages, shard ids and on screen, the same range is inclusive text,
    ``lo-hi``; `parse` and `str` convert. Raises ValueError when the range is empty or negative.
    """

    # No dataclass: `mesh.codec` would take its fields for its form.
    __slots__ = ("start", "stop")

    def __init__(self, start: int, stop: int) -> None:
        if not 0 <= start < stop:
            raise ValueError(f"layer range [{start}, {stop}) is empty or negative")
        self.start: Final = start
        self.stop: Final = stop

    @classmethod
    def parse(cls, text: str) -> LayerRange:
        """Read the inclusive form ``lo-hi``; ValueError when it is anything else."""
        match = _INCLUSIVE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a layer range; expected LO-HI, for example 0-7")
        if int(match[1]) > int(match[2]):
            raise ValueError(f"{text!r} ends before it begins; expected LO-HI, for example 0-7")
        return cls(int(match[1]), int(match[2]) + 1)

    def __str__(self) -> str:
        return f"{self.start}-{self.stop - 1}"

    def __repr__(self) -> str:
        return f"LayerRange({self.start}, {self.stop})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerRange):
            return NotImplemented
        return self.start == other.start and self.stop == other.stop

    def __lt__(self, other: LayerRange) -> bool:
        return (self.start, self.stop) < (other.start, other.stop)

    def __hash__(self) -> int:
        return hash((self.start, self.stop))

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.start <= layer < self.stop

    @classmethod
    def runs(cls, layers: Iterable[int]) -> tuple[LayerRange, ...]:
        """Ascending layers as the fewest ranges."""
        found: list[LayerRange] = []
        for layer in layers:
            start = found.pop().start if found and found[-1].stop == layer else layer
            found.append(cls(start, layer + 1))
        return tuple(found)

    def lacking(self, held: Iterable[LayerRange]) -> list[LayerRange]:
        """The parts of it that none of these cover, in order."""
        gaps, at = [], self.start
        for layers in sorted(held):
            if at < min(layers.start, self.stop):
                gaps.append(LayerRange(at, min(layers.start, self.stop)))
            at = max(at, layers.stop)
        return [*gaps, LayerRange(at, self.stop)] if at < self.stop else gaps

    def covers(self, other: LayerRange) -> bool:
        """Whether every layer of `other` is in this range."""
        return self.start <= other.start and other.stop <= self.stop

    def parts(self, count: int) -> list[LayerRange]:
        """So many even parts, in their order; fewer where there are fewer layers."""
        count = min(count, len(self))
        cuts = [self.start + len(self) * part // count for part in range(count + 1)]
        return [LayerRange(start, stop) for start, stop in pairwise(cuts)]

    def overlaps(self, other: LayerRange) -> bool:
        """Whether they have a layer in common."""
        return self.start < other.stop and other.start < self.stop


def shard_id(model_id: ModelId, layers: LayerRange, copy: int = 0) -> ShardId:
    """``<model_id>:<lo>-<hi>``, inclusive; of a further copy there with ``#<copy>`` behind."""
    return ShardId(f"{model_id}:{layers}" + (f"#{copy}" if copy else ""))


def copy_of(shard: ShardId) -> int:
    """Which copy of the same layers on its node a shard is, from 0 on, by what `shard_id` gave."""
    _, mark, number = shard.rpartition(":")[2].partition("#")
    return int(number) if mark and number.isascii() and number.isdecimal() else 0


@dataclass(frozen=True, slots=True)
class ShardDescriptor:
    """One shard as its host advertises it.

    `weights_sha256` is the hash of the whole checkpoint (see `mesh.models.manifest`): shards of one
    route must agree on it. `determinism_class` names what the last bits of a result depend on
    (architecture, dtype, kernels, threads, library versions). `vram_required_mb` is what it takes
    of its device when its caches are full (`ShardMemory.total_mb`). `embeds`: its sessions from
    layer 0 on may take token ids; `head`: those up to the last layer may answer with the strongest
    next tokens, and where it `norms` with rows behind the final norm. All are for askers that hold
    no ends. `kv_tokens` is how many positions its caches
    have, 0 where its host does not say. `halved`: `dtype` is fp32, and its weights have 16 bits.
    `quant` is the format that was asked for, and `own_quant` that of its host's settings, which it
    has where nobody asks for one; '' where its host does not say. In steps of up to `short_rows`
    rows each has the bits that it has alone, and in longer ones it may have others; 0 where no such
    number is known. `device` is what its host calls the one that it is on; '' where it does not
    say.
    """

    shard_id: Annotated[ShardId, _TEXT, printable]
    model_id: ModelName
    weights_sha256: Sha256
    layers: LayerRange
    total_layers: Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
    vram_required_mb: Count
    max_concurrent_streams: Count
    host: Annotated[NodeId, _TEXT, printable]
    node_name: Text
    endpoint: Address
    dtype: Text
    determinism_class: Text
    advertised_at: Moment
    embeds: bool = False
    head: bool = False
    kv_tokens: Count = 0
    halved: bool = False
    quant: Annotated[str, Meta(max_length=MAX_TEXT), printable] = ""
    own_quant: Annotated[str, Meta(max_length=MAX_TEXT), printable] = ""
    short_rows: Count = 0
    device: Annotated[str, Meta(max_length=MAX_TEXT), printable] = ""
    norms: bool = False

    @property
    def format(self) -> str:
        """Its weights', as `mesh.capacity.Speed` names it."""
        return HALVED_FORMAT if self.halved else self.dtype


@dataclass(frozen=True, slots=True)
class ShardMemory:
    """Memory of a shard on its device, in MiB: its weights in every form they are held in, the
    caches of its sessions, and what computing takes beside them."""

    weights_mb: Count = 0
    caches_mb: Count = 0
    headroom_mb: Count = 0

    @property
    def total_mb(self) -> int:
        """All of it."""
        return self.weights_mb + self.caches_mb + self.headroom_mb


@dataclass(frozen=True, slots=True)
class ShardHealth:
    """What a shard reports of itself. Latencies are milliseconds per recent step of chats. `jobs`
    are those of nnsight clients that use it now, `jobs_so_far` all that have."""

    online: bool
    last_seen: Moment
    p50_latency_ms: Milliseconds
    p95_latency_ms: Milliseconds
    queue_depth: Count
    active_streams: Count
    memory: ShardMemory | None = None
    """What it takes now; None when its host does not say."""
    jobs: Count = 0
    jobs_so_far: Count = 0


@dataclass(frozen=True, slots=True)
class RouteHop:
    """One shard's part in a route: the layers of it that this request uses."""

    shard: ShardDescriptor
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The shards picked for one request, in layer order. Never persisted."""

    model_id: ModelId
    weights_sha256: str
    total_layers: int
    hops: tuple[RouteHop, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults are greedy decoding.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0, `repetition_penalty` 1 and the other
    penalties' 0 switch the respective rule off. `logit_bias` is what is added to the logits of
    single tokens, by their ids. `logprobs` is how many alternatives to report per token; None
    reports no log-probabilities at all. `fits_context`: `max_tokens` may be more than there is
    room for.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    fits_context: bool = False


@dataclass(frozen=True, slots=True)
class Site:
    """Where hidden states pass in a decoder layer: `side` (output or input) of `part` of `layer`.

    An empty `part` is the layer itself, whose output is the residual stream behind it.
    """

    layer: int
    part: str = ""
    side: str = "output"


@dataclass(frozen=True, slots=True)
class Edit:
    """A steering edit as one request wants it: `data`, times `strength`, at `site`.

    `data` is a safetensors file as `mesh.models.edits` reads it.
    """

    site: Site
    strength: float
    data: bytes


@dataclass(frozen=True, slots=True)
class Steer:
    """The wish to apply a published steering edit, by its name."""

    name: str
    strength: float = 1.0


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that an answer may call.

    `tools` are as OpenAI has them, for the model's own chat template. With `parallel` the answer
    may call several; without, it ends with the first call. `in_pieces`: a call is told while it is
    written, and not only once it is whole and known to be well formed. `required`: the answer must
    be a call, of the `named` function if there is one. Calls of the functions in `strict` have
    arguments as their schemas say.
    """

    tools: tuple[dict[str, Any], ...]
    parallel: bool = True
    in_pieces: bool = True
    required: bool = False
    named: str = ""
    strict: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request for a continuation. Exactly one of `messages`, `prompt`, `prompt_ids` is set.

    `messages` are OpenAI chat messages (role, content, and around calls of `tools` tool_calls and
    tool_call_id) for the model's own chat template. `steer` names edits; whoever looks them up puts
    `edits` in its place. `begun` is what the answer to `messages` has said already. `draft`: tokens
    may be guessed and checked several at a time, which changes how fast the answer comes.
    `principal` is who asks: caches that this request leaves are for its follow-ups only.
    `may_wake`: a model at rest may be loaded for it. `schema` is the JSON schema of its answer,
    or `pattern` a regular expression in the syntax of Rust that all of it matches; `bound_by` is
    the field that says so, for errors.
    `echo`: the prompt is given back first, in `PromptPiece`s, with its log-probabilities where
    `sampling` asks for any. `trace_id` is what the log calls it, no secret as `request_id` may be.
    `think`: whether the model is to think before it answers `messages`; None leaves it to its chat
    template, as one that has no switch for it does anyway. `effort`: how hard it is to, for a
    template that asks; empty leaves it to that. `keeps_thoughts`: whether it is shown what it
    thought in earlier turns, likewise. `truncates`: the oldest of `messages` may be left
    out where the context has no room for all, or the end of a `prompt`. `embeds`: the embedding of
    the prompt is wanted, and no token.
    """

    request_id: str
    model: ModelId
    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    wire_dtype: WireDtype | None = None
    fallback_to_local: bool | None = None
    steer: tuple[Steer, ...] = ()
    edits: tuple[Edit, ...] = ()
    principal: Principal = THIS_NODE
    begun: str = ""
    draft: bool = True
    may_wake: bool = False
    tools: ToolUse | None = None
    schema: dict[str, Any] | None = None
    pattern: str | None = None
    bound_by: str = "response_format.json_schema.schema"
    echo: bool = False
    trace_id: str = ""
    think: bool | None = None
    effort: str = ""
    keeps_thoughts: bool | None = None
    truncates: bool = False
    embeds: bool = False

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt's own tokens are wanted."""
        return self.echo and self.sampling.logprobs is not None

    @property
    def reads_prompt(self) -> bool:
        """Whether what the last hop makes of the prompt's tokens is wanted, which caches have no
        more, and nobody goes on with the text."""
        return self.scores_prompt or self.embeds


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with the natural-log probability it had and its strongest alternatives.

    Tokens are UTF-8 as in the middle of a text, and may be half a character. The first token of a
    prompt has none: None. What `is_hidden` leaves nothing in the text.
    """

    token_id: int
    token: bytes
    logprob: float | None
    top: tuple[tuple[int, bytes, float], ...] = ()
    is_hidden: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """News of the answer's call number `index`: its `id` and `name` first, then what its
    `arguments`, which are JSON, go on with."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens. `text` may be empty while a character is still incomplete.

    The first of an answer says how many tokens the prompt has, unless `PromptPiece`s did; it is 0
    afterwards. `reasoning` is what the model thinks aloud before its answer, which `text` does not
    repeat, nor `tool_calls`.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_tokens: int = 0
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    type: str = "token_delta"


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """More of a prompt that is given back. The first piece has all of its `text`.

    Where log-probabilities are wanted, `logprobs` and `offsets` are those of `token_ids`: where in
    the whole text each begins, in characters.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    offsets: tuple[int, ...] = ()
    type: str = "prompt_piece"


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """A shard of the route changed its state: ``degraded``, ``full``, ``draining``."""

    shard_id: ShardId
    node: str
    status: str
    reason: str
    type: str = "shard_status"


@dataclass(frozen=True, slots=True)
class ShardFailover:
    """A hop was replaced; the stream goes on where it was. `reason` is the status that its shard
    has, as in `ShardStatus`."""

    lost: ShardId
    replaced_by: tuple[ShardId, ...]
    position: int
    reason: str = "degraded"
    type: str = "shard_failover"


@dataclass(frozen=True, slots=True)
class PipelineAborted:
    """The distributed run ended; what follows is local fallback, an error, or the answer's end."""

    reason: str
    type: str = "pipeline_aborted"


@dataclass(frozen=True, slots=True)
class Queued:
    """All shards are full: the request waits for room, as number `position` in line, from 1."""

    position: int
    type: str = "queued"


@dataclass(frozen=True, slots=True)
class HopTiming:
    """Per-step medians of one hop in milliseconds: compute there, everything else between. `mb_s`
    is at what rate long steps came and went, 0 where there were none."""

    shard_id: ShardId
    node: str
    layers: str
    steps: int
    p50_ms: float
    p95_ms: float
    compute_p50_ms: float
    mb_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a stream. `finish_reason` is ``stop``, ``length`` or ``tool_calls``; `stopped_by`
    the stop text that was met, if it was one.

    `widened` counts the tensors that overflowed the wire dtype and travelled wider. `note` says why
    an answer ended where neither the model nor the request wanted it to. Of `drafted_tokens`, which
    were guessed and computed with the token before, `accepted_tokens` were right. `left_out` counts
    the oldest messages that the context had no room for. `embedding` is what the whole prompt comes
    to as one vector, one long, where that was wanted: fp32, the lowest byte first.
    """

    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    token_ids: tuple[int, ...]
    route: tuple[RouteHop, ...]
    failovers: int
    fallback: bool
    first_token_ms: float
    tokens_per_second: float
    hops: tuple[HopTiming, ...]
    construct_ms: float = 0.0
    widened: int = 0
    note: str = ""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    stopped_by: str = ""
    left_out: int = 0
    embedding: bytes = b""
    type: str = "done"

    @property
    def asker_ms(self) -> float:
        """Milliseconds of a token that were not waited for at hops; 0 where none was timed."""
        if self.tokens_per_second <= 0:
            return 0.0
        return max(0.0, 1000 / self.tokens_per_second - sum(hop.p50_ms for hop in self.hops))


@dataclass(frozen=True, slots=True)
class BringingUp:
    """The model is not up yet: it waits (QUEUED), its weights are fetched (PROVISIONING, `percent`
    of their bytes are there) or loaded (DEPLOYING)."""

    model: ModelId
    phase: str
    percent: int | None = None
    type: str = "bringing_up"


StreamFrame = (
    TokenDelta
    | PromptPiece
    | Queued
    | BringingUp
    | ShardStatus
    | ShardFailover
    | PipelineAborted
    | Done
)
"""What a running generation emits, in order; `Done` is always the last."""
