"""Routes, shards and generations."""

from __future__ import annotations

from mesh.errors.root import MeshError


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


class WeightsCorrupted(ShardError):
    """A shard's weights in memory are not those that it loaded; it has stopped serving them."""

    code = "weights_corrupted"
    http_status = 503
    retryable = True


class DiskFull(ShardError):
    """A file cannot be written, or would exceed what this node gives for such files."""

    code = "disk_full"
    http_status = 507


class NotEnoughMemory(ShardError):
    """The layers do not fit; the message says what they need and what there is."""

    code = "not_enough_memory"
    http_status = 503
    retryable = True


class SessionGone(ShardError):
    """The hop no longer has this session's cache; replay it into a new one."""

    code = "session_gone"
    http_status = 503
    retryable = True


class DeviceFailed(ShardError):
    """The device ran out of memory, or failed in a way nobody foresaw."""

    code = "device_failed"
    http_status = 503
    retryable = True


class DeviceLost(DeviceFailed):
    """The device does nothing more for the process that used it, which is replaced."""

    code = "device_lost"


class GenerationError(MeshError):
    """Root for what is wrong with one request."""

    code = "generation_error"


class BadRequest(GenerationError):
    """The request is malformed; `param` names the field."""

    code = "bad_request"
    http_status = 400


class BadSteering(GenerationError):
    """A steering edit cannot be applied to this model; `param` names the field."""

    code = "bad_steering"
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


class LimitReached(Busy):
    """One principal (a node, a key, a local user, a job) holds or uses all that it may.

    The message says who, of what, how much is held, asked and allowed; `param` is the resource.
    """

    code = "limit_reached"


class QuotaExceeded(LimitReached):
    """The API key's quota is used up for now; `param` names it."""

    code = "quota_exceeded"
