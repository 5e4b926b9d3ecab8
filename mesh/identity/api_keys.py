"""Keys for the HTTP API: shown once, kept as hashes, each with scopes and quotas.

A key is ``hn_ID_SECRET``; the id finds the record, the secret has 256 random bits, so a plain
SHA-256 is as good as a slow hash. Knows nothing of HTTP; who asks for what is the API's business.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from mesh.clock import Clock
from mesh.errors import BadValue, KeyUnreadable, QuotaExceeded, Unauthorized
from mesh.identity.private_files import read_private, write_private

_FORM = re.compile(r"hn_([0-9a-f]{8})_([A-Za-z0-9_-]{43})")
_MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 1000
_MINUTE_S = 60.0
_DAY_S = 86_400.0


class Scope(StrEnum):
    """What a key is good for."""

    CHAT = "chat"
    INTERVENTIONS = "interventions"
    ADMIN = "admin"

    @classmethod
    def parse(cls, text: str) -> Scope:
        """The scope of that name. Raises BadValue."""
        try:
            return cls(text)
        except ValueError:
            raise BadValue(
                f"{text!r} is no scope.", fix=f"Choose of: {', '.join(cls)}.", param="scope"
            ) from None


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one key; None for no limit."""

    requests_per_minute: int | None = None
    tokens_per_day: int | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key as it is kept: everything but the key itself.

    The jobs of a `trusted` key may use what its owner knows to be harmless in these hands.
    """

    key_id: str
    name: str
    scopes: frozenset[Scope]
    quota: Quota
    created_at: datetime
    secret_sha256: str = field(repr=False)
    trusted: bool = False

    def allows(self, scope: Scope) -> bool:
        """Whether the key is good for this; ``admin`` is good for everything."""
        return scope in self.scopes or Scope.ADMIN in self.scopes


class ApiKeys:
    """The keys in one file, or with no `path` in memory only.

    Reading and writing the file blocks; `verify` touches memory only.
    """

    def __init__(self, path: Path | None = None, keys: Mapping[str, ApiKey] | None = None) -> None:
        self._path = path
        self._keys = dict(keys or {})

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        """Read the file; none is no keys.

        Raises KeyUnreadable when it cannot be read, is open to others, or is damaged.
        """
        try:
            content = read_private(path, _MAX_FILE_BYTES)
        except FileNotFoundError:
            return cls(path, {})
        except OSError as error:
            raise _unusable(path, str(error.strerror or error)) from error
        try:
            keys = [_read(fields) for fields in json.loads(content)["keys"]]
        except (KeyError, TypeError, ValueError) as error:
            raise _unusable(path, f"it is damaged ({error!r})") from error
        return cls(path, {key.key_id: key for key in keys})

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """All keys, oldest first."""
        return tuple(self._keys.values())

    def get(self, key_id: str) -> ApiKey | None:
        """The key of that id."""
        return self._keys.get(key_id)

    def create(
        self,
        name: str,
        scopes: frozenset[Scope],
        quota: Quota,
        clock: Clock,
        *,
        trusted: bool = False,
    ) -> tuple[ApiKey, str]:
        """A new key and its text, which nobody can show again.

        Raises BadValue for an unusable name or no scopes, KeyUnreadable when it cannot be kept.
        """
        if not 0 < len(name) <= 64 or not name.isprintable() or not scopes:
            raise BadValue("An API key needs a name and a scope.", fix="Give both.", param="name")
        if len(self._keys) >= MAX_KEYS:
            raise BadValue(f"There are {MAX_KEYS} API keys.", fix="Revoke some.", param="name")
        key_id, secret = secrets.token_hex(4), secrets.token_urlsafe(32)
        while key_id in self._keys:
            key_id = secrets.token_hex(4)
        key = ApiKey(key_id, name, scopes, quota, clock.now(), _hash(secret), trusted)
        self._save({**self._keys, key_id: key})
        return key, f"hn_{key_id}_{secret}"

    def revoke(self, key_id: str) -> ApiKey:
        """Forget a key at once. Raises BadValue when there is none, KeyUnreadable."""
        key = self._keys.get(key_id)
        if key is None:
            raise BadValue(
                f"There is no API key {key_id}.", fix="See `hearthnet keys`.", param="key_id"
            )
        self._save({known: kept for known, kept in self._keys.items() if known != key_id})
        return key

    def verify(self, text: str) -> ApiKey:
        """The key with this text. Raises Unauthorized."""
        match = _FORM.fullmatch(text)
        key = self._keys.get(match[1]) if match else None
        if match is None or key is None or not _same(key, match[2]):
            raise Unauthorized(
                "The API key is missing or wrong.",
                fix="Send `Authorization: Bearer KEY`; make one with `hearthnet keys create`.",
            )
        return key

    def _save(self, keys: dict[str, ApiKey]) -> None:
        """Write first: what is not on the disk is not in force."""
        content = json.dumps({"version": 1, "keys": [_fields(k) for k in keys.values()]}, indent=1)
        if self._path is not None:
            try:
                write_private(self._path, content.encode())
            except OSError as error:
                raise _unusable(self._path, str(error.strerror or error)) from error
        self._keys = keys


@dataclass(slots=True)
class _Usage:
    minute_since: float
    day_since: float
    requests: int = 0
    tokens: int = 0


class QuotaMeter:
    """How much each key has used of its quota, in memory: fixed windows, forgotten at a restart."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    def admit(self, key: ApiKey) -> None:
        """Count one request. Raises QuotaExceeded, and counts nothing, when there is no room."""
        usage, now = self._current(key), self._clock.monotonic()
        per_minute, per_day = key.quota.requests_per_minute, key.quota.tokens_per_day
        if per_minute is not None and usage.requests >= per_minute:
            raise _exceeded("requests_per_minute", per_minute, usage.minute_since + _MINUTE_S - now)
        if per_day is not None and usage.tokens >= per_day:
            raise _exceeded("tokens_per_day", per_day, usage.day_since + _DAY_S - now)
        usage.requests += 1

    def charge(self, key: ApiKey, tokens: int) -> None:
        """Count tokens of an admitted request, prompt and completion."""
        self._current(key).tokens += tokens

    def keep_only(self, keys: ApiKeys) -> None:
        """Forget revoked keys; what is metered never exceeds what exists."""
        known = {key.key_id for key in keys.keys}
        self._usage = {key_id: use for key_id, use in self._usage.items() if key_id in known}

    def _current(self, key: ApiKey) -> _Usage:
        now = self._clock.monotonic()
        usage = self._usage.setdefault(key.key_id, _Usage(now, now))
        if now - usage.minute_since >= _MINUTE_S:
            usage.minute_since, usage.requests = now, 0
        if now - usage.day_since >= _DAY_S:
            usage.day_since, usage.tokens = now, 0
        return usage


