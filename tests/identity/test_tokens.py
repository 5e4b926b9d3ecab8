"""Capability tokens: good for their holder, purpose, place and time, once; for nobody else."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import TokenRejected, from_dict
from mesh.identity import tokens
from mesh.identity.tls import require_node
from mesh.identity.tokens import MAX_TOKEN_BYTES, TokenVerifier, issue
from mesh.types import NodeId
from mesh.wire.connection import WebSocketLink
from mesh.wire.websocket import connect, serve
from tests.identity.support import ManualClock, Party, Recorder

ISSUER, HOLDER, HERE, OTHER = (Party(name) for name in ("issuer", "holder", "here", "other"))
SCOPE = "tensors"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def verifier(clock: ManualClock) -> TokenVerifier:
    return TokenVerifier(HERE.id, {ISSUER.id: ISSUER.key.public_bytes}.get, clock)


def token(clock: ManualClock, issuer: Party = ISSUER, **changes: Any) -> str:
    wanted = {"holder": HOLDER.id, "audience": HERE.id, "subject": "s1", "ttl_s": 60}
    scope = frozenset({SCOPE, "gradients"})
    return issue(issuer.key, clock, **{**wanted, "scope": scope, **changes})


def failed_check(take: Callable[[], object]) -> str | None:
    with pytest.raises(TokenRejected) as caught:
        take()
    assert from_dict(caught.value.to_dict()).code == "token_rejected"
    return caught.value.param


def test_good_token_is_taken_once(clock: ManualClock, verifier: TokenVerifier) -> None:
    text = token(clock)
    claims = verifier.take(text, holder=HOLDER.id, scope=SCOPE, subject="s1")
    assert (claims.issuer, claims.subject, claims.holder) == (ISSUER.id, "s1", HOLDER.id)
    assert claims.scope == {SCOPE, "gradients"}
    assert claims.expires_at - claims.issued_at == 60
    assert failed_check(lambda: verifier.take(text, holder=HOLDER.id, scope=SCOPE)) == "replay"


def test_token_is_an_ordinary_jws(clock: ManualClock) -> None:
    header, payload, signature = token(clock).split(".")
    pad = "=" * 3
    assert json.loads(base64.urlsafe_b64decode(header + pad)) == {"alg": "EdDSA", "typ": "JWT"}
    claims = json.loads(base64.urlsafe_b64decode(payload + pad))
    assert set(claims) == {"iss", "sub", "aud", "scope", "exp", "iat", "jti", "cnf"}
    assert claims["cnf"] == {"kid": HOLDER.id}
    assert len(base64.urlsafe_b64decode(signature + pad)) == 64


@pytest.mark.parametrize(
    ("check", "changes", "presented"),
    [
        ("audience", {"audience": OTHER.id}, {}),
        ("holder", {}, {"holder": OTHER.id}),
        ("scope", {}, {"scope": "admin"}),
        ("scope", {"scope": frozenset({"tensor"})}, {}),
        ("subject", {}, {"subject": "s2"}),
        ("issuer", {"issuer": OTHER}, {}),
    ],
)
def test_token_for_something_else_is_refused(
    check: str,
    changes: dict[str, Any],
    presented: dict[str, Any],
    clock: ManualClock,
    verifier: TokenVerifier,
) -> None:
    text = token(clock, **changes)
    shown: dict[str, Any] = {"holder": HOLDER.id, "scope": SCOPE, "subject": "s1", **presented}
    assert failed_check(lambda: verifier.take(text, **shown)) == check
    # The refused attempt has not used up a good token.
    if not changes:
        verifier.take(text, holder=HOLDER.id, scope=SCOPE, subject="s1")


async def test_stolen_token_does_not_work_over_the_thiefs_link(
    clock: ManualClock, verifier: TokenVerifier
) -> None:
    """Holder and thief are both members; the link says who presents the token."""
    outcomes: dict[NodeId, str] = {}
    text = token(clock)

    def accept(link: WebSocketLink) -> Recorder:
        peer = require_node(link.peer_certificate, link.peer.node_id)
        try:
            verifier.take(str(link.peer.fields["token"]), holder=peer, scope=SCOPE)
            outcomes[peer] = "taken"
        except TokenRejected as error:
            outcomes[peer] = str(error.param)
            raise
        return Recorder()

    here = await HERE.trusting(HOLDER, OTHER)
    server = await serve("127.0.0.1", 0, accept=accept, hello=HERE.hello(), ssl=here.server)
    for party in (OTHER, HOLDER):
        hello = party.hello()
        hello.fields["token"] = text
        client = (await party.trusting(HERE)).client(HERE.id)
        with contextlib.suppress(TokenRejected):
            link = await connect(
                "127.0.0.1", server.port, hello=hello, handler=Recorder(), ssl=client
            )
            link.close()
    await server.close()
    assert outcomes == {OTHER.id: "holder", HOLDER.id: "taken"}


@pytest.mark.parametrize(
    ("elapsed_s", "good"), [(-119, True), (-125, False), (0, True), (179, True), (181, False)]
)
def test_clocks_may_differ_by_two_minutes(
    elapsed_s: int, good: bool, clock: ManualClock, verifier: TokenVerifier
) -> None:
    text = token(clock)
    clock.offset_s = elapsed_s
    if good:
        verifier.take(text, holder=HOLDER.id, scope=SCOPE)
    else:
        with pytest.raises(TokenRejected, match="another clock") as caught:
            verifier.take(text, holder=HOLDER.id, scope=SCOPE)
        assert caught.value.param == "expiry"


def test_revoked_token_is_refused_and_running_sessions_notice(
    clock: ManualClock, verifier: TokenVerifier
) -> None:
    text = token(clock)
    claims = verifier.take(text, holder=HOLDER.id, scope=SCOPE)
    verifier.check(claims)
    verifier.revoke(frozenset({claims.token_id}))
    assert failed_check(lambda: verifier.check(claims)) == "revoked"
    assert failed_check(lambda: verifier.take(text, holder=HOLDER.id, scope=SCOPE)) == "revoked"


def test_revoked_issuer_takes_its_tokens_along(clock: ManualClock) -> None:
    keys = {ISSUER.id: ISSUER.key.public_bytes}
    verifier = TokenVerifier(HERE.id, keys.get, clock)
    claims = verifier.take(token(clock), holder=HOLDER.id, scope=SCOPE)
    keys.clear()
    assert failed_check(lambda: verifier.check(claims)) == "issuer"


def encoded(text: str) -> str:
    """As RFC 7515 has it: base64url without padding."""
    return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()


def _forge(text: str, **changes: Any) -> str:
    header, payload, signature = text.split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "==="))
    for name, value in changes.items():
        if value is None:
            claims.pop(name, None)
        else:
            claims[name] = value
    return f"{header}.{encoded(json.dumps(claims))}.{signature}"


@pytest.mark.parametrize(
    "changes", [{"scope": "tensors admin"}, {"exp": 2_000_000_000}, {"cnf": {"kid": OTHER.id}},
                {"sub": "s2"}, {"jti": "x"}]
)  # fmt: skip
def test_changed_claims_break_the_signature(
    changes: dict[str, Any], clock: ManualClock, verifier: TokenVerifier
) -> None:
    if "exp" in changes:
        changes = {"exp": int(clock.now().timestamp()) + 599}
    forged = _forge(token(clock), **changes)
    assert failed_check(lambda: verifier.take(forged, holder=HOLDER.id, scope=SCOPE)) == "signature"


@pytest.mark.parametrize("header", ['{"alg":"none"}', '{"alg":"HS256","typ":"JWT"}', "{}"])
def test_algorithm_is_not_for_the_sender_to_choose(
    header: str, clock: ManualClock, verifier: TokenVerifier
) -> None:
    _, payload, signature = token(clock).split(".")
    for end in (signature, ""):
        forged = f"{encoded(header)}.{payload}.{end}"
        assert failed_check(lambda f=forged: verifier.take(f, holder=HOLDER.id, scope=SCOPE)) == (
            "form"
        )


def test_one_token_has_one_spelling(clock: ManualClock, verifier: TokenVerifier) -> None:
    """Else a replay could pass as another token, were replays told apart by their text."""
    text = token(clock)
    for other in (
        "\udc80" + text,
        text + "\udc80",
        text + "=",
        text + "\n",
        text.replace(".", "..", 1),
        "x" * MAX_TOKEN_BYTES,
    ):
        assert failed_check(lambda t=other: verifier.take(t, holder=HOLDER.id, scope=SCOPE)) == (
            "form"
        )


def test_nobody_issues_tokens_for_longer_than_ten_minutes(
    clock: ManualClock, verifier: TokenVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="600"):
        token(clock, ttl_s=601)
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "MAX_TTL_S", 10_000)
        long = token(clock, ttl_s=601)
    assert failed_check(lambda: verifier.take(long, holder=HOLDER.id, scope=SCOPE)) == "form"


@pytest.fixture
def full(clock: ManualClock) -> TokenVerifier:
    """One that takes no more of `HOLDER`'s tokens for now."""
    keys = {ISSUER.id: ISSUER.key.public_bytes}
    verifier = TokenVerifier(HERE.id, keys.get, clock, replay_entries=3)
    for _ in range(3):
        verifier.take(token(clock), holder=HOLDER.id, scope=SCOPE)
    last = token(clock)
    assert failed_check(lambda: verifier.take(last, holder=HOLDER.id, scope=SCOPE)) == "replay"
    return verifier


