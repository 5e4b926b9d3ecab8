"""A member that asks for as much as one small message can: what it gets, and what that costs."""

from __future__ import annotations

import asyncio
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh.accounts import allowances
from mesh.accounts.ledger import Resource, of_peer
from mesh.errors import BadFrame, LimitReached
from mesh.events.messages import Heads, Page, Pull, to_dict
from mesh.events.store import MAX_PAGE_BYTES
from mesh.events.types import MODEL_PUBLISHED
from mesh.hearth.hearth import Hearth
from mesh.wire.limits import DEFAULT_LIMITS, MIB
from mesh.wire.messages import Step, WireTensor
from tests.hearth.door import Door, Member, opened

LARGE_EVENTS = 24
MEMORY_BYTES = 8 << 20
CONTROL_BYTES = 256 << 10


async def fill(hearth: Hearth) -> None:
    """Events of almost the largest size: a repeated range of all of them has 360 KB."""
    for number in range(LARGE_EVENTS):
        await hearth.publish(MODEL_PUBLISHED, {"model_id": str(number), "x": bytes(15_000)})


def pull(number: int, *ranges: tuple[str, int, int, int]) -> dict[str, Any]:
    rows = [list(each) for each in ranges]
    return {**to_dict(Pull(number)), "ranges": rows}


async def still_answers(door: Door, member: Member, facts: int) -> None:
    member.say({"kind": "ask", "number": 99})
    assert isinstance(await member.answer(99), Heads)
    assert door.hearth.end_of_facts(door.hearth.key.node_id).last_seq == facts


async def test_a_pull_that_asks_for_one_range_256_times_is_not_answered(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        await fill(door.hearth)
        member = await door.enter()
        author = door.hearth.key.node_id
        tracemalloc.start()
        member.say(pull(7, *[(author, 1, 1, 2**40)] * 256))
        await still_answers(door, member, LARGE_EVENTS)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        member.link.close()
        assert peak < MEMORY_BYTES, "the answer to 16 KB"
        principal = of_peer(door.key.node_id)
        assert door.hearth.accounts.held(principal, Resource.PULLS) == 0
        bad = door.hearth.accounts.snapshot()
        (used,) = [row["resources"] for row in bad if row["name"] == door.key.node_id]
        assert used["bad_events_per_minute"]["used"] == 1


@pytest.mark.parametrize("size_bytes", [100, 300 << 10, 30 << 20])
async def test_a_control_link_takes_no_tensors(tmp_path: Path, size_bytes: int) -> None:
    """Small ones are steps, larger ones chunks, the largest no message of such a link at all."""
    chunk_bytes = DEFAULT_LIMITS.chunk_bytes if size_bytes > MIB else 100 << 10
    async with opened(tmp_path) as door:
        member = await door.enter(replace(DEFAULT_LIMITS, chunk_bytes=chunk_bytes))
        member.link.send(Step(1, 1, 0, WireTensor("int8", (size_bytes,), bytes(size_bytes))))
        error = await asyncio.wait_for(member.ended, 20)
        if size_bytes < MIB:
            assert isinstance(error, BadFrame)
            assert "does not belong on a link for control" in error.message
        principal = of_peer(door.key.node_id)
        assert door.hearth.accounts.held(principal, Resource.BYTES_BUFFERED) < CONTROL_BYTES
        again = await door.enter()
        await still_answers(door, again, 0)
        again.link.close()


async def test_a_member_gets_as_many_links_as_a_daemon_needs(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        most = int(allowances.CONTROL_LINKS[Resource.LINKS].each)
        members = [await door.enter() for _ in range(most)]
        with pytest.raises(LimitReached, match=f"{most} links"):
            await door.enter()
        principal = of_peer(door.key.node_id)
        assert door.hearth.accounts.held(principal, Resource.LINKS) == most
        for member in members:
            member.link.close()
        async with asyncio.timeout(20):
            while door.hearth.accounts.held(principal, Resource.LINKS):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (await door.enter()).link.close()


async def test_an_honest_pull_gets_one_page_and_it_is_on_its_account(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        await fill(door.hearth)
        member = await door.enter()
        member.say(pull(7, (door.hearth.key.node_id, 1, 1, 2**40)))
        page = await member.answer(7)
        member.link.close()
        assert isinstance(page, Page)
        sizes = [len(body) + len(signature) for body, signature in page.received.events]
        assert 200_000 < sum(sizes) < MAX_PAGE_BYTES
        principal = of_peer(door.key.node_id)
        (row,) = [r for r in door.hearth.accounts.snapshot() if r["name"] == principal.name]
        assert row["resources"]["event_bytes_per_minute"]["used"] == sum(sizes)


async def test_a_peer_that_had_its_share_of_the_log_waits(tmp_path: Path) -> None:
    async with opened(tmp_path) as door:
        member = await door.enter()
        principal = of_peer(door.key.node_id)
        accounts = door.hearth.accounts
        accounts.charge(principal, Resource.EVENT_BYTES_PER_MINUTE, 1 << 40)
        member.say(pull(7, (door.hearth.key.node_id, 1, 1, 9)))
        async with asyncio.timeout(20):
            while not any(row["refused"] for row in accounts.snapshot()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert member.pages() == []
        member.link.close()
