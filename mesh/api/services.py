"""The services that the HTTP API needs of the daemon, as protocols, and the API's settings.

The composition root provides the implementations; the API knows nothing of how they work.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from mesh.accounts.ledger import ResourceLedger
from mesh.hearth.listing import LogFilter
from mesh.transfers.pulls import Pulls
from mesh.types import GenerationRequest, LayerRange, StreamFrame

LOADING = "loading"
"""The `reason` of a model that will be runnable by itself."""


RESTING = "at rest (COLD); `hearthnet run` or a trusted key wakes it"
"""The `reason` of a model of a deployment that rests."""

NOT_HELD = "not held here (--model)"
"""The `reason` of a model that others hold by hand."""

ON_CALL = "deployed; its ends come when it is asked"
"""The `reason` of a model of a deployment that nobody has asked here."""


class LackKind(StrEnum):
    """What kind of thing is missing before requests can be answered."""

    LOADING = "loading"
    """It comes by itself."""
    LAYERS = "layers"
    """No node serves them."""
    FAILED = "failed"
    """A process or a load of this node."""


class Lack(NamedTuple):
    """One thing that is missing, and its sentence without a full stop."""

    code: LackKind
    said: str


class Generations(Protocol):
    """Runs generations."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[StreamFrame, None]:
        """An async generator of frames, `Done` last.

        MeshError may be raised before or between frames. ``aclose()`` cancels the generation on
        every hop.
        """

    async def lens(self, request: GenerationRequest, top: int) -> dict[str, Any]:
        """``{"prompt_tokens", "layers": [{"layer", "node", "top": [{"token", "logprob"}]}]}``: the
        `top` likeliest tokens behind the request's text, after each layer. May raise MeshError."""

    async def count(self, request: GenerationRequest) -> int:
        """How many tokens the request's prompt has; waits as `load` does. May raise MeshError."""

    async def load(self, request: GenerationRequest) -> None:
        """Wait until the request's model can be asked, as `generate` does. May raise MeshError."""


