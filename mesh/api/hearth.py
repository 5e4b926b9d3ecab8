"""`/mesh/v1/hearth/...`: who is in, inviting, joining, and decisions about members."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.bodies import Strict, read_body
from mesh.api.services import ApiSettings, HearthControl
from mesh.errors import BadRequest
from mesh.hearth.listing import LogFilter
from mesh.types import is_whole

Body = TypeVar("Body", bound=Strict)
Answer = Awaitable[dict[str, Any]]


class InviteBody(Strict):
    """The body of `POST /mesh/v1/hearth/invite`."""

    level: str | None = Field(default=None, max_length=16)
    ttl_s: float | None = Field(default=None, gt=0)


class JoinBody(Strict):
    """The body of `POST /mesh/v1/hearth/join`."""

    code: str = Field(min_length=1, max_length=1024)
    peer: str | None = Field(default=None, max_length=300)


class ChangeLevelBody(Strict):
    """The body of `POST /mesh/v1/hearth/promote` and ``demote``."""

    member: str = Field(min_length=1, max_length=128)
    level: str | None = Field(default=None, max_length=16)


class RevokeMemberBody(Strict):
    """The body of `POST /mesh/v1/hearth/revoke`."""

    member: str = Field(min_length=1, max_length=128)
    reason: str = Field(default="", max_length=200)


class LeaveBody(Strict):
    """The body of `POST /mesh/v1/hearth/leave`: empty."""


class ReadmitBody(Strict):
    """The body of `POST /mesh/v1/hearth/readmit`."""

    member: str = Field(min_length=1, max_length=128)


class RecoverBody(Strict):
    """The body of `POST /mesh/v1/hearth/recover`."""

    code: str = Field(min_length=1, max_length=128)


class RevokeTokenBody(Strict):
    """The body of `POST /mesh/v1/hearth/revoke_token`."""

    token_id: str = Field(pattern=r"^[A-Za-z0-9_-]{22}$")
    """As a session's list has it. What is signed is kept for good: a slip is refused before."""


def routes(control: HearthControl, settings: ApiSettings) -> list[Route]:
    """The endpoints' routes."""
    path = "/mesh/v1/hearth"

    async def view(_request: Request) -> Response:
        """Who is in the hearth. Answers as `HearthControl.view`."""
        return JSONResponse(control.view())

    async def log(request: Request) -> Response:
        """A page of the hearth's signed log: `?limit=` (1 to 200), `author=`, `type=`, `after=`.
        Answers as `HearthControl.log`.
        """
        said = request.query_params
        limit = said.get("limit", "50")
        if not is_whole(limit, 5):
            raise BadRequest("limit= is no number.", fix="Send 1 to 200.", param="limit")
        author, kind, after = said.get("author"), said.get("type"), said.get("after")
        return JSONResponse(await control.log(LogFilter(author, kind, int(limit), after)))

    async def invitation(request: Request) -> Response:
        """What became of an invitation. Answers as `HearthControl.invitation`."""
        return JSONResponse(await control.invitation(request.path_params["port"]))

    async def close(_request: Request) -> Response:
        """Shut the open invitation. Answers as `HearthControl.close_invitation`."""
        return JSONResponse(await control.close_invitation())

    def verb(name: str, form: type[Body], act: Callable[[Body], Answer]) -> Route:
        async def endpoint(request: Request) -> Response:
            return JSONResponse(await act(await read_body(request, form, settings)))

        endpoint.__doc__ = getattr(HearthControl, name).__doc__
        return Route(f"{path}/{name}", endpoint, methods=["POST"])

    return [
        Route(path, view),
        Route("/mesh/v1/log", log),
        Route(f"{path}/invitation/{{port:int}}", invitation),
        Route(f"{path}/invitation/close", close, methods=["POST"]),
        verb("invite", InviteBody, lambda body: control.invite(body.level, body.ttl_s)),
        verb("join", JoinBody, lambda body: control.join(body.code, body.peer)),
        verb("promote", ChangeLevelBody, lambda body: control.promote(body.member, body.level)),
        verb("demote", ChangeLevelBody, lambda body: control.demote(body.member, body.level)),
        verb("revoke", RevokeMemberBody, lambda body: control.revoke(body.member, body.reason)),
        verb("leave", LeaveBody, lambda body: control.leave()),
        verb("readmit", ReadmitBody, lambda body: control.readmit(body.member)),
        verb("recover", RecoverBody, lambda body: control.recover(body.code)),
        verb("revoke_token", RevokeTokenBody, lambda body: control.revoke_token(body.token_id)),
    ]
