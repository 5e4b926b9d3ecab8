from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from mesh.errors import Busy
from mesh.shard.torch_runtime import TorchRuntime
from mesh.wire.messages import Hello
from mesh.wire.websocket import LinkServer, connect, serve
from tests.shard.asker import Asker, Attic
from tests.shard.spans import relative_error, rows, step

ASKER = Hello("a" * 64, "asker", "tensors", "test")
SHARD = Hello("b" * 64, "attic", "tensors", "test")


@asynccontextmanager
async def listening(attic: Attic) -> AsyncIterator[LinkServer]:
    server = await serve("127.0.0.1", 0, accept=attic.service.handler, hello=SHARD)
    try:
        yield server
    finally:
        await server.close()


async def linked(server: LinkServer) -> Asker:
    asker = Asker()
    asker.use(await connect("127.0.0.1", server.port, hello=ASKER, handler=asker))
    return asker


async def test_a_session_over_a_socket(span: TorchRuntime) -> None:
    cache = span.new_cache(128)
    async with Attic() as attic, listening(attic) as server:
        asker = await linked(server)
        await asker.open()
        for number, (position, count) in enumerate([(0, 60), (60, 1), (61, 4), (62, 1)]):
            hidden = rows(count, seed=number)
            found = await asker.step(number, position, hidden)
            assert relative_error(found, step(span, cache, position, hidden)) < 1e-5
        asker.link.close()


async def test_the_loop_answers_others_while_a_prefill_computes() -> None:
    async with Attic() as attic, listening(attic) as server:
        long, other = await linked(server), await linked(server)
        await long.open(max_tokens=3000)
        long.send_step(0, 0, rows(3000))
        # Answered by the loop itself, which must not wait for the prefill.
        await other.open()
        assert long.answers_waiting == 0
        assert (await long.hidden(0)).shape[1] == 3000
        long.link.close()
        other.link.close()


async def test_concurrent_links_share_the_streams_of_a_shard() -> None:
    async with Attic(max_concurrent_streams=3) as attic, listening(attic) as server:
        askers = [await linked(server) for _ in range(5)]
        outcomes = await asyncio.gather(*(a.open() for a in askers), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes].count(Busy) == 2
        ready = [a for a, outcome in zip(askers, outcomes, strict=True) if outcome is None]
        results = await asyncio.gather(*(a.step(0, 0, rows(3)) for a in ready))
        assert all(relative_error(result, results[0]) < 1e-6 for result in results)
        for asker in askers:
            asker.link.close()


async def test_a_lost_socket_frees_the_stream() -> None:
    async with Attic(max_concurrent_streams=1) as attic, listening(attic) as server:
        first, second = await linked(server), await linked(server)
        await first.open()
        with pytest.raises(Busy):
            await second.open()
        first.link.close()
        async with asyncio.timeout(5):
            while attic.server.load_now().kv_tokens_used:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0)
        await second.open()
        assert torch.isfinite(await second.step(0, 0, rows(2))).all()
        second.link.close()
