"""Models that are read before anybody can wish for them: what is seen of that, and how many are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from mesh.deployments.listing import DeploymentRows
from mesh.deployments.phases import Phases
from mesh.deployments.reading import MAX_READINGS, ReadingModels
from mesh.deployments.weights import Checkpoint, OnProgress
from mesh.deployments.wishes import Wish
from mesh.errors import Busy, TransferFailed
from mesh.types import LayerRange, ModelId
from tests.deployments.house import SimulatedHouse
from tests.deployments.test_control import Here, Models
from tests.waiting import until

MB = 1 << 20


class Hub(Models):
    """Models come from it once it is told so, or do not."""

    def __init__(self) -> None:
        self.progress: dict[str, OnProgress] = {}
        self.ends: dict[str, asyncio.Future[None]] = {}

    async def read(
        self, model: str, layers: Sequence[LayerRange], on_progress: OnProgress
    ) -> Checkpoint:
        self.progress[model] = on_progress
        self.ends[model] = end = asyncio.get_running_loop().create_future()
        await end
        return await self.find(model)


class Reader:
    """A node that reads models of a hub; `found` are those that it has wished for since."""

    def __init__(self) -> None:
        here = Here(SimulatedHouse([100]))
        self.hub = Hub()
        rows = DeploymentRows(here, Phases(lambda shard, now: None))
        self.readings = ReadingModels(self.hub, rows, here.node)
        self.found: list[tuple[str, ModelId]] = []
        self._wishes = 0

    def begin(self, model: str, name: str = "") -> str:
        async def then(read: Checkpoint) -> None:
            self.found.append((name, read.model_id))

        self._wishes += 1
        wish = Wish(f"{self._wishes:016x}", ModelId(model), "", 4, 40)
        return self.readings.begin(wish, [LayerRange(0, 4)], then)

    async def has_asked(self, model: str) -> None:
        await until(lambda: model in self.hub.ends)

    async def fails(self, model: str) -> None:
        await self.has_asked(model)
        self.hub.ends.pop(model).set_exception(TransferFailed("It is cut.", fix="Again."))
        await until(lambda: self.state(model) == "FAILED")

    def state(self, model: str) -> object:
        return {row["model_id"]: row["state"] for row in self.readings.view()}.get(model)


@asynccontextmanager
async def reading() -> AsyncIterator[Reader]:
    reader = Reader()
    try:
        yield reader
    finally:
        await reader.readings.close()


async def test_how_far_it_is_read_is_in_the_list_until_it_is_wished_for() -> None:
    async with reading() as reader:
        name = reader.begin("a-4")
        await reader.has_asked("a-4")
        (row,) = reader.readings.view()
        assert (row["deployment"], row["state"], row["error"]) == (name, "PROVISIONING", None)
        (span,) = row["spans"]
        assert "comes from the hub once" in span["reason"]
        why = span["reason"]
        for done, note, told in ((3, "", why), (9, "the line is busy", "the line is busy")):
            reader.hub.progress["a-4"](done * MB, 8 * MB, 0.0, note)
            (span,) = reader.readings.view()[0]["spans"]
            assert (span["done_bytes"], span["total_bytes"]) == (min(done, 8) * MB, 8 * MB)
            assert span["reason"] == told
        reader.hub.ends["a-4"].set_result(None)
        await until(lambda: reader.readings.view() == [])
        assert reader.found == [("", "a-4")]


async def test_a_model_that_is_read_is_so_for_who_asked_last_under_the_first_name() -> None:
    async with reading() as reader:
        first = reader.begin("a-4", "first")
        other = reader.begin("b-4", "other")
        await reader.has_asked("b-4")
        assert reader.begin("a-4", "last") == first != other
        assert [row["deployment"] for row in reader.readings.view()] == [first, other]
        assert [len(reader.readings.seen(model)) for model in ("a-4", "b-4", "c-4")] == [1, 1, 0]
        for end in reader.hub.ends.values():
            end.set_result(None)
        await until(lambda: reader.readings.view() == [])
        assert sorted(reader.found) == [("last", "a-4"), ("other", "b-4")]


async def test_what_could_not_be_read_says_why_and_is_read_anew_when_it_is_asked_for_again() -> (
    None
):
    async with reading() as reader:
        failed = reader.begin("a-4")
        await reader.fails("a-4")
        (row,) = reader.readings.view()
        assert row["error"]["code"] == TransferFailed.code
        assert row["spans"][0]["reason"] == "It is cut. Again."
        again = reader.begin("a-4")
        assert again != failed
        assert [row["deployment"] for row in reader.readings.view()] == [again]
        await reader.has_asked("a-4")
        assert reader.state("a-4") == "PROVISIONING"


async def test_who_is_evicted_is_read_no_further() -> None:
    async with reading() as reader:
        names = [reader.begin(model) for model in ("a-4", "b-4", "c-4")]
        for model in ("a-4", "b-4", "c-4"):
            await reader.has_asked(model)
        ended = reader.readings.end("a-4") + reader.readings.end(names[1])
        assert [(wish.deployment, is_read) for wish, is_read in ended] == [
            (name, False) for name in names[:2]
        ]
        assert [row["deployment"] for row in reader.readings.view()] == names[2:]
        await until(lambda: all(reader.hub.ends[model].cancelled() for model in ("a-4", "b-4")))
        assert not reader.hub.ends["c-4"].done()
    assert reader.hub.ends["c-4"].cancelled(), "nothing is read once it is closed"
    assert reader.found == []


async def test_so_many_are_read_at_a_time_and_those_that_failed_make_place() -> None:
    async with reading() as reader:
        for number in range(MAX_READINGS):
            reader.begin(f"m{number}-4")
        with pytest.raises(Busy):
            reader.begin("more-4")
        for model in ("m5-4", "m3-4"):
            await reader.fails(model)
        reader.begin("more-4")
        models = [row["model_id"] for row in reader.readings.view()]
        assert (len(models), "m3-4" in models, "m5-4" in models) == (MAX_READINGS, False, True)
        reader.begin("yet-more-4")
        with pytest.raises(Busy):
            reader.begin("too-many-4")
