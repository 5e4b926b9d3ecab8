"""Authentication and scopes: the checks of a request before anything else reads it.

On loopback a page in a browser can reach us by rebinding its own name to 127.0.0.1, so the Host
must be a loopback name. A request that names an Origin comes from a web page; only pages of this
very server may ask. Then the key: it says who calls (`Caller`), and `require` says what a path is
for. Without a key a caller on loopback may chat and send jobs, unless told otherwise; it is told
from others by its user (`mesh.api.neighbours`), and never administers anything, because every
program and every user of the machine is on loopback.

`/healthz` and the files of the page at `/` are open to all, results to whoever has their URL, and
clients that are too old may come as far as hearing so. Knows nothing of what the paths do.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from mesh.accounts import allowances
from mesh.accounts.ledger import Resource, ResourceLedger
from mesh.api.connection import NEIGHBOUR
from mesh.api.faults import error_response, form_for
from mesh.api.neighbours import Neighbour
from mesh.api.page import PATHS as PAGE_PATHS
from mesh.api.services import ApiSettings
from mesh.clock import Clock
from mesh.config import is_loopback
from mesh.errors import Forbidden, HeadersTooLarge, MeshError, Unauthorized
from mesh.identity.api_keys import ApiKey, ApiKeys, Scope, quotas
from mesh.types import OWNER, Principal, PrincipalKind

_OWNER = Principal(PrincipalKind.KEY, OWNER)
"""Whoever can read the daemon's runtime file, or configured its key."""

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10

_OPEN = frozenset({"/healthz", *PAGE_PATHS})
_KEYLESS = ("/result/", "/ws/socket.io")
"""What is below carries its own proof in the URL, or only refuses: its clients send no key."""

_READING = frozenset({"GET", "HEAD"})
_SCHEMES = ("http", "https")
_OWN_PAGES = frozenset({"same-origin", "none"})
_KEYLESS_SCOPES = frozenset({Scope.CHAT, Scope.INTERVENTIONS})
_OURS = "hn_"
"""How our keys begin; clients that need no key send ``unused`` and the like."""


def _free(_tokens: int) -> None:
    """Nobody counts."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: its principal and its scopes.

    `charge` counts tokens, prompt and completion, against the key's quota, and raises Unauthorized
    when the key was revoked meanwhile. Jobs of a `trusted` caller may use what others' may not.
    """

    principal: Principal
    scopes: frozenset[Scope]
    trusted: bool = False
    charge: Callable[[int], None] = field(default=_free, repr=False, compare=False)

    @property
    def is_keyless(self) -> bool:
        """Whether it sent no key."""
        return self.principal.kind is PrincipalKind.LOCAL

    @property
    def may_wake(self) -> bool:
        """Whether a model at rest is loaded for the caller: NDIF's tier of hot swapping."""
        return self.trusted or self.allows(Scope.ADMIN)

    @property
    def lists_jobs_of(self) -> Principal | None:
        """Whose jobs are listed for the caller, None: everybody's."""
        return None if self.allows(Scope.ADMIN) else self.principal

    def allows(self, scope: Scope) -> bool:
        """Whether the caller may use what is for `scope`; ``admin`` may use everything."""
        return scope in self.scopes or Scope.ADMIN in self.scopes


def caller_of(connection: HTTPConnection) -> Caller:
    """The sender of this request (or of this WebSocket's opening)."""
    found: Caller = connection.state.caller
    return found


class Access:
    """Knows the keys and what they have used. Without `keys` nobody but the owner has one."""

    def __init__(self, settings: ApiSettings, keys: ApiKeys | None, clock: Clock) -> None:
        self._keys = ApiKeys() if keys is None else keys
        self._owner = settings.api_key
        self._keyless = settings.keyless and is_loopback(settings.host)
        self._accounts = settings.accounts or ResourceLedger(clock, allowances.API)
        self._accounts.personal = quotas(self._keys)

    @property
    def has_keys(self) -> bool:
        """Whether anybody has a key."""
        return self._owner is not None or bool(self._keys.keys)

    def identify(self, key: str | None, neighbour: Neighbour) -> Caller:
        """Whose key that is, or who `neighbour` is where none is needed. Raises Unauthorized."""
        if key is not None and self._owner is not None and _same(key, self._owner):
            return Caller(_OWNER, frozenset(Scope), trusted=True)
        if self._keyless and not (key or "").startswith(_OURS):
            return Caller(neighbour.principal, _KEYLESS_SCOPES)
        known = self._keys.verify(key or "")
        charge = partial(self._charge, known.id)
        return Caller(_account(known), frozenset(known.scopes), known.trusted, charge)

    def enter(self, principal: Principal) -> AbstractContextManager[object]:
        """Count a request until it has ended. Raises Busy; the owner's are never too many."""
        if principal == _OWNER:
            return nullcontext()
        return self._accounts.hold(principal.account, Resource.OPEN_REQUESTS, 1)

    def admit(self, caller: Caller) -> None:
        """Count a request. Raises QuotaExceeded; Unauthorized when its key was just revoked."""
        if caller.is_keyless or caller.principal == _OWNER:
            return
        key = self._known(caller.principal.name)
        self._accounts.require(_account(key), Resource.TOKENS_PER_DAY)
        self._accounts.spend(_account(key), Resource.REQUESTS_PER_MINUTE)

    def require_known(self, caller: Caller) -> None:
        """Raises Unauthorized when the caller's key was revoked since it was identified."""
        has_key = not (caller.is_keyless or caller.principal == _OWNER)
        if has_key:
            self._known(caller.principal.name)

    def forget_revoked(self) -> None:
        """To be called after a key was revoked."""
        known = frozenset(key.id for key in self._keys.keys)
        self._accounts.keep_only(PrincipalKind.KEY, known)

    def _charge(self, key_id: str, tokens: int) -> None:
        self._accounts.charge(_account(self._known(key_id)), Resource.TOKENS_PER_DAY, tokens)

    def _known(self, key_id: str) -> ApiKey:
        """Raises Unauthorized for a key that is revoked."""
        key = self._keys.get(key_id)
        if key is None:
            raise Unauthorized("The API key was revoked.", fix="Ask for a new one.")
        return key


