"""A member that signs two histories: kept as evidence, put out, and shown with where it forked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from mesh.cli import members
from mesh.clock import SystemClock
from mesh.events.intake import Received, Report
from mesh.events.types import Draft, Event, EventId, seal
from mesh.hearth.control import Control
from mesh.hearth.hearth import Hearth, found
from mesh.hearth.network import Network
from mesh.hearth.record import HearthRecord
from mesh.identity.certificates import make_certificate
from mesh.identity.decisions import Added
from mesh.identity.keys import NodeKey
from mesh.identity.roster import TrustLevel
from mesh.types import NodeId
from tests.discovery.network import new_key

CLOCK = SystemClock()


class InHearth:
    """What `Control` asks of the network."""

    def __init__(self, hearth: Hearth) -> None:
        self._hearth = hearth

    def require_hearth(self) -> Hearth:
        return self._hearth


def said(key: NodeKey, hearth: str, model: str, after: Event | None = None) -> Event:
    seq, prev = (1, EventId(bytes(32))) if after is None else (after.seq + 1, after.id)
    draft = Draft(
        hearth, key.node_id, seq, prev, 100 + seq, 0, "model.published", {"model_id": model}
    )
    return seal(draft, key.sign)


def received(*events: Event) -> Received:
    return Received(tuple((event.body, event.signature) for event in events))


@asynccontextmanager
async def opened(
    key: NodeKey, record: HearthRecord, logs: Path, reports: list[Report]
) -> AsyncIterator[Hearth]:
    hearth = await Hearth.open(key, record, logs, CLOCK, reports.append)
    try:
        yield hearth
    finally:
        await hearth.close()


async def test_fork_evidence_is_kept_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, twin = new_key(), new_key()
    reports: list[Report] = []
    record = await found(key, "attic", tmp_path, CLOCK, reports.append)
    async with opened(key, record, tmp_path, reports) as hearth:
        await hearth.decide(Added(make_certificate(twin), "barn", TrustLevel.TRUSTED))
        first = said(twin, hearth.id, "one")
        for event in (first, *(said(twin, hearth.id, model, first) for model in ("two", "b"))):
            await hearth._log.ingest(received(event), NodeId("peer"))
        await hearth._apply()
        assert [report.kind for report in reports] == ["log_forked"]

        view = Control(cast("Network", InHearth(hearth))).view()
        assert [member["name"] for member in view["members"]] == ["attic"]
        (row,) = view["out"]
        assert (row["name"], row["why"], row["forked_at"]) == ("barn", "forked", 2)
        assert [(model["id"], model["by"]) for model in view["models"]] == [("one", "barn")]
        # Whoever asks gets the two events that prove it.
        assert len((await hearth._log.page((), (twin.node_id,))).proofs) == 1
    # They are still there after a restart.
    async with opened(key, record, tmp_path, reports) as hearth:
        assert hearth.forks() == {twin.node_id: 1}
        assert len((await hearth._log.page((), (twin.node_id,))).proofs) == 1
    members.show(view)
    assert "signed two different events with number 2" in capsys.readouterr().out