class MeshView(Protocol):
    """Snapshots of the mesh as this node sees it, ready for JSON."""

    def status(self) -> dict[str, Any]:
        """The whole picture.

        ``{"node": {"id", "name", "software", "started_at", "api", "api_tls": {"sha256",
        "certificate": its file, "expires": ISO time} | None, "endpoint", "state_dir", "enabled",
        "paused", "hearth": {"id", "name"} | None, "away": [{"id", "name", "last_seen": ISO 8601 |
        None, not since this start}] of members that are no row of "peers", "interfaces": [{"name",
        "address", "network", "used", "why"}] on which others are met, and those left out; none
        with the mesh off,
        "memory_cap": {"limit_mb", "taken_mb", "setting"} of what models may take | None},
        "peers": [...], "models": [...], "shards": [local shards],
        "memory": {"free_mb", "total_mb", "bound", "ram_mb"} of the device, or the first | None,
        "devices": [{"device", "free_mb", "total_mb", "bound"}] where there are several,
        "processes": [{"name", "state", "pid", "silent_s", "starts", "ending"}], "sessions": [{
        "node_id", "node", "purpose", "token_id"} of whoever uses them], "generations":
        [{"id", "model", "route": [{"shard_id", "node", "layers", "p50_ms", "p95_ms",
        "compute_p50_ms"}], "failovers", "queued": its place in line | 0, "prompt_tokens", "tokens",
        "tokens_per_second" of the latest | None, "first_token_ms" | None, "age_s"}],
        "deployments": as `DeploymentControl.view`, "weights": {"models", "transfers",
        "sent_bytes"} as `FetcherSupervisor.facts` and "elsewhere": [{"node_id", "node",
        "model_id", "weights_sha256", "done_bytes", "total_bytes", "bytes_per_s", "eta_s"}] of what
        other nodes say that they fetch, "loads":
        [{"name", "process", "need_mb", "age_s", "phase", "done_bytes", "total_bytes"}] of what
        is being loaded here and how far, "accounts": [{"where": a process or a shard, "principals":
        [{"kind", "name", "node": a peer's name, "refused": how often, "resources": {NAME: {"held"
        or "used", "limit", ...}}}], "more"}], "reasons": [why a value was detected, what did not
        load and why], "warnings": [...]}``

        A generation's id is not its answer's, by which the stream could be resumed.
        """

    def peers(self) -> list[dict[str, Any]]:
        """``{"id", "name", "address", "state", "reason", "verdict", "rtt_ms", "software", "skew":
        "older", "newer" or "another" version than this node's | None, "shards": [{"shard_id",
        "model_id", "layers", ...}]}`` for each peer."""

    def models(self) -> list[dict[str, Any]]:
        """``{"id", "total_layers", "runnable": bool, "missing": ["8-11"], "reason": why it is not
        runnable | None, "context": how many tokens a prompt and its answer may have, by the model
        and by its shards' caches | None, "level": HOT, WARM or COLD, "nodes": [...],
        "local": bool, "rests_at": as of its deployment, "weights_sha256", "checkpoint": {"format",
        "family", "dtype", "parameters", "bytes", "modified_at"} | None of one that is not on this
        disk, "abilities": ["tools", "thinking", "embedding"] beside chatting | None while that is
        not known}`` for each model that anybody holds."""

    def privacy(self) -> dict[str, Any]:
        """``{"routes": [{"model", "request": a generation's id | None for the next one, "hops":
        [{"node", "layers", "sight": "this machine", "exact", "blurred" or "recoverable",
        "is_checkable"}], "missing"}], "precautions": settings that help, "words": lines}``."""

    def readiness(self) -> list[Lack]:
        """What is missing before a request can be answered; empty when ready."""

    def batches(
        self, after: int | None, *, pace_s: float, idle_s: float
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Lists of events ``{"id": int, "type": str, "at": ISO time, ...}`` as they happen, without
        end, at least `pace_s` apart; also an empty one when the status may have changed, at the
        latest after `idle_s`.

        A bounded history is replayed first: what came after event `after`, nothing for None.
        """

    def metrics(self) -> bytes:
        """Prometheus' text format."""


class HearthControl(Protocol):
    """The hearth's members and the verbs that change them; every method may raise MeshError."""

    def view(self) -> dict[str, Any]:
        """``{"id", "name", "self", "is_member", "two_signatures", "members": [{"node_id",
        "short_id", "fingerprint", "name", "let_in_as": str | None, "level", "added_by", "self",
        "state": ``this node``, ``away`` or as a peer's, "last_seen": of one that is away}],
        "pending": [{"node_id", "name", "action", "voters", "needed"}], "out": [{"node_id", "name",
        "why", "forked_at"}], "models": [...], "shards": [...]}``: members, who is out and why, and
        the log's record. A member's `name` is what it calls itself; `let_in_as` what it was let in
        as, where that is another."""

    async def log(self, wanted: LogFilter) -> dict[str, Any]:
        """``{"decisions": [ROW], "facts": [ROW], "next": what `after` is of the next page |
        None}``, newest first. A ROW is ``{"id", "kind": decision or fact, "author", "author_name",
        "at", "type", "place", "says"}``."""

    async def invite(self, level: str | None, ttl_s: float | None) -> dict[str, Any]:
        """Open a window for one node to join: ``{"code", "link", "qr", "level", "ttl_s", "host",
        "port"}``."""

    async def invitation(self, port: int) -> dict[str, Any]:
        """``{"open", "ending", "node_id", "name", "level", "before", "error"}`` of the window at
        `port`, once it has ended or after half a minute; `level` is what the node is now, `before`
        what it was if it was in already; `error`: why nobody came in who had the code."""

    async def close_invitation(self) -> dict[str, Any]:
        """Shut the open window: ``{"open": False}``."""

    async def join(self, code: str, peer: str | None) -> dict[str, Any]:
        """Join another's hearth: ``{"id", "name", "level"}`` of that which this node is in now, and
        what it is there."""

    async def promote(self, who: str, level: str | None) -> dict[str, Any]:
        """Raise a member's level: ``{"done", "action", "votes_missing", "member"}``; `who` is a
        name or an id."""

    async def demote(self, who: str, level: str | None) -> dict[str, Any]:
        """Lower a member's level: ``{"done", "action", "votes_missing", "member"}``."""

    async def revoke(self, who: str, reason: str) -> dict[str, Any]:
        """Put a member out: ``{"done", "action", "votes_missing", "member"}``."""

    async def leave(self) -> dict[str, Any]:
        """Take this node out, into a new hearth of its own: ``{"left": the hearth's name,
        "remain": [members], "told": [names of those that know], "founded": the new one's name,
        "recovery_code"}``."""

    async def readmit(self, who: str) -> dict[str, Any]:
        """Let a member that signed two histories decide again; as `promote`."""

    async def recover(self, code: str) -> dict[str, Any]:
        """Make this node the only anchor: ``{"anchor": member, "demoted": [names]}``."""

    async def revoke_token(self, token_id: str) -> dict[str, Any]:
        """Revoke a session's token: ``{"token_id"}``; it ends, wherever in the hearth it runs."""


class SteeringControl(Protocol):
    """The hearth's named steering edits; every method may raise MeshError."""

    def view(self) -> list[dict[str, Any]]:
        """``{"name", "model_id", "weights_sha256", "path", "side", "kind", "sha256", "size",
        "author", "author_name"}`` of each."""

    async def publish(
        self, name: str, model: str, path: str, side: str, tensors: bytes
    ) -> dict[str, Any]:
        """What `view` then says of it, without its author; `tensors` is a safetensors file."""

    async def remove(self, name: str) -> dict[str, Any]:
        """``{"name", "removed": true}``"""


class HarvestControl(Protocol):
    """Activations of many prompts, left on the nodes that computed them."""

    async def run(self, model: str, order: dict[str, Any]) -> dict[str, Any]:
        """Of an ``{"run", "batch", "module", "texts", "max_tokens"}``: ``{"batch",
        "weights_sha256", "prompts": [token ids], "cut": [numbers of prompts], "files": [{"node",
        "node_name", "file", "module", "rows", "width", "dtype", "bytes", "sha256"}]}``. May raise
        MeshError."""


class DeploymentControl(Protocol):
    """What the hearth wishes to have loaded; the verbs may raise MeshError."""

    def view(self) -> list[dict[str, Any]]:
        """``{"deployment", "merged": [ids of deployments that it stands for as well], "model_id",
        "weights_sha256", "total_layers", "replicas", "replicas_ready", "dedicated", "quant",
        "context", "minimum_s", "keep_alive_s", "in_use", "rests_at": the ISO time when it rests
        unless it is used | None, "nodes": [ids], "layers": [pins], "level": HOT, WARM or COLD,
        "resting", "state", "missing", "epoch", "why", "error", "by", "wished_at", "spans":
        [{"replica", "node_id", "node", "layers", "phase", "done_bytes", "total_bytes",
        "bytes_per_s", "eta_s", "reason", "error"}]}`` of each; what `nodes` and `layers` say is as
        an order may have it. Those that are still to be wished for, as their models are read first,
        are among them; `error` says why that did not come to it."""

    async def deploy(self, order: dict[str, Any]) -> dict[str, Any]:
        """Of the fields of `mesh.api.deployments.DeployBody` that were given: its row of `view`,
        with "gaps": [{"node", "drops", "loads"}], layers that a machine drops before it loads
        others, so that nobody serves them in between."""

    async def wake(self, model: str, *, may_wake: bool) -> bool:
        """Have up what rests, for who may; whether it rested."""

    async def scale(self, model: str, replicas: int) -> dict[str, Any]:
        """As `deploy`."""

    async def evict(self, model: str) -> list[dict[str, Any]]:
        """``{"deployment", "model_id", "evicted": true}`` of each that ends."""


class ReachView(Protocol):
    """Who can open connections to whom."""

    async def look(self) -> dict[str, Any]:
        """``{"peers": [{"id", "name", "address", "state", "out": [PORT] that this node tried there,
        "back": [PORT] that the peer tried here | None where it is not linked or did not,
        "back_unknown": why a linked one did not, "ahead_s": how far its clock is ahead | None}]}``
        of those that are linked or should be. A PORT is ``{"what": "nodes", "layers" or "weights",
        "port", "why": "timed out", "refused", other words, or None where it is open}``. Tries it
        now, which takes seconds."""


class PlanControl(Protocol):
    """What it would be like to deploy a model; changes nothing."""

    async def plan(self, order: dict[str, Any]) -> dict[str, Any]:
        """Of the fields of `mesh.api.plan.PlanBody` that were given: ``{"model_id",
        "weights_sha256", "total_layers", "quant", "context", "streams", "positions", "dedicated",
        "replicas": [{"shards": [{"node_id", "node", "device", "format", "layers", "positions",
        "need": {"weights", "caches", "head_room", "total"}, "have", "decode_ms", "hop_ms",
        "fetch_bytes", "gap"}], "token_ms", "head_ms", "asker_ms", "tokens_per_second",
        "all_tokens_per_second", "first_token_ms", "bottleneck": {"what", "node", "ms", "share",
        "help"}}], "machines": [{"node_id", "node", "free_bytes", "total_bytes", "layers_that_fit",
        "used", "why"}], "refusal": {"code", "message", "fix", "missing_bytes", "node"} | None,
        "others_rest": whether it fits once other deployments rest, and not before}``. Sizes are
        bytes. May raise
        MeshError."""


@dataclass(frozen=True, slots=True)
class ReadyQuestion:
    """Whether a model is ready: with these weights, or with any; these layers of it, or all. The
    answer may take `wait_s` seconds."""

    model: str
    weights_sha256: str | None = None
    layers: LayerRange | None = None
    wait_s: float = 0.0


class CoordinationView(Protocol):
    """Who holds which model, as this node knows it."""

    async def view(self) -> dict[str, Any]:
        """``{"store", "reachable", "error": why the store is not | None, "unwritten": workers,
        "models": [{"model_name", "weights_sha256", "published_at", "workers": [{"worker_rank",
        "holder", "kind": "shard" | "checkpoint", "layers", "endpoint", "tensor_count": None of a
        neighbour, which does not say, "published_at", "ready", "stability_verified"}]}]}``. Raises
        CoordinationError where there is no memory in front of the store."""

    async def when_ready(self, question: ReadyQuestion) -> dict[str, Any]:
        """The model, as one of `view`, with its ready workers only, once it is ready. Raises
        NotReady when it is not in time, BadRequest for layers that it does not have."""


@dataclass(frozen=True, slots=True)
class Services:
    """What is served beside chat, the hearth and jobs."""

    steering: SteeringControl
    harvests: HarvestControl
    deployments: DeploymentControl
    plans: PlanControl
    coordination: CoordinationView
    pulls: Pulls
    reach: ReachView


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """The API's limits, keys and intervals.

    `host` is the address it is bound to. `api_key` is the owner's key, which may do everything;
    None for no such key. With `keyless`, callers on loopback may chat and intervene without a key.
    A stream that has nothing to say sends a comment every `ping_s` seconds. A request's head and
    body must have come within their limits; a client that takes nothing of an answer for
    `unread_timeout_s` is cut off, and no more than `max_opening` may be about to speak TLS. What
    callers use is counted on `accounts`, by default on some of the API's own.
    """

    host: str = "127.0.0.1"
    api_key: str | None = None
    keyless: bool = True
    ping_s: float = 10.0
    max_body_bytes: int = 4 << 20
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    unread_timeout_s: float = 60.0
    max_connections: int = 512
    max_opening: int = 256
    kept_streams: int = 32
    accounts: ResourceLedger | None = field(default=None, repr=False, compare=False)
