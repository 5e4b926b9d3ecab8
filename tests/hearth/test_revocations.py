"""Revoked tokens as a hearth follows them: every change that matters, and no work at others."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest
from pydantic import ValidationError

from mesh.api.hearth import RevokeTokenBody
from mesh.clock import SystemClock
from mesh.errors import UntrustedPeer
from mesh.events.intake import Report
from mesh.events.log import LogChange
from mesh.events.state import AuthorFold, Fact, State, Subject
from mesh.events.types import TOKEN_REVOKED, Event
from mesh.hearth.control import Control
from mesh.hearth.founding import found
from mesh.hearth.hearth import Hearth
from mesh.hearth.network import Network
from mesh.hearth.revocations import Revocations
from mesh.identity.tokens import issue
from tests.discovery.network import new_key
from tests.events.support import Author, MemoryReplica, household

CLOCK = SystemClock()


def unexpected(report: Report) -> None:
    raise AssertionError(report)


@dataclass
class InHearth:
    """All of a network that revoking a token takes."""

    hearth: Hearth

    def require_hearth(self) -> Hearth:
        return self.hearth


class Watched(dict[Subject, Fact]):
    """Counts how often somebody goes through all of it."""

    read = 0

    def __iter__(self) -> Iterator[Subject]:
        self.read += 1
        return super().__iter__()


def watched(state: State, author: Author) -> tuple[State, Watched]:
    """The state with facts of an author that are watched."""
    fold = state.authors[author.id]
    facts = Watched(fold.facts)
    fold = AuthorFold(fold.standing, fold.generation, fold.seq, facts)
    return replace(state, authors={**state.authors, author.id: fold}), facts


def test_an_authors_facts_are_read_when_it_has_revoked_something() -> None:
    _, (founder, other), decisions = household(2)
    replica = MemoryReplica()
    replica.take([*decisions, founder.publish("m"), other.publish("m")])
    state, facts = watched(replica.state, other)
    revocations = Revocations(state)
    assert revocations.tokens == set()
    assert facts.read == 1

    def after(event: Event) -> frozenset[str]:
        replica.take([event])
        authors = {**replica.state.authors, other.id: state.authors[other.id]}
        revocations.note(LogChange((event,), (), replace(replica.state, authors=authors)))
        return revocations.tokens

    before = after(founder.publish("n"))
    assert after(founder.sign(TOKEN_REVOKED, {"token_id": "t"})) == {"t"}
    known = after(founder.publish("o"))
    assert after(founder.sign(TOKEN_REVOKED, {"token_id": "t"})) is known
    assert before == set()
    assert facts.read == 1


def test_what_ends_an_authors_facts_ends_its_revocations() -> None:
    house, (_, other), decisions = household(2)
    replica = MemoryReplica()
    replica.take([*decisions, other.publish("m"), other.sign(TOKEN_REVOKED, {"token_id": "t"})])
    revocations = Revocations(replica.state)
    assert revocations.tokens == {"t"}
    cut = house.revoke(other, 1)
    replica.take([cut])
    revocations.note(LogChange((), (cut,), replica.state))
    assert revocations.tokens == set()


def test_a_chain_that_begins_again_has_revoked_nothing() -> None:
    _, (_, other), decisions = household(2)
    replica = MemoryReplica()
    replica.take([*decisions, other.sign(TOKEN_REVOKED, {"token_id": "t"})])
    revocations = Revocations(replica.state)
    assert revocations.tokens == {"t"}
    other.begin_again()
    event = other.publish("m")
    replica.take([event])
    revocations.note(LogChange((event,), (), replica.state))
    assert revocations.tokens == set()


def test_what_cannot_be_the_name_of_a_token_is_refused_before_it_is_signed() -> None:
    key = new_key()
    ids = {"holder": key.node_id, "audience": key.node_id, "subject": "s"}
    text = issue(key, CLOCK, scope=frozenset({"tensors"}), **ids).split(".")[1]
    name = json.loads(base64.urlsafe_b64decode(text + "==="))["jti"]
    assert RevokeTokenBody(token_id=name).token_id == name
    for slip in (name[:-1], f"{name}\n", f" {name}", "x" * 200, "ä" * 22):
        with pytest.raises(ValidationError):
            RevokeTokenBody(token_id=slip)


async def test_who_may_use_no_shards_is_told_that_it_revokes_none(tmp_path: Path) -> None:
    key, guest = new_key(), new_key()
    record = (await found(key, "attic", tmp_path, CLOCK, unexpected)).record
    logs = tmp_path / "guest"
    logs.mkdir()
    for node, where, counts in ((key, tmp_path, True), (guest, logs, False)):
        hearth = await Hearth.open(node, record, where, CLOCK, unexpected)
        control = Control(cast("Network", InHearth(hearth)))
        try:
            if counts:
                await control.revoke_token("t")
            else:
                with pytest.raises(UntrustedPeer):
                    await control.revoke_token("t")
            assert hearth.revoked_tokens() == ({"t"} if counts else set())
        finally:
            await hearth.close()
