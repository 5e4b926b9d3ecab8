"""Every error hearthnet raises on purpose: one tree below `MeshError`.

Each carries a stable `code`, an HTTP status, whether trying again may help, and `fix`: what the
reader can do. Raise at the place that knows; translate once at each edge. A new error is one class.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

SAME_VERSION = "Run the same hearthnet version on both machines."
"""The fix where one node does not understand another."""

_BY_CODE: dict[str, type[MeshError]] = {}
"""The class an error comes back as: of two that share a code, the first."""


class MeshError(Exception):
    """Root of the tree. `message` says what is wrong in one sentence, `fix` what to do about it.

    A class states in its head what differs from its base: `code`, `http_status`, `retryable`.
    """

    code: str = "internal"
    http_status: int = 500
    retryable: bool = False

    def __init_subclass__(
        cls, *, code: str = "", http_status: int = 0, retryable: bool | None = None
    ) -> None:
        super().__init_subclass__()
        if code:
            cls.code = code
            _BY_CODE.setdefault(code, cls)
        if http_status:
            cls.http_status = http_status
        if retryable is not None:
            cls.retryable = retryable

    def __init__(self, message: str, *, fix: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.param = param

    def __str__(self) -> str:
        return f"{self.message} {self.fix}" if self.fix else self.message

    def to_dict(self) -> dict[str, Any]:
        """The wire form: code, message, fix, param, retryable."""
        return {
            "code": self.code,
            "message": self.message,
            "fix": self.fix,
            "param": self.param,
            "retryable": self.retryable,
        }


class InternalError(MeshError, code="internal"):
    """A bug; details are in the log."""


class ProcessLost(InternalError, code="process_lost", http_status=503, retryable=True):
    """A child process ended, or was not there, before it answered what it was asked; another
    takes its place."""


class RemoteError(MeshError):
    """An error of another process or node whose code has no class here."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(str(fields.get("message", "")), fix=str(fields.get("fix", "")))
        self.code = str(fields.get("code", "internal"))
        self.retryable = bool(fields.get("retryable", False))


def from_dict(fields: dict[str, Any]) -> MeshError:
    """Rebuild an error from `MeshError.to_dict`; unknown codes become RemoteError."""
    kind = _BY_CODE.get(str(fields.get("code")))
    if kind is None:
        return RemoteError(fields)
    param, wait_s = fields.get("param"), fields.get("retry_after_s")
    error = kind(
        str(fields.get("message", "")),
        fix=str(fields.get("fix", "")),
        param=None if param is None else str(param),
    )
    if isinstance(error, Busy) and isinstance(wait_s, int):
        error.retry_after_s = wait_s
    return error


MAX_TOLD = 1024
"""Characters of what another node says went wrong."""


def from_peer(fields: dict[str, Any]) -> MeshError:
    """The same of what another node says, whose words make no lines and escapes of their own."""
    return from_dict(
        {
            key: in_one_line(said, MAX_TOLD) if isinstance(said, str) else said
            for key, said in fields.items()
        }
    )


def in_one_line(text: str, most: int) -> str:
    """`text` as it may be told: printable, and cut where it has more than so many characters."""
    text = "".join(each if each.isprintable() else " " for each in text[: most + 1])
    return text if len(text) <= most else f"{text[: most - 1]}…"


