"""Every error hearthnet raises on purpose.

MeshError
├─ ConfigError        BadValue  UnknownKey
├─ NotRunning  PortInUse  AlreadyRunning
├─ IdentityError      KeyUnreadable  BadKey  UntrustedPeer  PairingRejected  TokenRejected
├─ WireError          BadFrame  FrameTooLarge  VersionMismatch  LinkLost  ConnectFailed
│                     BadAdvertisement  PeerRefused
├─ EventLogError      BadEvent  LogCorrupt  SchemaTooNew  LogFull  LogForked  LogBehind  LogRefused
├─ RouteError         NoRoute (shard_unavailable)  WeightsMismatch  ExperimentalDisabled
├─ ShardError         ModelNotFound  BadCheckpoint  UnsupportedFamily  CacheFull  DeviceFailed
│                     SessionGone  ShardCorrupt
├─ GenerationError    BadRequest  ContextTooLong  PipelineStalled  Busy
├─ ApiError           Unauthorized  Forbidden  NotFound  MethodNotAllowed  BodyTooLarge
│                     QuotaExceeded
├─ JailError          JailUnavailable  PolicyViolation
└─ InternalError      a child process failed in a way that nobody foresaw

Each carries a stable `code`, an HTTP status, whether trying again may help, and `fix`: what the
reader can do. Raise at the place that knows; translate once at each edge.
"""

from __future__ import annotations

from typing import Any


class MeshError(Exception):
    """Root of the tree. `message` says what is wrong in one sentence, `fix` what to do about it."""

    code = "internal"
    http_status = 500
    retryable = False

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


class ConfigError(MeshError):
    """Root for settings that cannot be used."""

    code = "bad_config"
    http_status = 400


class BadValue(ConfigError):
    """A setting has a value of the wrong form."""

    code = "bad_value"


class UnknownKey(ConfigError):
    """A setting or field nobody knows."""

    code = "unknown_key"


class NotRunning(MeshError):
    """No daemon answers at the expected address."""

    code = "not_running"
    http_status = 503
    retryable = True


class AlreadyRunning(MeshError):
    """A daemon already uses this state directory."""

    code = "already_running"
    http_status = 409


class PortInUse(MeshError):
    """Something else listens on the wanted port."""

    code = "port_in_use"
    http_status = 409


class IdentityError(MeshError):
    """Root for this node's own key."""

    code = "identity_error"


class KeyUnreadable(IdentityError):
    """The node key cannot be read, or others on this machine could read it too."""

    code = "key_unreadable"


class BadKey(IdentityError):
    """The key file holds something else than one Ed25519 private key."""

    code = "bad_key"


class UntrustedPeer(IdentityError):
    """The node at the other end did not prove that it is the member it should be."""

    code = "untrusted_peer"
    http_status = 403


class PairingRejected(IdentityError):
    """Pairing failed; `param` says at what: code, window, busy, protocol, timeout, refused."""

    code = "pairing_rejected"
    http_status = 403


class TokenRejected(IdentityError):
    """A capability token does not entitle its holder; `param` names the check that failed."""

    code = "token_rejected"
    http_status = 401


class WireError(MeshError):
    """Root for links between nodes."""

    code = "wire_error"
    http_status = 502
    retryable = True


class BadFrame(WireError):
    """A frame broke the protocol; the link is closed after a nack with this reason."""

    code = "bad_frame"
    retryable = False


class FrameTooLarge(BadFrame):
    """A frame or tensor exceeds the limit both sides agreed on."""

    code = "frame_too_large"


class VersionMismatch(WireError):
    """The two ends speak different protocol versions."""

    code = "version_mismatch"
    retryable = False


class LinkLost(WireError):
    """The connection ended while something was still expected on it."""

    code = "link_lost"


class ConnectFailed(WireError):
    """No link could be opened in time."""

    code = "connect_failed"


class BadAdvertisement(WireError):
    """A peer's advertisement is malformed; `param` names the field. The link stays."""

    code = "bad_advertisement"
    retryable = False


class PeerRefused(WireError):
    """The node at the other end is not one to link with: its hello says so, or there is no room."""

    code = "peer_refused"
    retryable = False


class EventLogError(MeshError):
    """Root for the signed event log."""

    code = "event_log"


class BadEvent(EventLogError):
    """Bytes that are no event of this version, or a payload that cannot be one."""

    code = "bad_event"
    http_status = 400


class LogCorrupt(EventLogError):
    """The log's file is damaged beyond what a repair gives back."""

    code = "log_corrupt"


class SchemaTooNew(EventLogError):
    """A newer hearthnet has written this log."""

    code = "schema_too_new"


class LogFull(EventLogError):
    """The disk took no more; nothing that was acknowledged is lost, reading goes on."""

    code = "log_full"
    http_status = 507
    retryable = True


class LogForked(EventLogError):
    """This node has signed two events with one sequence number; no peer takes more from it."""

    code = "log_forked"
    http_status = 409


class LogBehind(EventLogError):
    """This node has signed more than its log holds: a restored backup, or a copied key."""

    code = "log_behind"
    http_status = 409


class LogRefused(EventLogError):
    """The hearth would not take this event from this node."""

    code = "log_refused"
    http_status = 403


class RouteError(MeshError):
    """Root for requests that no set of shards can serve."""

    code = "route_error"
    http_status = 503
    retryable = True


class NoRoute(RouteError):
    """No shard covers a needed layer range, or all that do are at their limit."""

    code = "shard_unavailable"


