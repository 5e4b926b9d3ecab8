"""The signed log for people: filtered, newest first, in pages, harmless."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mesh.errors import BadRequest
from mesh.events.log import EventLog
from mesh.events.types import MODEL_PUBLISHED, STEERING_PUBLISHED
from mesh.hearth.listing import LogFilter, listing
from mesh.types import NodeId
from tests.events.support import Author, Node, found, let_in, open_node


def named(node: NodeId) -> str:
    return "attic" if node == Author(0).id else node[:6]


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[EventLog]:
    node: Node = await open_node(tmp_path / "log.sqlite")
    await found(node)
    await let_in(node, Author(1))
    for number in range(7):
        kind, key = (MODEL_PUBLISHED, "model_id") if number % 2 else (STEERING_PUBLISHED, "name")
        await node.log.append(kind, {key: f"m{number}", "raw": bytes(40)})
    yield node.log
    await node.log.close()


async def pages(log: EventLog, **wanted: Any) -> list[dict[str, Any]]:
    found_pages, after = [], None
    while True:
        page = await listing(log, LogFilter(**wanted, after=after), named)
        found_pages.append(page)
        after = page["next"]
        if after is None:
            return found_pages


async def test_everything_comes_once_newest_first_in_pages(log: EventLog) -> None:
    found_pages = await pages(log, limit=3)
    facts = [row for page in found_pages for row in page["facts"]]
    assert [row["place"] for row in facts] == [f"1/{number}" for number in range(7, 0, -1)]
    kinds = [row["type"] for page in found_pages for row in page["decisions"]]
    assert kinds == ["member.added", "hearth.founded"]
    assert {row["author_name"] for row in facts} == {"attic"}
    json.dumps(found_pages)
    assert facts[0]["says"]["raw"] == "00" * 16 + "… (40 bytes)"


@pytest.mark.parametrize(
    ("wanted", "facts", "decisions"),
    [
        ({"kind": "model"}, 3, 0),
        ({"kind": "member."}, 0, 1),
        ({"author": "attic"}, 7, 2),
        ({"author": Author(0).id}, 7, 2),
        ({"author": "nobody"}, 0, 0),
        ({"author": "attic", "kind": "steering"}, 4, 0),
    ],
)
async def test_the_filter_holds(
    log: EventLog, wanted: dict[str, str], facts: int, decisions: int
) -> None:
    found_pages = await pages(log, limit=2, **wanted)
    assert sum(len(page["facts"]) for page in found_pages) == facts
    assert sum(len(page["decisions"]) for page in found_pages) == decisions


@pytest.mark.parametrize("after", ["x", "1", "1.2", "1.a.b.c", "-1.", "²."])
async def test_a_place_that_is_none_is_refused(log: EventLog, after: str) -> None:
    with pytest.raises(BadRequest):
        await listing(log, LogFilter(after=after), named)
