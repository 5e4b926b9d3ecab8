"""Who is in the hearth of a simulated run, and what had been decided when it begins.

The logs are real files, made once per cast and copied for each node.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mesh.events.authoring import LogSettings
from mesh.events.graph import Graph
from mesh.events.intake import Received
from mesh.events.log import EventLog
from mesh.identity.membership import HearthRules, verify
from mesh.types import NodeId
from tests.identity.deciding import ANCHOR, MEMBER, TRUSTED, Deciding, party
from tests.simulation.members.machine import LoopTime, run_metered
from tests.simulation.members.meter import Meter

HONEST = ("ann", "bob", "dan")
"""Two anchors, and one who is trusted; ann serves a shard, bob and dan ask."""

ANCHORS = ("ann", "bob")
VILLAIN = "eve"
ACCOMPLICE = "mal"
"""Whom eve would have in."""

LEVELS = {"anchor": ANCHOR, "trusted": TRUSTED, "member": MEMBER}

_MEMORY = Path("/dev/shm")  # noqa: S108 - only where it is there; files are private to a directory


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A directory for logs, in memory where there is such a place."""
    where = _MEMORY if _MEMORY.is_dir() else None
    return tempfile.TemporaryDirectory(prefix="hearthnet-sim-", dir=where)


@dataclass(frozen=True)
class Cast:
    """A hearth before the run: its id, its decisions, and a log that has them all."""

    hearth: str
    level: str
    history: Deciding
    log: Path

    def copy(self, to: Path) -> None:
        """A node's own log below a directory."""
        to.mkdir(parents=True)
        shutil.copy(self.log, to / f"{self.hearth}.db")


_ROOM = scratch()


@functools.cache
def cast(level: str) -> Cast:
    """The hearth in which eve has this level; she became an anchor before bob did."""
    history = Deciding(founder="ann")
    if level == "anchor":
        history.anchors(VILLAIN, "bob")
    else:
        history.anchors("bob")
        history.add("ann", VILLAIN, LEVELS[level])
    history.add("ann", "dan", TRUSTED)
    for name in ("ann", "bob"):
        history.acknowledge(name)
    file = Path(_ROOM.name) / f"{level}.db"
    run_metered(lambda meter: _write(file, history, meter))
    return Cast(history.hearth, level, history, file)


async def _write(file: Path, history: Deciding, _: Meter) -> None:
    graph: Graph = history.graph
    log = await EventLog.open(
        LogSettings(file, history.hearth, party("nobody").id),
        rules=HearthRules(history.hearth), verify=verify, sign=party("nobody").key.sign,
        clock=LoopTime(), on_report=lambda report: None,
    )  # fmt: skip
    decided = [graph[at] for at in range(len(graph))]
    signed = tuple((one.body, one.signature) for one in decided)
    outcome = await log.ingest(Received(decisions=signed), NodeId("template"))
    assert outcome.decided == len(decided)
    await log.close()
    await asyncio.sleep(0)
