from __future__ import annotations

import asyncio
import gc
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from mesh.accounts.ledger import Resource, of_peer
from mesh.errors import (
    BadCheckpoint,
    BadRequest,
    Busy,
    CacheFull,
    ContextTooLong,
    DeviceFailed,
    LimitReached,
    MeshError,
    NoRoute,
    SessionGone,
    WeightsMismatch,
)
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import WireDtype
from mesh.wire.activations import to_wire
from mesh.wire.limits import Limits
from mesh.wire.messages import Failure, Loading, Open, OpenEnds, OpenPart, Step
from tests.shard.asker import Attic, CountedLoader, close_to, settled
from tests.shard.spans import rows, step

REQUEST = Open(1, "toy", "5" * 64, 0, 4, 2048, WireDtype.FP32)


async def test_streams_are_limited_strictly_when_all_ask_at_once() -> None:
    async with Attic(max_concurrent_streams=2) as attic:
        askers = [attic.asker() for _ in range(5)]
        outcomes = await asyncio.gather(*(a.open() for a in askers), return_exceptions=True)
        assert [type(o) for o in outcomes].count(Busy) == 3
        assert (await attic.server.health()).active_streams == 2
        askers[outcomes.index(None)].close()
        await settled(lambda: attic.server.load_now().kv_tokens_used == 128)
        await askers[-1].open(session=2)


async def test_streams_are_limited_while_the_weights_are_loading() -> None:
    attic = Attic(max_concurrent_streams=2)
    askers = [attic.asker() for _ in range(4)]
    outcomes = await asyncio.gather(*(a.open() for a in askers), return_exceptions=True)
    assert [type(o) for o in outcomes].count(Busy) == 2
    assert attic.loader.loads == 1
    await attic.server.evict()
    attic.queue.close()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"weights_sha256": "6" * 64}, WeightsMismatch),
        ({"model_id": "other"}, NoRoute),
        ({"stop": 5}, NoRoute),
        ({"start": 3, "stop": 3}, BadRequest),
        ({"max_tokens": 0}, BadRequest),
        ({"max_tokens": 10**6}, ContextTooLong),
    ],
)
async def test_a_session_that_cannot_be_is_refused(
    changes: dict[str, Any], error: type[MeshError]
) -> None:
    async with Attic() as attic:
        with pytest.raises(error):
            await attic.asker().open(**changes)
        assert attic.server.load_now().kv_tokens_used == 0


async def test_a_session_number_in_use_and_a_message_out_of_place_are_refused() -> None:
    async with Attic() as attic:
        asker = attic.asker()
        await asker.open()
        with pytest.raises(BadRequest):
            await asker.open()
        asker.link.send(Loading(1))
        failure = await asker.answer()
        assert isinstance(failure, Failure)
        assert failure.error["code"] == "bad_request"


async def test_the_cache_budget_counts_all_sessions_and_parked_ones_make_room() -> None:
    async with Attic(kv_tokens=300) as attic:
        asker = attic.asker()
        for session in (1, 2):
            await asker.open(session, max_tokens=100)
            await asker.step(0, 0, rows(3), session)
        asker.park(1)
        asker.park(2)
        await asker.open(3, max_tokens=200)  # only the one parked first has to go
        with pytest.raises(SessionGone):
            await asker.resume(1, 100)
        await asker.resume(2, 100)
        await asker.step(1, 3, rows(1), 2)
        with pytest.raises(CacheFull):
            await asker.open(4, max_tokens=1)


async def test_a_parked_session_keeps_its_cache_but_no_stream(span: TorchRuntime) -> None:
    async with Attic(max_concurrent_streams=1) as attic:
        asker = attic.asker()
        await asker.open(1)
        await asker.step(0, 0, rows(9), 1)
        asker.park(1)
        await asker.open(2)
        assert [each.last_result for each in attic.server.sessions if each.parked] == [None]
        with pytest.raises(Busy):
            await asker.resume(1)
        with pytest.raises(BadRequest):
            await asker.step(1, 9, rows(1), 1)
        asker.close(2)
        await asker.resume(1)
        cache = span.new_cache(64)
        step(span, cache, 0, rows(9))
        assert close_to(await asker.step(1, 9, rows(1), 1), step(span, cache, 9, rows(1)))


async def test_a_session_parked_during_its_step_parks_right_after() -> None:
    async with Attic(max_concurrent_streams=1) as attic:
        asker = attic.asker()
        await asker.open()
        asker.send_step(0, 0, rows(40))
        asker.park()
        await asker.hidden(0)
        assert attic.server.load_now().parked == 1
        await asker.open(2)