def new_owner_key() -> str:
    """A key for whoever owns the daemon; it is kept nowhere as a hash and has every scope."""
    return f"hn_owner_{secrets.token_urlsafe(32)}"


def shown(key: ApiKey) -> dict[str, Any]:
    """What people may see of a key, JSON-able."""
    return {name: value for name, value in _fields(key).items() if name != "secret_sha256"}


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _same(key: ApiKey, secret: str) -> bool:
    return hmac.compare_digest(_hash(secret), key.secret_sha256)


def _fields(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.key_id,
        "name": key.name,
        "scopes": sorted(key.scopes),
        "requests_per_minute": key.quota.requests_per_minute,
        "tokens_per_day": key.quota.tokens_per_day,
        "trusted": key.trusted,
        "created_at": key.created_at.isoformat(),
        "secret_sha256": key.secret_sha256,
    }


def _read(fields: Mapping[str, Any]) -> ApiKey:
    return ApiKey(
        str(fields["id"]),
        str(fields["name"]),
        frozenset(Scope(scope) for scope in fields["scopes"]),
        Quota(_limit(fields["requests_per_minute"]), _limit(fields["tokens_per_day"])),
        datetime.fromisoformat(fields["created_at"]),
        str(fields["secret_sha256"]),
        fields["trusted"] is True,
    )


def _limit(value: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise ValueError(f"{value!r} is not a limit")
    return value


def _exceeded(quota: str, limit: int, wait_s: float) -> QuotaExceeded:
    return QuotaExceeded(
        f"The API key's {quota} of {limit} is used up.",
        fix=f"Try again in {max(1, round(wait_s))} s.",
        param=quota,
    )


def _unusable(path: Path, why: str) -> KeyUnreadable:
    return KeyUnreadable(
        f"The API keys in {path} cannot be used: {why}.",
        fix="Make the file readable and writable for this user only, or move it away.",
    )
