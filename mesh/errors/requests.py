"""What is refused before it runs: HTTP requests and jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.errors.root import MeshError


class ApiError(MeshError):
    """Root for HTTP requests refused before anybody looked at what they ask."""

    code = "api_error"
    http_status = 400


class Unauthorized(ApiError):
    """The API key is missing or wrong."""

    code = "unauthorized"
    http_status = 401


class Forbidden(ApiError):
    """The request's Host or Origin is not this API's, or its key is not for this."""

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


class HeadersTooLarge(ApiError):
    """The request has more headers than the limit."""

    code = "headers_too_large"
    http_status = 431


class TlsRequired(ApiError):
    """Plain HTTP came to a port that speaks TLS only."""

    code = "tls_required"
    http_status = 400


class UnsupportedClient(ApiError):
    """The client's version is not one that this API serves; the fix says which is."""

    code = "unsupported_client"
    http_status = 426


class BodyTooLarge(ApiError):
    """The request's body exceeds the limit."""

    code = "body_too_large"
    http_status = 413


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


class JobFailed(JailError):
    """A job ended without a result; the message is what its author should read.

    `took` is what it used until then (fields of a job's report), empty when that is not known.
    """

    code = "job_failed"
    http_status = 400

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


class StorageFull(MeshError):
    """A job cannot be kept: the disk, or the part of it that jobs may take, is full or unusable."""

    code = "storage_full"
    http_status = 507
    retryable = True