async def test_a_resumed_session_has_the_room_it_asks_for_now() -> None:
    async with Attic(kv_tokens=200) as attic:
        asker = attic.asker()
        await asker.open(max_tokens=10)
        await asker.step(0, 0, rows(10))
        asker.park()
        await asker.open(2, max_tokens=100)
        with pytest.raises(CacheFull):
            await asker.resume(1, max_tokens=101)
        await asker.resume(1, max_tokens=100)
        await asker.step(1, 10, rows(90))
        with pytest.raises(CacheFull):
            await asker.step(2, 100, rows(1))
        with pytest.raises(BadRequest):
            await asker.resume(1)
        asker.park()
        await asker.resume(1, max_tokens=1)
        now = attic.server.load_now()
        assert now.kv_tokens_used == 200, "what is allocated is taken, wanted or not"


async def test_the_lease_of_a_parked_session_ends() -> None:
    async with Attic(park_lease_s=0.02) as attic:
        asker = attic.asker()
        await asker.open()
        await asker.step(0, 0, rows(2))
        asker.park()
        await settled(lambda: attic.server.load_now().parked == 1)
        await settled(lambda: attic.server.load_now().parked == 0)
        with pytest.raises(SessionGone):
            await asker.step(1, 2, rows(1))


async def test_a_link_that_closes_frees_its_sessions_at_once() -> None:
    async with Attic() as attic:
        gone, stays = attic.asker(), attic.asker()
        for session in (1, 2, 3):
            await gone.open(session)
        await stays.open()
        gone.park(3)
        await settled(lambda: attic.server.load_now().parked == 1)
        gone.cut()
        await settled(lambda: attic.server.sessions.active == 1)
        now = attic.server.load_now()
        assert (now.kv_tokens_used, now.kv_mb) == (128, 0)
        assert attic.server.scheduler.streams == 1
        await stays.step(0, 0, rows(2))
        assert attic.server.load_now().kv_mb > 0


async def test_a_session_closed_during_its_step_is_freed_right_after() -> None:
    async with Attic(max_concurrent_streams=1, prefill_rows=64) as attic:
        asker = attic.asker()
        await asker.open(max_tokens=1024)
        asker.send_step(0, 0, rows(1000))
        await settled(lambda: attic.server.queue_depth == 1)
        asker.close()
        await settled(lambda: attic.server.load_now().kv_tokens_used == 0)
        await asker.open(2)
        await asker.step(0, 0, rows(1), 2)
        assert attic.server.scheduler.streams == 1, "it was freed once"
        assert asker.answers_waiting == 0
        assert (await attic.server.health()).queue_depth == 0


async def test_idle_weights_are_freed_and_loaded_again_on_demand() -> None:
    async with Attic(eviction_idle_s=0.01) as attic:
        asker = attic.asker()
        await asker.open()
        first = await asker.step(0, 0, rows(3))
        assert attic.server.load_now().loaded
        loads = attic.loader.loads
        asker.close()
        await settled(lambda: not attic.server.load_now().loaded)
        assert asker.told_to_wait == []
        await asker.open(2)
        assert asker.told_to_wait == [2], "who asks must know why it takes long"
        assert torch.equal(await asker.step(0, 0, rows(3), 2), first)
        assert attic.loader.loads == loads + 1


async def test_weights_that_stay_are_freed_by_no_disuse_until_they_may_be() -> None:
    async with Attic(eviction_idle_s=0.0) as attic:
        attic.server.keep_resident(True)
        asker = attic.asker()
        await asker.open()
        asker.close()
        await settled(lambda: not list(attic.server.sessions))
        await asyncio.sleep(0.05)
        assert attic.server.load_now().loaded
        assert attic.server.idle_s is None, "nor are they room for another shard"
        attic.server.keep_resident(False)
        await settled(lambda: not attic.server.load_now().loaded)


