"""`/mesh/v1/hearth/...`: who is in, inviting, joining, and decisions about members."""

from __future__ import annotations

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.bodies import Strict, read_body
from mesh.api.services import ApiSettings, HearthControl


class Invite(Strict):
    """The body of `POST /mesh/v1/hearth/invite`."""

    level: str | None = Field(default=None, max_length=16)
    ttl_s: float | None = Field(default=None, gt=0)


class Join(Strict):
    """The body of `POST /mesh/v1/hearth/join`."""

    code: str = Field(min_length=1, max_length=1024)
    peer: str | None = Field(default=None, max_length=300)


class Change(Strict):
    """The body of `POST /mesh/v1/hearth/promote` and ``demote``."""

    member: str = Field(min_length=1, max_length=128)
    level: str | None = Field(default=None, max_length=16)


class Revoke(Strict):
    """The body of `POST /mesh/v1/hearth/revoke`."""

    member: str = Field(min_length=1, max_length=128)
    reason: str = Field(default="", max_length=200)


class RevokeToken(Strict):
    """The body of `POST /mesh/v1/hearth/revoke_token`."""

    token_id: str = Field(min_length=1, max_length=256)


def routes(control: HearthControl, settings: ApiSettings) -> list[Route]:
    """The endpoints' routes."""

    async def view(_request: Request) -> Response:
        return JSONResponse(control.view())

    async def invite(request: Request) -> Response:
        body = await read_body(request, Invite, settings)
        return JSONResponse(await control.invite(body.level, body.ttl_s))

    async def invitation(request: Request) -> Response:
        return JSONResponse(await control.invitation(request.path_params["port"]))

    async def close(_request: Request) -> Response:
        return JSONResponse(await control.close_invitation())

    async def join(request: Request) -> Response:
        body = await read_body(request, Join, settings)
        return JSONResponse(await control.join(body.code, body.peer))

    async def promote(request: Request) -> Response:
        body = await read_body(request, Change, settings)
        return JSONResponse(await control.promote(body.member, body.level))

    async def demote(request: Request) -> Response:
        body = await read_body(request, Change, settings)
        return JSONResponse(await control.demote(body.member, body.level))

    async def revoke(request: Request) -> Response:
        body = await read_body(request, Revoke, settings)
        return JSONResponse(await control.revoke(body.member, body.reason))

    async def revoke_token(request: Request) -> Response:
        body = await read_body(request, RevokeToken, settings)
        return JSONResponse(await control.revoke_token(body.token_id))

    path = "/mesh/v1/hearth"
    return [
        Route(path, view),
        Route(f"{path}/invitation/{{port:int}}", invitation),
        Route(f"{path}/invitation/close", close, methods=["POST"]),
        *(
            Route(f"{path}/{verb.__name__}", verb, methods=["POST"])
            for verb in (invite, join, promote, demote, revoke, revoke_token)
        ),
    ]