def test_replay_table_is_bounded_and_refuses_rather_than_forgets(
    clock: ManualClock, full: TokenVerifier
) -> None:
    clock.seconds += 300
    for _ in range(3):
        full.take(token(clock), holder=HOLDER.id, scope=SCOPE)
    last = token(clock)
    assert failed_check(lambda: full.take(last, holder=HOLDER.id, scope=SCOPE)) == "replay"


def test_a_holder_who_used_up_its_room_leaves_that_of_others(
    clock: ManualClock, full: TokenVerifier
) -> None:
    full.take(token(clock, holder=OTHER.id), holder=OTHER.id, scope=SCOPE)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@given(st.one_of(st.text(), st.sampled_from(["iss", "sub", "aud", "scope", "exp", "iat", "jti",
                                             "cnf"])), _JSON)  # fmt: skip
@settings(max_examples=200)
def test_junk_is_refused_with_a_typed_error(name: str, value: Any) -> None:
    clock = ManualClock()
    verifier = TokenVerifier(HERE.id, {ISSUER.id: ISSUER.key.public_bytes}.get, clock)
    for text in (
        name,
        f"{token(clock).split('.')[0]}.{name}.{name}",
        _forge(token(clock), **{name: value}),
    ):
        with pytest.raises(TokenRejected):
            verifier.take(text, holder=HOLDER.id, scope=SCOPE)
