"""What each principal holds and uses in this process, and the one place that refuses more.

A principal is whoever asks for something: a node, an API key, a local user, a job. Of every
resource it has a *level* (what it holds now: streams, buffered bytes) or a *rate* (what it used in
the current window: requests, CPU seconds). Limits are given in; what is over one is refused with
LimitReached, which names the principal, the resource, what is held, asked and allowed.

For one thread, the event loop's. Reads no clock but the one given in, does no I/O and knows
nothing of what the resources are for. Every process has its own; `snapshot` is what it reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, isinf
from types import TracebackType
from typing import Any, NoReturn, Self

from mesh.clock import Clock
from mesh.errors import LimitReached, QuotaExceeded
from mesh.types import Principal, PrincipalKind

MAX_PRINCIPALS = 1024
_MINUTE_S = 60.0
_DAY_S = 86_400.0


def of_peer(node_id: str) -> Principal:
    """The principal that another node is."""
    return Principal(PrincipalKind.PEER, node_id)


class Resource(StrEnum):
    """What can be held or used. Those `per` a time are rates, all others levels."""

    BYTES_BUFFERED = "bytes_buffered"
    """Bytes that wait in memory: received and not dealt with, or to be sent and not taken."""
    LINKS = "links"
    STREAMS = "streams"
    CACHE_POSITIONS = "cache_positions"
    TAP_SESSIONS = "tap_sessions"
    EDIT_BYTES = "edit_bytes"
    """Of steering edits that came before the session they are for was asked for."""
    GENERATIONS = "generations"
    JOBS_WAITING = "jobs_waiting"
    PULLS = "pulls"
    """Gossip answers under way."""
    EVENTS_STORED = "events_stored"
    """Events of the log that the principal signed."""
    EVENT_BYTES_STORED = "event_bytes_stored"
    EVENT_BYTES_WAITING = "event_bytes_waiting"
    """Of events that the principal sent and that wait for what comes before them."""
    EVENTS_PER_MINUTE = "events_per_minute"
    EVENT_BYTES_PER_MINUTE = "event_bytes_per_minute"
    """Bytes of the event log sent in answer to gossip."""
    BAD_EVENTS_PER_MINUTE = "bad_events_per_minute"
    BAD_ADVERTISEMENTS_PER_MINUTE = "bad_advertisements_per_minute"
    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_DAY = "tokens_per_day"
    CPU_SECONDS_PER_MINUTE = "cpu_seconds_per_minute"

    @property
    def window_s(self) -> float | None:
        """The seconds that a rate is counted over; None for a level."""
        if self.endswith("_per_minute"):
            return _MINUTE_S
        return _DAY_S if self.endswith("_per_day") else None


@dataclass(frozen=True, slots=True)
class Limit:
    """How much of one resource: `each` principal, those of a `kind` instead, and all together.

    Whoever uses up a rate with a cooldown is refused for so long, at least to the window's end.
    """

    each: float = inf
    total: float = inf
    kinds: Mapping[PrincipalKind, float] = field(default_factory=dict)
    cooldown_s: float = 0.0

    def of(self, principal: Principal) -> float:
        """What this principal may."""
        return self.kinds.get(principal.kind, self.each)


Limits = Mapping[Resource, Limit]
Personal = Callable[[Principal, Resource], float | None]
"""A limit of this one principal, like an API key's quota; None where its kind's holds. Asked for a
level when the principal first holds some, for a rate whenever it uses some."""

_NO_LIMIT = Limit()


@dataclass(slots=True)
class _Sum:
    """All principals together."""

    limit: float
    held: float = 0


@dataclass(slots=True)
class _Level:
    """What one principal holds of one resource."""

    account: _Account
    resource: Resource
    limit: float
    together: _Sum
    held: float = 0
    holds: int = 0


@dataclass(slots=True)
class _Rate:
    """What one principal used of one resource since its window began."""

    since: float
    used: float = 0
    barred_until: float = 0.0


@dataclass(slots=True)
class _Account:
    principal: Principal
    levels: dict[Resource, _Level] = field(default_factory=dict)
    rates: dict[Resource, _Rate] = field(default_factory=dict)
    refused: int = 0
    touched: float = 0.0

    @property
    def is_held(self) -> bool:
        return any(level.holds for level in self.levels.values())


class Hold:
    """Some of one resource, held until `close`; grows and shrinks meanwhile. A context manager."""

    __slots__ = ("_closed", "_level", "size")

    def __init__(self, level: _Level) -> None:
        self._level = level
        self._closed = False
        self.size: float = 0
        """What is held by this one."""
        level.holds += 1

    def grow(self, amount: float) -> None:
        """Hold so much more. Raises LimitReached, and is then as before."""
        if self._closed or amount < 0:
            raise ValueError(f"a hold that is closed, or by {amount}, cannot grow")
        self.require(amount)
        self.charge(amount)

    def fits(self, amount: float) -> bool:
        """Whether so much more could be held."""
        level = self._level
        together = level.together
        return level.held + amount <= level.limit and together.held + amount <= together.limit

    def require(self, amount: float) -> None:
        """Raise LimitReached when so much more could not be held."""
        if not self.fits(amount):
            _refuse_level(self._level, amount)

    def charge(self, amount: float) -> None:
        """Count what is held already (no more, when negative), whatever the limit says."""
        self._level.held += amount
        self._level.together.held += amount
        self.size += amount

    def shrink(self, amount: float) -> None:
        """Give so much back."""
        if not 0 <= amount <= self.size:
            raise ValueError(f"{amount} of {self.size} cannot be given back")
        self.charge(-amount)

    def resize(self, size: float) -> None:
        """Hold exactly so much. Raises LimitReached, and is then as before."""
        if size > self.size:
            self.grow(size - self.size)
        else:
            self.shrink(self.size - size)

    def close(self) -> None:
        """Give everything back; once is enough, and twice does no harm."""
        if not self._closed:
            self.shrink(self.size)
            self._closed = True
            self._level.holds -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ResourceLedger:
    """The accounts of one process; bounded in principals."""

    def __init__(
        self,
        clock: Clock,
        limits: Limits | None = None,
        *,
        personal: Personal | None = None,
        max_principals: int = MAX_PRINCIPALS,
    ) -> None:
        self._clock = clock
        self._limits = dict(limits or {})
        self._personal = personal or _nobodys
        self._max_principals = max_principals
        self._accounts: dict[Principal, _Account] = {}
        self._sums = {r: _Sum(self._limit(r).total) for r in Resource if r.window_s is None}

    # Levels

    def hold(self, principal: Principal, resource: Resource, amount: float = 0) -> Hold:
        """Hold `amount` until the hold is closed. Raises LimitReached, and has changed nothing."""
        hold = Hold(self._level(principal, resource))
        try:
            hold.grow(amount)
        except LimitReached:
            hold.close()
            raise
        return hold

    def held(self, principal: Principal, resource: Resource) -> float:
        """What the principal holds now."""
        account = self._accounts.get(principal)
        level = account.levels.get(resource) if account is not None else None
        return 0 if level is None else level.held

    def together(self, resource: Resource) -> float:
        """What all hold now."""
        return self._sums[resource].held

    def refusals(self, principal: Principal) -> int:
        """How often it was refused something."""
        account = self._accounts.get(principal)
        return 0 if account is None else account.refused

    def holders(self, resource: Resource) -> dict[Principal, float]:
        """Who holds some of it."""
        return {
            account.principal: level.held
            for account in self._accounts.values()
            if (level := account.levels.get(resource)) is not None and level.held
        }

    def limit(self, principal: Principal, resource: Resource) -> float:
        """How much the principal may hold, or use in a window."""
        return self._allowed(principal, resource)

    def share(self, principal: Principal, resource: Resource) -> float:
        """What of the whole falls to each, were it divided by all who hold some and `principal`.

        At least 1; infinite where the resource has no total.
        """
        whole = self._sums[resource].limit
        if isinf(whole):
            return inf
        return max(1, whole // len(self.holders(resource).keys() | {principal}))

    # Rates

    def spend(self, principal: Principal, resource: Resource, amount: float = 1) -> None:
        """Use so much, if the limit admits it. Raises LimitReached, and has used nothing."""
        account, rate = self._rate(principal, resource)
        limit = self._allowed(principal, resource)
        if rate.used + amount > limit or self._clock.monotonic() < rate.barred_until:
            self._refuse_rate(account, resource, rate, amount)
        self._use(resource, rate, amount, limit)

    def charge(self, principal: Principal, resource: Resource, amount: float = 1) -> bool:
        """Count what was used already; True when this was what used the limit up."""
        _, rate = self._rate(principal, resource)
        limit = self._allowed(principal, resource)
        before = rate.used
        self._use(resource, rate, amount, limit)
        return before < limit <= rate.used

    def exhausted(self, principal: Principal, resource: Resource) -> bool:
        """Whether nothing is left, or the cooldown after that not over."""
        account = self._accounts.get(principal)
        if account is None or resource not in account.rates:
            return self._allowed(principal, resource) <= 0
        rate = self._current(account, resource)
        barred = self._clock.monotonic() < rate.barred_until
        return barred or rate.used >= self._allowed(principal, resource)

    def require(self, principal: Principal, resource: Resource, amount: float = 0) -> None:
        """Raise LimitReached when so much could not be held, or nothing is left to be used."""
        if resource.window_s is None:
            with self.hold(principal, resource, amount):
                return
        if self.exhausted(principal, resource):
            account, rate = self._rate(principal, resource)
            self._refuse_rate(account, resource, rate, amount)

    # What people see

    def snapshot(self) -> list[dict[str, Any]]:
        """Per principal what it holds and uses, with limits, JSON-able; nothing of the idle.

        ``{"kind", "name", "refused": how often, "resources": {NAME: {"held" or "used": number,
        "limit": number or None, "window_s": seconds or None}}}``
        """
        rows = []
        for account in self._accounts.values():
            resources = self._shown(account)
            if resources or account.refused:
                rows.append(
                    {
                        "kind": account.principal.kind.value,
                        "name": account.principal.name,
                        "refused": account.refused,
                        "resources": resources,
                    }
                )
        return rows

    def totals(self) -> dict[str, dict[str, float | None]]:
        """What all hold of each resource that is held at all, or limited: held and limit."""
        return {
            resource.value: {"held": total.held, "limit": _finite(total.limit)}
            for resource, total in self._sums.items()
            if total.held or not isinf(total.limit)
        }

    def keep_only(self, kind: PrincipalKind, names: frozenset[str]) -> None:
        """Forget the rates of all others of a kind, whose keys were revoked for instance."""
        for principal, account in list(self._accounts.items()):
            if principal.kind is kind and principal.name not in names:
                account.rates.clear()
                if not account.is_held:
                    del self._accounts[principal]

    # Private

    def _limit(self, resource: Resource) -> Limit:
        return self._limits.get(resource, _NO_LIMIT)

    def _allowed(self, principal: Principal, resource: Resource) -> float:
        personal = self._personal(principal, resource)
        return self._limit(resource).of(principal) if personal is None else personal

    def _account(self, principal: Principal) -> _Account:
        account = self._accounts.get(principal)
        if account is None:
            self._make_room(principal)
            account = self._accounts[principal] = _Account(principal)
        account.touched = self._clock.monotonic()
        return account

    def _make_room(self, principal: Principal) -> None:
        """Forget whoever was idle longest. Raises LimitReached when everybody holds something."""
        if len(self._accounts) < self._max_principals:
            return
        idle = [account for account in self._accounts.values() if not account.is_held]
        if not idle:
            raise LimitReached(
                f"{principal} is not served: {len(self._accounts)} others hold something here.",
                fix="Try again when some of them have ended.",
            )
        del self._accounts[min(idle, key=lambda account: account.touched).principal]

    def _level(self, principal: Principal, resource: Resource) -> _Level:
        account = self._account(principal)
        level = account.levels.get(resource)
        if level is None:
            limit = self._allowed(principal, resource)
            level = _Level(account, resource, limit, self._sums[resource])
            account.levels[resource] = level
        return level

    def _rate(self, principal: Principal, resource: Resource) -> tuple[_Account, _Rate]:
        account = self._account(principal)
        if resource not in account.rates:
            account.rates[resource] = _Rate(self._clock.monotonic())
        return account, self._current(account, resource)

    def _current(self, account: _Account, resource: Resource) -> _Rate:
        rate, now = account.rates[resource], self._clock.monotonic()
        if now - rate.since >= _window(resource):
            rate.since, rate.used = now, 0
        return rate

    def _use(self, resource: Resource, rate: _Rate, amount: float, limit: float) -> None:
        now = self._clock.monotonic()
        rate.used += amount
        if rate.used >= limit and now >= rate.barred_until:
            rate.barred_until = now + self._limit(resource).cooldown_s

    def _refuse_rate(
        self, account: _Account, resource: Resource, rate: _Rate, amount: float
    ) -> NoReturn:
        account.refused += 1
        principal = account.principal
        personal = self._personal(principal, resource)
        wait_s = max(rate.since + _window(resource), rate.barred_until) - self._clock.monotonic()
        kind = LimitReached if personal is None else QuotaExceeded
        limit = self._allowed(principal, resource)
        more = f", {amount:g} more were asked for" if amount else ""
        raise kind(
            f"{principal} may use {limit:g} {_words(resource)}; {rate.used:g} are used{more}.",
            fix=f"Try again in {max(1, round(wait_s))} s.",
            param=resource.value,
        )

    def _shown(self, account: _Account) -> dict[str, dict[str, float | None]]:
        shown: dict[str, dict[str, float | None]] = {
            resource.value: {"held": level.held, "limit": _finite(level.limit), "window_s": None}
            for resource, level in account.levels.items()
            if level.held
        }
        for resource in account.rates:
            rate = self._current(account, resource)
            if rate.used:
                limit = _finite(self._allowed(account.principal, resource))
                shown[resource.value] = {
                    "used": rate.used, "limit": limit, "window_s": resource.window_s
                }  # fmt: skip
        return shown


def _refuse_level(level: _Level, amount: float) -> NoReturn:
    level.account.refused += 1
    what, principal = _words(level.resource), level.account.principal
    if level.held + amount > level.limit:
        said = f"{principal} may hold {level.limit:g} {what} here; it holds {level.held:g}"
    else:
        together = level.together
        said = f"There are {together.limit:g} {what} here, {together.held:g} are taken"
        said += f", {level.held:g} of them by {principal}"
    raise LimitReached(
        f"{said}; {amount:g} more were asked for.",
        fix="Give some back, or try again later; `hearthnet status` shows who holds what.",
        param=level.resource.value,
    )


def _words(resource: Resource) -> str:
    return resource.value.replace("_", " ")


def _window(resource: Resource) -> float:
    window_s = resource.window_s
    if window_s is None:
        raise ValueError(f"{resource} is held, not used")
    return window_s


def _finite(limit: float) -> float | None:
    return None if isinf(limit) else limit


def _nobodys(principal: Principal, resource: Resource) -> None:
    """No principal has limits of its own."""
