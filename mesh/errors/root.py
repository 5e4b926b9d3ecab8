"""The root of the tree, and the two errors of nobody in particular."""

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


class InternalError(MeshError):
    """A bug, or a child process that died; details are in the log."""

    code = "internal"


class RemoteError(MeshError):
    """An error of another process or node whose code has no class here."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(str(fields.get("message", "")), fix=str(fields.get("fix", "")))
        self.code = str(fields.get("code", "internal"))
        self.retryable = bool(fields.get("retryable", False))