def _account(key: ApiKey) -> Principal:
    return Principal(PrincipalKind.KEY, key.id)


class Gate:
    """ASGI middleware: refuses what the settings do not admit and whoever has too many requests
    open, and says who calls."""

    def __init__(self, app: ASGIApp, settings: ApiSettings, access: Access) -> None:
        self._app = app
        self._loopback = is_loopback(settings.host)
        self._access = access

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Check, then pass on."""
        if scope["type"] in ("http", "websocket") and scope["path"] not in _OPEN:
            headers = Headers(scope=scope)
            try:
                self._check(headers)
                under_way = self._access.enter(self._whose(scope, headers))
            except MeshError as error:
                await error_response(error, form_for(scope))(scope, receive, send)
                return
            with under_way:
                await self._app(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _whose(self, scope: Connection, headers: Headers) -> Principal:
        """Who calls; also written down for those behind, where a path needs a caller. Raises
        Unauthorized."""
        state = scope["state"]
        neighbour: Neighbour = state[NEIGHBOUR]
        if scope["path"].startswith(_KEYLESS):
            return neighbour.principal
        caller = state["caller"] = self._access.identify(_key(headers), neighbour)
        return caller.principal

    def _check(self, headers: Headers) -> None:
        """Raises Forbidden and HeadersTooLarge."""
        size = sum(len(name) + len(value) for name, value in headers.raw)
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            raise HeadersTooLarge(
                f"The request has {len(headers)} headers of {size} bytes; {MAX_HEADERS} headers of"
                f" {MAX_HEADER_BYTES} bytes in all are read.",
                fix="Send less.",
            )
        hosts = headers.getlist("host")
        if self._loopback and not (len(hosts) == 1 and is_loopback(_host_name(hosts[0]))):
            raise Forbidden(
                "The Host header does not name this machine's loopback address.",
                fix="Use http://127.0.0.1:PORT or http://localhost:PORT.",
                param="Host",
            )
        origin = headers.get("origin")
        own = {f"{scheme}://{host}" for host in hosts for scheme in _SCHEMES}
        # An image or a script of a foreign page names no Origin, but browsers say whose page it is.
        site = headers.get("sec-fetch-site", "none")
        if (origin is not None and origin not in own) or site not in _OWN_PAGES:
            raise Forbidden(
                "Web pages of another origin may not use this API.",
                fix="Call it from a program, or from a page of this server.",
                param="Origin",
            )


_Routed = TypeVar("_Routed", bound=Route | WebSocketRoute)


def require(scope: Scope, routes: Sequence[_Routed]) -> list[_Routed]:
    """The same routes, from now on for callers with `scope` only.

    A request that is more than reading counts against the key's quota.
    """
    for route in routes:
        route.app = _Scoped(route.app, scope)
    return list(routes)


def needed_of(route: Route | WebSocketRoute) -> Scope | None:
    """What a caller of the route needs; None where that is nothing but to be let in."""
    return route.app.needed if isinstance(route.app, _Scoped) else None


def is_open(path: str) -> bool:
    """Whether a path is for all, without a key wherever the API is bound."""
    return path in _OPEN or path.startswith(_KEYLESS)


class _Scoped:
    """A route behind a scope; the application's state has the `Access` that counts."""

    def __init__(self, app: ASGIApp, needed: Scope) -> None:
        self._app = app
        self.needed = needed

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        caller: Caller = scope["state"]["caller"]
        access: Access = scope["app"].state.access
        try:
            self._check(caller)
            if scope.get("method", "GET") not in _READING:
                access.admit(caller)
        except MeshError as error:
            await error_response(error, form_for(scope))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, caller: Caller) -> None:
        if caller.allows(self.needed):
            return
        if caller.is_keyless:
            raise Unauthorized(
                f"This needs a key with the scope {self.needed}.",
                fix="Use `hearthnet` as the user who runs the daemon, or make a key with"
                f" `hearthnet keys create --scope {self.needed}`.",
            )
        raise Forbidden(
            f"This key has no scope {self.needed}.",
            fix=f"Make one with `hearthnet keys create --scope {self.needed}`.",
            param="scope",
        )


def _key(headers: Headers) -> str | None:
    """The key as OpenAI's clients send it, or as Anthropic's or nnsight's do."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    return headers.get("x-api-key", headers.get("ndif-api-key"))


def _host_name(host: str) -> str:
    """The name in ``name``, ``name:port``, ``[v6]`` or ``[v6]:port``; empty when malformed."""
    if host.startswith("["):
        name, bracket, rest = host[1:].partition("]")
        return name if bracket and (not rest or rest[1:].isdecimal()) else ""
    name, colon, port = host.partition(":")
    return name.lower() if not colon or port.isdecimal() else ""


def _same(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode(), key.encode())
