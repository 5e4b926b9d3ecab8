"""The ledger of one process: what each principal holds and uses; the one place that refuses more.

A principal is whoever asks for something: a node, an API key, a local user, a job. Of every
resource it has a *level* (what it holds now: streams, buffered bytes) or a *rate* (what it used in
the current window: requests, CPU seconds). Limits are given in. What is over a principal's own is
refused with LimitReached, or QuotaExceeded where it is this one's alone; what is over that of all
together with Busy, of which the others are kinds. Each says who, of what, how much is held, asked
and allowed.

For one thread, the event loop's. Reads no clock but the one given in, does no I/O and knows
nothing of what the resources are for. Every process has its own; `snapshot` is what it reports.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isinf
from types import TracebackType
from typing import Any, NoReturn, Self

from mesh.accounts.resources import Limit, Limits, Personal, Resource, of_peer, window, words
from mesh.clock import Clock
from mesh.errors import Busy, LimitReached, QuotaExceeded
from mesh.types import Principal, PrincipalKind

__all__ = ["Hold", "Limit", "Limits", "Personal", "Resource", "ResourceLedger", "of_peer"]

MAX_PRINCIPALS = 1024
_MOST_SHOWN = 64


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
        """Hold so much more. Raises Busy, and is then as before."""
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
        """Raise Busy when so much more could not be held."""
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
        """Hold exactly so much. Raises Busy, and is then as before."""
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
        self.personal = personal or _nobodys
        self._max_principals = max_principals
        self._accounts: dict[Principal, _Account] = {}
        self._sums = {r: _Sum(self._limit(r).total) for r in Resource if r.window_s is None}

    # Levels

    def hold(self, principal: Principal, resource: Resource, amount: float = 0) -> Hold:
        """Hold `amount` until the hold is closed. Raises Busy, and has changed nothing."""
        hold = Hold(self._level(principal, resource))
        try:
            hold.grow(amount)
        except Busy:
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

    def holders(self, resource: Resource) -> dict[Principal, float]:
        """The principals that hold some of it."""
        return {
            account.principal: level.held
            for account in self._accounts.values()
            if (level := account.levels.get(resource)) is not None and level.held
        }

    def limit(self, principal: Principal, resource: Resource) -> float:
        """How much the principal may hold, or use in a window."""
        personal = self.personal(principal, resource)
        return self._limit(resource).of(principal) if personal is None else personal

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
        limit = self.limit(principal, resource)
        if rate.used + amount > limit or self._clock.monotonic() < rate.barred_until:
            self._refuse_rate(account, resource, rate, amount)
        self._use(resource, rate, amount, limit)

    def charge(self, principal: Principal, resource: Resource, amount: float = 1) -> bool:
        """Count what was used already; True when this was what used the limit up."""
        _, rate = self._rate(principal, resource)
        limit = self.limit(principal, resource)
        before = rate.used
        self._use(resource, rate, amount, limit)
        return before < limit <= rate.used

    def exhausted(self, principal: Principal, resource: Resource) -> bool:
        """Whether nothing is left, or the cooldown after that not over."""
        account = self._accounts.get(principal)
        if account is None or resource not in account.rates:
            return self.limit(principal, resource) <= 0
        rate = self._current(account, resource)
        barred = self._clock.monotonic() < rate.barred_until
        return barred or rate.used >= self.limit(principal, resource)

    def require(self, principal: Principal, resource: Resource, amount: float = 0) -> None:
        """Raise Busy when so much could not be held, or nothing is left to be used."""
        if resource.window_s is None:
            with self.hold(principal, resource, amount):
                return
        if self.exhausted(principal, resource):
            account, rate = self._rate(principal, resource)
            self._refuse_rate(account, resource, rate, amount)

    # What people see

    def report(self, where: str) -> dict[str, Any]:
        """``{"where", "principals": as `snapshot`, "more": how many principals besides}``.

        Those that were there last come first; `where` names the process, or what this is of.
        """
        rows = self.snapshot()
        return {"where": where, "principals": rows[:_MOST_SHOWN], "more": len(rows[_MOST_SHOWN:])}

    def snapshot(self) -> list[dict[str, Any]]:
        """Per principal what it holds and uses, with limits, JSON-able; nothing of the idle.

        ``{"kind", "name", "refused": how often, "resources": {NAME: {"held" or "used": number,
        "limit": number or None, "together" and "total" of what is held, "window_s": seconds of what
        is used}}}``
        """
        rows = []
        latest = sorted(self._accounts.values(), key=lambda each: each.touched, reverse=True)
        for account in latest:
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

    def _account(self, principal: Principal) -> _Account:
        account = self._accounts.get(principal)
        if account is None:
            self._make_room(principal)
            account = self._accounts[principal] = _Account(principal)
        account.touched = self._clock.monotonic()
        return account

    def _make_room(self, principal: Principal) -> None:
        """Forget whoever was idle longest. Raises Busy when everybody holds something."""
        if len(self._accounts) < self._max_principals:
            return
        idle = [account for account in self._accounts.values() if not account.is_held]
        if not idle:
            raise Busy(
                f"{principal} is not served: {len(self._accounts)} others hold something here.",
                fix="Try again when some of them have ended.",
            )
        del self._accounts[min(idle, key=lambda account: account.touched).principal]

    def _level(self, principal: Principal, resource: Resource) -> _Level:
        account = self._account(principal)
        level = account.levels.get(resource)
        if level is None:
            limit = self.limit(principal, resource)
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
        if now - rate.since >= window(resource):
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
        personal = self.personal(principal, resource)
        until = max(rate.since + window(resource), rate.barred_until)
        wait_s = max(1, round(until - self._clock.monotonic()))
        kind = LimitReached if personal is None else QuotaExceeded
        limit = self.limit(principal, resource)
        more = f", {amount:g} more were asked for" if amount else ""
        raise kind(
            f"{principal} may use {limit:g} {words(resource)}; {rate.used:g} are used{more}.",
            fix=f"Try again in {wait_s} s.",
            param=resource.value,
            retry_after_s=wait_s,
        )

    def _shown(self, account: _Account) -> dict[str, dict[str, float | None]]:
        shown: dict[str, dict[str, float | None]] = {
            resource.value: {
                "held": level.held,
                "limit": _finite(level.limit),
                "together": level.together.held,
                "total": _finite(level.together.limit),
            }
            for resource, level in account.levels.items()
            if level.held
        }
        for resource in account.rates:
            rate = self._current(account, resource)
            if rate.used:
                limit = _finite(self.limit(account.principal, resource))
                shown[resource.value] = {
                    "used": rate.used, "limit": limit, "window_s": resource.window_s
                }  # fmt: skip
        return shown


def _refuse_level(level: _Level, amount: float) -> NoReturn:
    level.account.refused += 1
    what, principal = words(level.resource), level.account.principal
    kind: type[Busy] = LimitReached
    if level.held + amount > level.limit:
        said = f"{principal} may hold {level.limit:g} {what} here; it holds {level.held:g}"
    else:
        kind, together = Busy, level.together
        said = f"There are {together.limit:g} {what} here, {together.held:g} are taken"
        said += f", {level.held:g} of them by {principal}"
    raise kind(
        f"{said}; {amount:g} more were asked for.",
        fix="Give some back, or try again later; `hearthnet status` shows who holds what.",
        param=level.resource.value,
    )


def _finite(limit: float) -> float | None:
    return None if isinf(limit) else limit


def _nobodys(principal: Principal, resource: Resource) -> None:
    """No principal has limits of its own."""