async def test_weights_stay_while_a_session_is_parked() -> None:
    async with Attic(eviction_idle_s=0.0) as attic:
        asker = attic.asker()
        await asker.open()
        asker.park()
        await settled(lambda: attic.server.load_now().parked == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert attic.server.load_now().loaded


async def test_an_eviction_drops_sessions_and_says_so() -> None:
    async with Attic() as attic:
        asker = attic.asker()
        await asker.open()
        await asker.step(0, 0, rows(3))
        await attic.server.evict()
        assert not attic.server.load_now().loaded
        with pytest.raises(SessionGone):
            await asker.step(1, 3, rows(1))
        await asker.open(1)


async def test_an_eviction_of_nothing_looks_for_nothing_and_waits_for_one_under_way() -> None:
    async with Attic() as attic:
        searched: list[str] = []
        gc.callbacks.append(lambda phase, info: searched.append(phase))
        gc.disable()  # all that is left are those that somebody asks for
        try:
            first = asyncio.create_task(attic.server.evict())
            await settled(lambda: not attic.server.load_now().loaded)
            await attic.server.evict()
            assert searched == ["start", "stop"]
            await first
            await attic.server.evict()
            assert searched == ["start", "stop"]
        finally:
            gc.enable()
            gc.callbacks.pop()


async def test_a_failed_load_is_the_opener_s_error_and_takes_no_stream() -> None:
    error = BadCheckpoint("The file is cut short.", fix="Copy it again.")
    attic = Attic(CountedLoader(error))
    with pytest.raises(BadCheckpoint):
        await attic.asker().open()
    assert (await attic.server.health()).active_streams == 0
    attic.loader.error = None
    await attic.asker().open()
    await attic.server.evict()
    attic.queue.close()


async def test_a_reload_that_fails_in_a_way_nobody_foresaw_is_answered() -> None:
    async with Attic(eviction_idle_s=0.01) as attic:
        asker = attic.asker()
        await asker.open()
        asker.close()
        await settled(lambda: not attic.server.load_now().loaded)
        attic.loader.error = RuntimeError("the bus fell off")
        with pytest.raises(DeviceFailed, match="RuntimeError: the bus fell off"):
            await asker.open(2)
        assert asker.told_to_wait == [2]
        assert (await attic.server.health()).active_streams == 0
        attic.loader.error = None
        await asker.open(2)


async def test_a_link_that_closes_while_loading_leaves_nothing_behind() -> None:
    attic = Attic()
    asker = attic.asker()
    asker.send_open()
    await settled(lambda: attic.server.load_now().kv_tokens_used > 0)
    asker.cut()
    await settled(lambda: attic.server.load_now().kv_tokens_used == 0)
    await settled(lambda: attic.server.load_now().loaded)
    await attic.server.evict()
    attic.queue.close()


async def test_for_a_session_that_is_closed_nothing_is_loaded() -> None:
    async with Attic() as attic:
        server, loader = attic.server, attic.loader
        server.descriptor = replace(server.descriptor, embeds=True)
        server.lend_ends(lambda: pytest.fail("nobody needs them any more"), nullcontext)
        await server.evict()
        loads = loader.loads
        fields = {"ids": True, "candidates": 0, "rows": 0}
        session = server.admit(OpenEnds(**asdict(REQUEST) | fields))
        opening = asyncio.create_task(session.opened())
        await settled(lambda: server.weights.is_loading)
        session.close()
        with pytest.raises(SessionGone):
            await opening
        assert loader.loads == loads + 1
        await server.evict()
        session = server.admit(REQUEST)
        session.close()
        with pytest.raises(SessionGone):
            await session.opened()
        assert loader.loads == loads + 1


async def test_a_peer_that_reads_less_than_it_asks_for_is_cut() -> None:
    async with Attic() as attic:
        asker = attic.asker(Limits(chunk_bytes=1024, queued_bytes=1000))
        await asker.open()
        half = to_wire(rows(6), WireDtype.FP16)
        asker.link.send(Step(1, 0, 0, half))  # its answer, in fp32, is over the link's limit
        await settled(lambda: asker.link.is_closed)
        await settled(lambda: attic.server.load_now().kv_tokens_used == 0)


async def test_edits_before_their_open_are_bounded_per_peer_however_many_links() -> None:
    async with Attic() as attic:

        async def send_parts() -> str:
            asker = attic.asker()
            for _ in range(32):
                asker.link.send(OpenPart(1, bytes(128 << 10)))
            asker.send_step(0, 0, rows(1))  # refused in any case, behind all parts
            answer = await asker.answer()
            assert isinstance(answer, Failure)
            return str(answer.error["code"])

        codes = [await send_parts() for _ in range(6)]
        assert codes == [SessionGone.code] * 4 + [LimitReached.code] * 2
        accounts = attic.service.accounts
        assert accounts.holders(Resource.EDIT_BYTES) == {of_peer("a" * 64): 16 << 20}
