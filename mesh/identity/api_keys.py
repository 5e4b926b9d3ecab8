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
from typing import Annotated, Any

from mesh import codec
from mesh.accounts.ledger import Personal, Resource
from mesh.clock import Clock
from mesh.codec import Fault
from mesh.errors import BadValue, KeyUnreadable, NotFound, Unauthorized
from mesh.private_files import mending, read_private, write_private
from mesh.types import Principal, PrincipalKind

_FORM = re.compile(r"hn_([0-9a-f]{8})_([A-Za-z0-9_-]{43})")
_MAX_FILE_BYTES = 1 << 20
_OURS_ALONE = "Make the file readable and writable for this user only."
_MOVE_IT = "Restore the file from a backup, or move it away and make new keys."
MAX_KEYS = 1000
MAX_QUOTA = 2**53 - 1
"""Of requests or tokens: what every reader of JSON has as a whole number."""


class Scope(StrEnum):
    """A right that an API key has."""

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


def _moment(text: str) -> None:
    datetime.fromisoformat(text)


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one key; None for no limit."""

    requests_per_minute: int | None = None
    tokens_per_day: int | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key as it is kept: everything but the key itself. Quotas are None for no limit.

    The jobs of a `trusted` key may use what its owner knows to be harmless in these hands.
    """

    id: str
    name: str
    scopes: tuple[Scope, ...]
    requests_per_minute: int | None
    tokens_per_day: int | None
    trusted: bool
    created_at: Annotated[str, _moment]
    secret_sha256: str = field(repr=False)

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
            raise _refused(path, error) from error
        try:
            kept = codec.convert(codec.parse_json(content), _File)
        except Fault as fault:
            raise _unusable(path, f"it is damaged ({fault.field or 'it'} {fault.why})") from fault
        return cls(path, {key.id: key for key in kept.keys})

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
        key = ApiKey(
            key_id, name, tuple(sorted(scopes)), quota.requests_per_minute, quota.tokens_per_day,
            trusted, clock.now().isoformat(), _hash(secret),
        )  # fmt: skip
        self._save({**self._keys, key_id: key})
        return key, f"hn_{key_id}_{secret}"

    def revoke(self, key_id: str) -> ApiKey:
        """Forget a key at once. Raises NotFound when there is none, KeyUnreadable."""
        key = self._keys.get(key_id)
        if key is None:
            raise NotFound(
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
                fix="Send `Authorization: Bearer KEY`, or give `hearthnet` HEARTHNET_API_KEY;"
                " make one with `hearthnet keys create`.",
            )
        return key

    def _save(self, keys: dict[str, ApiKey]) -> None:
        """Write first: what is not on the disk is not in force."""
        rows = [codec.plain(key) for key in keys.values()]
        text = json.dumps({"version": 1, "keys": rows}, indent=1, ensure_ascii=False)
        content = text.encode()
        if len(content) > _MAX_FILE_BYTES:  # no start would read it
            raise BadValue("There are too many API keys.", fix="Revoke some.", param="name")
        if self._path is not None:
            try:
                write_private(self._path, content)
            except OSError as error:
                raise _refused(self._path, error) from error
        self._keys = keys


def quotas(keys: ApiKeys) -> Personal:
    """What a ledger has to know of keys: each one's own quota, for as long as it is not revoked."""

    def quota_of(principal: Principal, resource: Resource) -> float | None:
        key = keys.get(principal.name) if principal.kind is PrincipalKind.KEY else None
        if key is None:
            return None
        if resource is Resource.REQUESTS_PER_MINUTE:
            return key.requests_per_minute
        return key.tokens_per_day if resource is Resource.TOKENS_PER_DAY else None

    return quota_of


def new_owner_key() -> str:
    """A key for whoever owns the daemon; it is kept nowhere as a hash and has every scope."""
    return f"hn_owner_{secrets.token_urlsafe(32)}"


def shown(key: ApiKey) -> dict[str, Any]:
    """What people may see of a key, JSON-able."""
    return {name: value for name, value in codec.plain(key).items() if name != "secret_sha256"}


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _same(key: ApiKey, secret: str) -> bool:
    return hmac.compare_digest(_hash(secret), key.secret_sha256)


@dataclass(frozen=True, slots=True)
class _File:
    keys: tuple[ApiKey, ...]


def _refused(path: Path, error: OSError) -> KeyUnreadable:
    return _unusable(path, error.strerror or str(error), mending(error, _OURS_ALONE))


def _unusable(path: Path, why: str, fix: str = _MOVE_IT) -> KeyUnreadable:
    return KeyUnreadable(f"The API keys in {path} cannot be used: {why}.", fix=fix)
