"""Codes and links: what is in them, and what is refused when somebody types them."""

from __future__ import annotations

import pytest

from mesh.errors import BadValue
from mesh.identity.fingerprints import WORDS
from mesh.identity.invitations import Form, Invitation, Ticket, parse_ticket, qr_code
from mesh.identity.roster import TrustLevel
from tests.identity.support import Party

HOME = Party("home").id


def test_code_has_two_words_and_two_digits() -> None:
    codes = {Invitation.create().code for _ in range(200)}
    assert len(codes) > 195
    for code in codes:
        first, second, digits = code.split("-")
        assert first in WORDS
        assert second in WORDS
        assert digits.isdecimal()


def test_link_brings_everything_along() -> None:
    invitation = Invitation.create()
    link = invitation.link(HOME, "fe80::1%eth0", 4711)
    expected = Ticket(Form.LINK, invitation.secret, HOME, "fe80::1%eth0", 4711)
    assert parse_ticket(link) == parse_ticket(f" {link.lower()}\n") == expected
    assert invitation.secret.hex() not in repr(expected)


def test_link_fits_a_qr_code_that_fits_a_terminal() -> None:
    drawn = qr_code(Invitation.create().link(HOME, "192.168.178.123", 65535)).splitlines()
    assert 15 < len(drawn) <= 24
    assert "\u2580" in "".join(drawn)


@pytest.mark.parametrize(
    "text",
    [
        "", "amber", "amber-river", "amber-river-4", "amber-river-421", "amber-rivver-42",
        "42-amber-river", "amber-river-\u0664\u0662", "HEARTHNET:", "HEARTHNET:AAAA",
        "HEARTHNET:1", "HEARTHNET:\u00e9",
    ],
)  # fmt: skip
def test_what_is_no_ticket_is_refused_with_a_fix(text: str) -> None:
    with pytest.raises(BadValue) as caught:
        parse_ticket(text)
    assert caught.value.fix


@pytest.mark.parametrize("cut", [1, 8, 40])
def test_truncated_link_is_refused(cut: int) -> None:
    link = Invitation.create().link(HOME, "192.168.1.2", 4711)
    with pytest.raises(BadValue):
        parse_ticket(link[:-cut])


@pytest.mark.parametrize("ttl_s", [0, -1, 3601, float("nan")])
def test_lifetime_is_bounded(ttl_s: float) -> None:
    with pytest.raises(BadValue):
        Invitation.create(ttl_s=ttl_s)


def test_nobody_is_invited_as_an_anchor() -> None:
    with pytest.raises(BadValue):
        Invitation.create(TrustLevel.ANCHOR)