async def as_mesh_error(
    work: Awaitable[T], doing: str, otherwise: Callable[[Exception], MeshError] | None = None
) -> T:
    """What `work` gives; `doing` names it.

    Raises MeshError only: what `otherwise` makes of an error stands for what nobody foresaw, by
    default an InternalError.
    """
    from asyncio import CancelledError  # whoever awaits has it; the command line starts without

    try:
        return await work
    except (MeshError, CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as raised:
        logger.exception("%s failed", doing)
        # A panic in Rust, as of a tokenizer, is none to Python, and whoever waits is told as well.
        error = raised if isinstance(raised, Exception) else RuntimeError(str(raised))
        if otherwise is None:
            what = doing[:1].upper() + doing[1:]
            raise InternalError(f"{what} failed: {error}.", fix="See the log.") from error
        raise otherwise(error) from error


# Settings, the running daemon and its identity


class ConfigError(MeshError, code="bad_config", http_status=400):
    """Root for settings that cannot be used."""


class BadValue(ConfigError, code="bad_value"):
    """A setting has a value of the wrong form."""


class UnknownKey(ConfigError, code="unknown_key"):
    """A setting or field nobody knows."""


class NotRunning(MeshError, code="not_running", http_status=503, retryable=True):
    """No daemon answers at the expected address."""


class NodeStopped(MeshError, code="node_stopped", http_status=503, retryable=True):
    """The node was stopped, or asks the model otherwise from now on, and the answer had not ended
    when its `drain_seconds` were over."""


class AlreadyRunning(MeshError, code="already_running", http_status=409):
    """A daemon already uses this state directory."""


class PortInUse(MeshError, code="port_in_use", http_status=409):
    """Something else listens on the wanted port."""


class ServiceRefused(MeshError, code="service_refused"):
    """What starts a user's programs here, such as systemd, refuses or is not there."""


class FileRefused(MeshError, code="file_refused"):
    """The system does not let the command read or write a file: whose it is, or its disk."""


class IdentityError(MeshError, code="identity_error"):
    """Root for this node's own key."""


class KeyUnreadable(IdentityError, code="key_unreadable"):
    """The node key cannot be read, or others on this machine could read it too."""


class BadKey(IdentityError, code="bad_key"):
    """The key file holds something else than one Ed25519 private key."""


class UntrustedPeer(IdentityError, code="untrusted_peer", http_status=403):
    """The node at the other end did not prove that it is the member it should be."""


class PairingRejected(IdentityError, code="pairing_rejected", http_status=403):
    """Pairing failed; `param` says at what: code, window, busy, protocol, timeout, revoked,
    refused."""


class TokenRejected(IdentityError, code="token_rejected", http_status=401):
    """A capability token does not entitle its holder; `param` names the check that failed."""


# Links between nodes, and the log they share


class WireError(MeshError, code="wire_error", http_status=502, retryable=True):
    """Root for links between nodes."""


class BadFrame(WireError, code="bad_frame", retryable=False):
    """A frame broke the protocol; the link is closed after a nack with this reason."""


class FrameTooLarge(BadFrame, code="frame_too_large"):
    """A frame or tensor exceeds the limit both sides agreed on."""


class VersionMismatch(WireError, code="version_mismatch", retryable=False):
    """The two ends speak different protocol versions."""


class LinkLost(WireError, code="link_lost"):
    """The connection ended while something was still expected on it."""


class AddressLost(LinkLost):
    """The connection was at an address that this machine, or the other one, has no longer."""


class ConnectFailed(WireError, code="connect_failed"):
    """No link could be opened in time."""


class BadAdvertisement(WireError, code="bad_advertisement", retryable=False):
    """A peer's advertisement is malformed; `param` names the field. The link stays."""


class PeerRefused(WireError, code="peer_refused", retryable=False):
    """The node at the other end is not one to link with: its hello says so, or there is no room."""


class EventLogError(MeshError, code="event_log"):
    """Root for the signed event log."""


class BadEvent(EventLogError, code="bad_event", http_status=400):
    """Bytes that are no event of this version, or a payload that cannot be one."""


class LogCorrupt(EventLogError, code="log_corrupt"):
    """The log's file is damaged beyond what a repair gives back."""


class SchemaTooOld(EventLogError, code="schema_too_old", http_status=409):
    """The log was written by an older hearthnet, in a form that this one cannot read."""


class SchemaTooNew(EventLogError, code="schema_too_new"):
    """A newer hearthnet has written this log."""


class LogFull(EventLogError, code="log_full", http_status=507, retryable=True):
    """The disk took no more; nothing that was acknowledged is lost, reading goes on."""


class LogForked(EventLogError, code="log_forked", http_status=409):
    """This node has signed two events with one sequence number; no peer takes more from it."""


class LogRefused(EventLogError, code="log_refused", http_status=403):
    """The hearth would not take this event from this node."""


# One generation


class GenerationError(MeshError, code="generation_error"):
    """Root for what is wrong with one request."""


class BadRequest(GenerationError, code="bad_request", http_status=400):
    """The request is malformed; `param` names the field."""


class BadSteering(GenerationError, code="bad_steering", http_status=400):
    """A steering edit cannot be applied to this model; `param` names the field."""


class ContextTooLong(GenerationError, code="context_length_exceeded", http_status=400):
    """Prompt plus wanted tokens exceed what the model or the hops can hold."""

    # Clients that read no codes, LiteLLM for one, know it by OpenAI's words "this model's maximum
    # context length is".


class PipelineStalled(GenerationError, code="pipeline_stalled", http_status=504, retryable=True):
    """No progress within the time limit."""


class Busy(GenerationError, code="busy", http_status=429, retryable=True):
    """A concurrency limit is reached.

    `retry_after_s` is in how many seconds it is not any more, where that is known.
    """

    def __init__(
        self,
        message: str,
        *,
        fix: str,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message, fix=fix, param=param)
        self.retry_after_s = retry_after_s

    def to_dict(self) -> dict[str, Any]:
        """See `MeshError`; with `retry_after_s` where that is known."""
        known = {} if self.retry_after_s is None else {"retry_after_s": self.retry_after_s}
        return {**super().to_dict(), **known}


class LimitReached(Busy, code="limit_reached"):
    """One principal (a node, a key, a local user, a job) holds or uses all that it may.

    The message says who, of what, how much is held, asked and allowed; `param` is the resource.
    """


class QuotaExceeded(LimitReached, code="quota_exceeded"):
    """The API key's quota is used up for now; `param` names it."""


# Routes and shards


class RouteError(MeshError, code="route_error", http_status=503, retryable=True):
    """Root for requests that no set of shards can serve."""


class NoRoute(RouteError, code="shard_unavailable"):
    """No shard covers a needed layer range, or all that do are at their limit."""


class WeightsMismatch(RouteError, code="weights_mismatch", http_status=409, retryable=False):
    """Shards advertise different weights under one model id."""


class ExperimentalDisabled(
    RouteError, code="experimental_disabled", http_status=403, retryable=False
):
    """Distributed inference is switched off on this node."""


class ShardError(MeshError, code="shard_error"):
    """Root for what a shard host cannot do."""


class ModelNotFound(ShardError, code="model_not_found", http_status=404):
    """No such model here or on any peer."""


def nobody_asks(model: str, askable: Iterable[str]) -> ModelNotFound:
    """The error for a model that cannot be asked where these can be."""
    known = ", ".join(sorted(askable)) or "none"
    return ModelNotFound(
        f"This node cannot ask for {model!r}; it can ask for: {known}.",
        fix="Bring it up with `hearthnet deploy`, or ask with `hearthnet run`, which does; see"
        " `hearthnet models`.",
        param="model",
    )


class BadCheckpoint(ShardError, code="bad_checkpoint", http_status=400):
    """The checkpoint directory cannot be used: truncated, pickled, incomplete."""


class WeightsMissing(ShardError, code="weights_missing", http_status=409, retryable=True):
    """A partial checkpoint lacks the tensors that are wanted of it."""


class TransferFailed(ShardError, code="transfer_failed", http_status=502, retryable=True):
    """Weights could not be fetched: nobody has them, or whoever has them gave them wrong."""


class HubRefused(ShardError, code="hub_refused", http_status=502):
    """The Hugging Face hub does not give what was asked for: unknown, not allowed, offline."""


class ModelInUse(ShardError, code="model_in_use", http_status=409):
    """A model's files cannot be removed while this node serves or fetches it."""


class UnsupportedFamily(ShardError, code="bad_request", http_status=400):
    """The architecture cannot be cut into spans; the message says why."""


class CacheFull(ShardError, code="cache_full", http_status=503, retryable=True):
    """The shard has no room for another session's cache."""


class ShardCorrupt(ShardError, code="shard_corrupt", http_status=502, retryable=True):
    """A hop answered what no honest one can: NaN, Inf, an absurd norm or shape, or a lie."""


class WeightsCorrupted(ShardError, code="weights_corrupted", http_status=503, retryable=True):
    """A shard's weights in memory are not those that it loaded; it has stopped serving them."""


class WeightsDamaged(WeightsCorrupted, code="weights_damaged"):
    """Weights on this node's disk are not what was fetched, or read, any more; nobody is given
    them."""


class DiskFull(ShardError, code="disk_full", http_status=507):
    """A file cannot be written, or would exceed what this node gives for such files."""


class NotEnoughMemory(ShardError, code="not_enough_memory", http_status=503, retryable=True):
    """The layers do not fit; the message says what they need and what there is."""


class SessionGone(ShardError, code="session_gone", http_status=503, retryable=True):
    """The hop no longer has this session's cache; replay it into a new one."""


class DeviceFailed(ShardError, code="device_failed", http_status=503, retryable=True):
    """The device ran out of memory, or failed in a way nobody foresaw."""


class DeviceLost(DeviceFailed, code="device_lost"):
    """The device does nothing more for the process that used it, which is replaced."""


# HTTP requests and jobs


class ApiError(MeshError, code="api_error", http_status=400):
    """Root for HTTP requests refused before anybody looked at what they ask."""


class Unauthorized(ApiError, code="unauthorized", http_status=401):
    """The API key is missing or wrong."""


class Forbidden(ApiError, code="forbidden", http_status=403):
    """The request's Host or Origin is not this API's, or its key is not for this."""


class NotFound(ApiError, code="not_found", http_status=404):
    """No such path."""


class NotSupported(ApiError, code="not_supported", http_status=400):
    """A path of another server's API that is not served here; the fix says what to use instead."""


class MethodNotAllowed(ApiError, code="method_not_allowed", http_status=405):
    """The path exists but not with this method."""


class HeadersTooLarge(ApiError, code="headers_too_large", http_status=431):
    """The request has more headers than the limit."""


class TlsRequired(ApiError, code="tls_required", http_status=400):
    """Plain HTTP came to a port that speaks TLS only."""


class UnsupportedClient(ApiError, code="unsupported_client", http_status=426):
    """The client's version is not one that this API serves; the fix says which is."""


class BodyTooLarge(ApiError, code="body_too_large", http_status=413):
    """The request's body exceeds the limit."""


class JailError(MeshError, code="jail_error"):
    """Root for code that may not run here, or not like this."""


class JailUnavailable(JailError, code="jail_unavailable", http_status=503, retryable=True):
    """No process for a job: the jail did not start, or its walls are too weak for this key."""


class PolicyViolation(JailError, code="policy_violation", http_status=400):
    """A job's code uses something that its key is not trusted with; `param` is the line."""


class JobFailed(JailError, code="job_failed", http_status=400):
    """A job ended without a result; the message is what its author should read.

    `took` is what it used until then (fields of a job's report), empty when that is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        fix: str,
        param: str | None = None,
        took: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, fix=fix, param=param)
        self.took: Mapping[str, Any] = took or {}


class StorageFull(MeshError, code="storage_full", http_status=507, retryable=True):
    """A job cannot be kept: the disk, or the part of it that jobs may take, is full or unusable."""


# Coordination: who holds what


class CoordinationError(MeshError, code="coordination_error"):
    """Root for the records of who holds which model, and their stores."""


class StoreUnavailable(
    CoordinationError, code="store_unavailable", http_status=503, retryable=True
):
    """The store of the records does not answer, or not in time; memory goes on without it."""


class StoreRefused(CoordinationError, code="store_refused", http_status=502, retryable=True):
    """The store of the records answers that this node may not, or that something is not set up."""


class StoreClientMissing(CoordinationError, code="store_client_missing"):
    """The Python package that speaks to the configured store is not installed."""


class BadRecord(CoordinationError, code="bad_record", http_status=502):
    """What the store holds is no record of a model; `param` names the field."""


class RankTaken(CoordinationError, code="rank_taken", http_status=409):
    """The rank of a worker belongs to another node."""


class RecordsFull(CoordinationError, code="records_full", http_status=507):
    """There are as many models or workers in the records as a node keeps."""


class NotReady(CoordinationError, code="not_ready", http_status=504, retryable=True):
    """A model's workers were not ready in time; the message says which are missing."""


def no_such_address(host: str, param: str) -> BadValue:
    """Of an address to listen at that is another machine's, or was this one's."""
    return BadValue(
        f"This machine has no address {host} now.",
        fix="Name one that it has (`hearthnet doctor` lists them), or 0.0.0.0 for any of them.",
        param=param,
    )