class WeightsMismatch(RouteError):
    """Shards advertise different weights under one model id."""

    code = "weights_mismatch"
    http_status = 409
    retryable = False


class ExperimentalDisabled(RouteError):
    """Distributed inference is switched off on this node."""

    code = "experimental_disabled"
    http_status = 403
    retryable = False


class ShardError(MeshError):
    """Root for what a shard host cannot do."""

    code = "shard_error"


class ModelNotFound(ShardError):
    """No such model here or on any peer."""

    code = "model_not_found"
    http_status = 404


class BadCheckpoint(ShardError):
    """The checkpoint directory cannot be used: truncated, pickled, incomplete."""

    code = "bad_checkpoint"
    http_status = 400


class UnsupportedFamily(ShardError):
    """The architecture cannot be cut into spans; the message says why."""

    code = "bad_request"
    http_status = 400


class CacheFull(ShardError):
    """The shard has no room for another session's cache."""

    code = "cache_full"
    http_status = 503
    retryable = True


class ShardCorrupt(ShardError):
    """A hop answered what no honest one can: NaN, Inf, an absurd norm or shape, or a lie."""

    code = "shard_corrupt"
    http_status = 502
    retryable = True


class NotEnoughMemory(ShardError):
    """The layers do not fit; the message says what they need and what there is."""

    code = "not_enough_memory"
    http_status = 503


class SessionGone(ShardError):
    """The hop no longer has this session's cache; replay it into a new one."""

    code = "session_gone"
    http_status = 503
    retryable = True


class DeviceFailed(ShardError):
    """The device ran out of memory or failed; the shard restarts."""

    code = "device_failed"
    http_status = 503
    retryable = True


class GenerationError(MeshError):
    """Root for what is wrong with one request."""

    code = "generation_error"


class BadRequest(GenerationError):
    """The request is malformed; `param` names the field."""

    code = "bad_request"
    http_status = 400


class ContextTooLong(GenerationError):
    """Prompt plus wanted tokens exceed what the model or the hops can hold."""

    code = "context_length_exceeded"
    http_status = 400


class PipelineStalled(GenerationError):
    """No progress within the time limit."""

    code = "pipeline_stalled"
    http_status = 504
    retryable = True


class Busy(GenerationError):
    """A concurrency limit is reached."""

    code = "busy"
    http_status = 429
    retryable = True


class ApiError(MeshError):
    """Root for HTTP requests refused before anybody looked at what they ask."""

    code = "api_error"
    http_status = 400


class Unauthorized(ApiError):
    """The API key is missing or wrong."""

    code = "unauthorized"
    http_status = 401


class Forbidden(ApiError):
    """The request's Host or Origin is not this API's."""

    code = "forbidden"
    http_status = 403


class NotFound(ApiError):
    """No such path."""

    code = "not_found"
    http_status = 404


class MethodNotAllowed(ApiError):
    """The path exists but not with this method."""

    code = "method_not_allowed"
    http_status = 405


class BodyTooLarge(ApiError):
    """The request's body exceeds the limit."""

    code = "body_too_large"
    http_status = 413


class QuotaExceeded(ApiError):
    """The API key's quota is used up for now; `param` names it."""

    code = "quota_exceeded"
    http_status = 429
    retryable = True


class JailError(MeshError):
    """Root for code that may not run here, or not like this."""

    code = "jail_error"


class JailUnavailable(JailError):
    """No process for a job: the jail did not start, or its walls are too weak for this key."""

    code = "jail_unavailable"
    http_status = 503
    retryable = True


class PolicyViolation(JailError):
    """A job's code uses something that its key is not trusted with; `param` is the line."""

    code = "policy_violation"
    http_status = 400


class InternalError(MeshError):
    """A bug, or a child process that died; details are in the log."""

    code = "internal"


class RemoteError(MeshError):
    """An error of another process or node whose code has no class here."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(str(fields.get("message", "")), fix=str(fields.get("fix", "")))
        self.code = str(fields.get("code", "internal"))
        self.retryable = bool(fields.get("retryable", False))


def from_dict(fields: dict[str, Any]) -> MeshError:
    """Rebuild an error from `MeshError.to_dict`; unknown codes become RemoteError."""
    wanted = fields.get("code")
    for known in _LEAVES:
        if known.code == wanted:
            param = fields.get("param")
            return known(
                str(fields.get("message", "")),
                fix=str(fields.get("fix", "")),
                param=None if param is None else str(param),
            )
    return RemoteError(fields)


_LEAVES: tuple[type[MeshError], ...] = (
    BadValue, UnknownKey, NotRunning, AlreadyRunning, PortInUse, KeyUnreadable, BadKey,
    BadAdvertisement, PeerRefused, BadFrame, FrameTooLarge,
    VersionMismatch, LinkLost, ConnectFailed, NoRoute, WeightsMismatch, ExperimentalDisabled,
    ModelNotFound, BadCheckpoint, BadRequest, CacheFull, SessionGone, DeviceFailed, NotEnoughMemory,
    ShardCorrupt,
    BadEvent, LogCorrupt, SchemaTooNew, LogFull, LogForked, LogBehind, LogRefused,
    ContextTooLong, PipelineStalled, Busy, Unauthorized, Forbidden, NotFound, MethodNotAllowed,
    BodyTooLarge, JailUnavailable, PolicyViolation, InternalError, UntrustedPeer, PairingRejected, TokenRejected, QuotaExceeded,
)  # fmt: skip
