"""Every error hearthnet raises on purpose.

MeshError
├─ ConfigError        BadValue  UnknownKey
├─ NotRunning  PortInUse  AlreadyRunning
├─ IdentityError      KeyUnreadable  BadKey  UntrustedPeer  PairingRejected  TokenRejected
├─ WireError          BadFrame  FrameTooLarge  VersionMismatch  LinkLost  ConnectFailed
│                     BadAdvertisement  PeerRefused
├─ EventLogError      BadEvent  LogCorrupt  LogFull  LogForked  LogRefused
│                     SchemaTooNew  SchemaTooOld
├─ RouteError         NoRoute (shard_unavailable)  WeightsMismatch  ExperimentalDisabled
├─ ShardError         ModelNotFound  BadCheckpoint  UnsupportedFamily  CacheFull  DeviceFailed
│                     DeviceLost  SessionGone  ShardCorrupt  WeightsCorrupted  DiskFull
├─ GenerationError    BadRequest  BadSteering  ContextTooLong  PipelineStalled
│                     Busy  LimitReached  QuotaExceeded
├─ ApiError           Unauthorized  Forbidden  NotFound  MethodNotAllowed  BodyTooLarge
│                     HeadersTooLarge  UnsupportedClient  TlsRequired
├─ JailError          JailUnavailable  PolicyViolation  JobFailed
├─ StorageFull        jobs cannot be kept
└─ InternalError      a child process failed in a way that nobody foresaw

Each carries a stable `code`, an HTTP status, whether trying again may help, and `fix`: what the
reader can do. Raise at the place that knows; translate once at each edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mesh.errors.links import (
    BadAdvertisement,
    BadEvent,
    BadFrame,
    ConnectFailed,
    EventLogError,
    FrameTooLarge,
    LinkLost,
    LogCorrupt,
    LogForked,
    LogFull,
    LogRefused,
    PeerRefused,
    SchemaTooNew,
    SchemaTooOld,
    VersionMismatch,
    WireError,
)
from mesh.errors.node import (
    AlreadyRunning,
    BadKey,
    BadValue,
    ConfigError,
    IdentityError,
    KeyUnreadable,
    NotRunning,
    PairingRejected,
    PortInUse,
    TokenRejected,
    UnknownKey,
    UntrustedPeer,
)
from mesh.errors.requests import (
    ApiError,
    BodyTooLarge,
    Forbidden,
    HeadersTooLarge,
    JailError,
    JailUnavailable,
    JobFailed,
    MethodNotAllowed,
    NotFound,
    PolicyViolation,
    StorageFull,
    TlsRequired,
    Unauthorized,
    UnsupportedClient,
)
from mesh.errors.root import (
    InternalError,
    MeshError,
    RemoteError,
)
from mesh.errors.serving import (
    BadCheckpoint,
    BadRequest,
    BadSteering,
    Busy,
    CacheFull,
    ContextTooLong,
    DeviceFailed,
    DeviceLost,
    DiskFull,
    ExperimentalDisabled,
    GenerationError,
    LimitReached,
    ModelNotFound,
    NoRoute,
    NotEnoughMemory,
    PipelineStalled,
    QuotaExceeded,
    RouteError,
    SessionGone,
    ShardCorrupt,
    ShardError,
    UnsupportedFamily,
    WeightsCorrupted,
    WeightsMismatch,
)

__all__ = [
    "AlreadyRunning",
    "ApiError",
    "BadAdvertisement",
    "BadCheckpoint",
    "BadEvent",
    "BadFrame",
    "BadKey",
    "BadRequest",
    "BadSteering",
    "BadValue",
    "BodyTooLarge",
    "Busy",
    "CacheFull",
    "ConfigError",
    "ConnectFailed",
    "ContextTooLong",
    "DeviceFailed",
    "DeviceLost",
    "DiskFull",
    "EventLogError",
    "ExperimentalDisabled",
    "Forbidden",
    "FrameTooLarge",
    "GenerationError",
    "HeadersTooLarge",
    "IdentityError",
    "InternalError",
    "JailError",
    "JailUnavailable",
    "JobFailed",
    "KeyUnreadable",
    "LimitReached",
    "LinkLost",
    "LogCorrupt",
    "LogForked",
    "LogFull",
    "LogRefused",
    "MeshError",
    "MethodNotAllowed",
    "ModelNotFound",
    "NoRoute",
    "NotEnoughMemory",
    "NotFound",
    "NotRunning",
    "PairingRejected",
    "PeerRefused",
    "PipelineStalled",
    "PolicyViolation",
    "PortInUse",
    "QuotaExceeded",
    "RemoteError",
    "RouteError",
    "SchemaTooNew",
    "SchemaTooOld",
    "SessionGone",
    "ShardCorrupt",
    "ShardError",
    "StorageFull",
    "TlsRequired",
    "TokenRejected",
    "Unauthorized",
    "UnknownKey",
    "UnsupportedClient",
    "UnsupportedFamily",
    "UntrustedPeer",
    "VersionMismatch",
    "WeightsCorrupted",
    "WeightsMismatch",
    "WireError",
    "from_dict",
]


def from_dict(fields: dict[str, Any]) -> MeshError:
    """Rebuild an error from `MeshError.to_dict`; unknown codes become RemoteError."""
    kind = _BY_CODE.get(str(fields.get("code")))
    if kind is None:
        return RemoteError(fields)
    param = fields.get("param")
    return kind(
        str(fields.get("message", "")),
        fix=str(fields.get("fix", "")),
        param=None if param is None else str(param),
    )


def _descendants(kind: type[MeshError]) -> Iterator[type[MeshError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _descendants(child)


# Two classes may share a code where callers need not tell them apart: `bad_request` comes back as
# BadRequest, whoever raised it.
_BY_CODE: dict[str, type[MeshError]] = {
    kind.code: kind for kind in _descendants(MeshError) if kind is not RemoteError
} | {BadRequest.code: BadRequest, InternalError.code: InternalError}
