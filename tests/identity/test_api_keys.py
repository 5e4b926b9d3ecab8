"""API keys: shown once, kept as hashes, in a file for this user only."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.accounts.ledger import Resource, ResourceLedger
from mesh.errors import BadValue, KeyUnreadable, NotFound, QuotaExceeded, Unauthorized
from mesh.identity.api_keys import MAX_KEYS, ApiKeys, Quota, Scope, quotas
from mesh.types import Principal, PrincipalKind
from tests.identity.support import ManualClock

CHAT = frozenset({Scope.CHAT})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "api_keys.json"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_key_works_until_it_is_revoked_also_after_a_restart(path: Path, clock: ManualClock) -> None:
    keys = ApiKeys.load(path)
    key, text = keys.create("Open WebUI", CHAT, Quota(60, 100_000), clock)
    assert keys.verify(text) == key
    again = ApiKeys.load(path)
    assert again.verify(text) == key
    assert again.keys == (key,)
    assert again.revoke(key.id) == key
    for store in (again, ApiKeys.load(path)):
        with pytest.raises(Unauthorized):
            store.verify(text)


def test_key_itself_is_nowhere_on_the_disk(path: Path, clock: ManualClock) -> None:
    _, text = ApiKeys.load(path).create("x", CHAT, Quota(), clock)
    secret = text.rpartition("_")[2] if text.count("_") == 2 else text.split("_", 2)[2]
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_wrong_keys_are_refused(path: Path, clock: ManualClock) -> None:
    keys = ApiKeys.load(path)
    key, text = keys.create("x", CHAT, Quota(), clock)
    _, other = keys.create("y", CHAT, Quota(), clock)
    mixed = f"hn_{key.id}_{other.split('_', 2)[2]}"
    for wrong in ("", "hn_", text[:-1], text + "x", text.upper(), mixed, key.secret_sha256):
        with pytest.raises(Unauthorized):
            keys.verify(wrong)


def test_scopes(path: Path, clock: ManualClock) -> None:
    keys = ApiKeys.load(path)
    chat, _ = keys.create("x", CHAT, Quota(), clock)
    admin, _ = keys.create("y", frozenset({Scope.ADMIN}), Quota(), clock)
    assert chat.allows(Scope.CHAT)
    assert not chat.allows(Scope.INTERVENTIONS)
    assert not chat.allows(Scope.ADMIN)
    assert all(admin.allows(scope) for scope in Scope)


@pytest.mark.parametrize("mode", [0o640, 0o644, 0o666])
def test_file_that_others_can_read_is_refused(mode: int, path: Path, clock: ManualClock) -> None:
    ApiKeys.load(path).create("x", CHAT, Quota(), clock)
    path.chmod(mode)
    with pytest.raises(KeyUnreadable, match=f"{mode:04o}"):
        ApiKeys.load(path)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"keys": [{}]}', '{"keys": 3}'])
def test_damaged_file_is_refused_and_kept(content: str, path: Path, clock: ManualClock) -> None:
    ApiKeys.load(path).create("x", CHAT, Quota(), clock)
    path.write_text(content)
    with pytest.raises(KeyUnreadable):
        ApiKeys.load(path)
    assert path.read_text() == content


def test_key_that_cannot_be_written_is_not_in_force(tmp_path: Path, clock: ManualClock) -> None:
    keys = ApiKeys.load(tmp_path / "missing" / "api_keys.json")
    with pytest.raises(KeyUnreadable):
        keys.create("x", CHAT, Quota(), clock)
    assert keys.keys == ()


@pytest.mark.parametrize("name", ["", "x" * 65, "\x1b[31mred"])
def test_unusable_names_are_refused(name: str, path: Path, clock: ManualClock) -> None:
    with pytest.raises(BadValue):
        ApiKeys.load(path).create(name, CHAT, Quota(), clock)
    assert not path.exists()


def test_as_many_keys_as_may_be_are_read_back_whatever_their_names(
    path: Path, clock: ManualClock
) -> None:
    name = "\N{FACE WITH TEARS OF JOY}" * 64
    key, _ = ApiKeys().create(name, frozenset(Scope), Quota(10**9, 10**9), clock)
    ids = [f"{number:08x}" for number in range(MAX_KEYS - 1)]
    keys = ApiKeys(path, {each: replace(key, id=each) for each in ids})
    _, text = keys.create("the last", CHAT, Quota(), clock)
    again = ApiKeys.load(path)
    assert again.keys == keys.keys
    assert again.verify(text).name == "the last"


def test_revoking_what_is_not_there(path: Path) -> None:
    with pytest.raises(NotFound):
        ApiKeys.load(path).revoke("00000000")


REQUESTS, TOKENS = Resource.REQUESTS_PER_MINUTE, Resource.TOKENS_PER_DAY


def metered(path: Path, clock: ManualClock) -> tuple[ApiKeys, Principal, ResourceLedger]:
    """Keys, of which one has quotas, and a ledger that knows them."""
    keys = ApiKeys.load(path)
    key, _ = keys.create("x", CHAT, Quota(2, 100), clock)
    who = Principal(PrincipalKind.KEY, key.id)
    return keys, who, ResourceLedger(clock, personal=quotas(keys))


def test_requests_per_minute(path: Path, clock: ManualClock) -> None:
    _, who, ledger = metered(path, clock)
    ledger.spend(who, REQUESTS)
    ledger.spend(who, REQUESTS)
    clock.seconds += 20
    with pytest.raises(QuotaExceeded, match="2 requests per minute") as caught:
        ledger.spend(who, REQUESTS)
    assert caught.value.param == "requests_per_minute"
    assert "40 s" in caught.value.fix
    clock.seconds += 40
    ledger.spend(who, REQUESTS)


def test_tokens_per_day(path: Path, clock: ManualClock) -> None:
    _, who, ledger = metered(path, clock)
    ledger.require(who, TOKENS)
    ledger.charge(who, TOKENS, 100)
    clock.seconds += 61
    with pytest.raises(QuotaExceeded, match="100 tokens per day"):
        ledger.require(who, TOKENS)
    clock.seconds += 86_400
    ledger.require(who, TOKENS)


def test_a_key_without_quotas_and_whoever_has_no_key_are_counted_without_limit(
    path: Path, clock: ManualClock
) -> None:
    keys, _, ledger = metered(path, clock)
    free, _ = keys.create("y", CHAT, Quota(), clock)
    for who in (
        Principal(PrincipalKind.KEY, free.id),
        Principal(PrincipalKind.KEY, "ffffffff"),
        Principal(PrincipalKind.PEER, keys.keys[0].id),
    ):
        ledger.charge(who, TOKENS, 10**9)
        ledger.require(who, TOKENS)
        for _ in range(9):
            ledger.spend(who, REQUESTS)
