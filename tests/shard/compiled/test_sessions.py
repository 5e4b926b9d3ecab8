"""Sessions of a shard whose runtime is compiled: what their slots mean for who is let in."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from mesh.errors import Busy
from mesh.shard.compiled.runtime import CompiledRuntime
from mesh.shard.compiled.slots import Bank, CacheShape, KeyShape, SlotCache
from tests.shard.asker import Attic, CountedLoader
from tests.shard.compiled.spans import compiled
from tests.shard.spans import rows


@pytest.fixture(scope="module")
def runtime() -> CompiledRuntime:
    return compiled()


@pytest.fixture
def _no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def test_a_parked_session_has_its_room_back_though_others_have_all_that_is_left(
    runtime: CompiledRuntime,
) -> None:
    async with Attic(CountedLoader(given=runtime), kv_tokens=150) as attic:
        asker = attic.asker()
        for session, max_tokens in ((1, 50), (2, 100)):
            await asker.open(session, max_tokens=max_tokens)
            await asker.step(0, 0, rows(3), session)
        asker.park(1)
        await asker.resume(1, max_tokens=50)
        await asker.step(1, 3, rows(1), 1)


@pytest.mark.usefixtures("_no_collections")
async def test_who_is_refused_takes_no_slot(runtime: CompiledRuntime) -> None:
    async with Attic(CountedLoader(given=runtime), max_concurrent_streams=1) as attic:
        asker = attic.asker()
        await asker.open()
        (session,) = attic.server.sessions
        assert session.sequence is not None
        for number in range(2, 5):
            with pytest.raises(Busy):
                await asker.open(number)
        mine, next_one = session.sequence.cache, runtime.new_cache(8)
        assert (mine.slot, next_one.slot) == (0, 1)


@pytest.mark.usefixtures("_no_collections")
@pytest.mark.timeout(10)
def test_a_slot_is_taken_though_a_forgotten_session_is_found_meanwhile() -> None:
    bank = Bank(CacheShape((KeyShape(1, 4),), positions=8))
    forgotten: Any = SlotCache(bank, 8)
    forgotten.itself = forgotten
    del forgotten

    def collect(_: object, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ == "remove":
            gc.collect()

    sys.setprofile(collect)
    try:
        other = SlotCache(bank, 8)
    finally:
        sys.setprofile(None)
    assert (other.slot, bank.take()) == (1, 0)
