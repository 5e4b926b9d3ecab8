"""What a node's disk is not given away to, and what a slow or full one does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mesh.errors import BadRequest, DeviceFailed, DiskFull, MeshError
from mesh.models.harvest import HarvestBatch
from mesh.shard import recording
from mesh.shard.recording import HarvestShelf
from mesh.types import LayerRange, NodeId
from mesh.wire.messages import Failure, Opened, Result, Seal, Sealed
from tests.shard.asker import Asker, Attic, settled
from tests.shard.spans import HIDDEN, rows

OTHER, OWN = NodeId("z" * 64), NodeId("a" * 64)
"""The asker of these tests is `OWN`."""


def batch(count: int, pattern: str = "model.layers.1", number: int = 0) -> dict[str, Any]:
    return HarvestBatch("0" * 16, number, count, "model.layers.", pattern).to_fields()


@pytest.fixture
async def attic() -> AsyncIterator[Attic]:
    async with Attic() as attic:
        yield attic


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return tmp_path / "harvest"


def shelve(attic: Attic, files: Path, limit_bytes: int, own: NodeId = OTHER) -> HarvestShelf:
    attic.service.shelf = HarvestShelf(files, limit_bytes, own)
    return attic.service.shelf


async def sealed(asker: Asker) -> list[dict[str, Any]]:
    asker.link.send(Seal(1))
    answer = await asker.unwrapped()
    assert isinstance(answer, Sealed)
    return answer.files


def listed(files: Path) -> list[str]:
    return sorted(path.name for path in files.rglob("*") if path.is_file())


async def test_nothing_is_written_where_no_disk_is_given(attic: Attic, files: Path) -> None:
    asker = attic.asker()
    with pytest.raises(DiskFull, match="no harvests"):
        await asker.open(harvest=batch(5))
    shelve(attic, files, 0)
    with pytest.raises(DiskFull, match="no disk"):
        await asker.open(harvest=batch(5))
    assert not await asyncio.to_thread(files.exists)
    assert attic.server.sessions.active == 0
    await asker.open()  # other sessions are served


async def test_who_writes_nothing_needs_no_disk(attic: Attic, files: Path) -> None:
    """A harvest of layers that others hold passes through a node that gives none."""
    shelve(attic, files, 0)
    asker = attic.asker()
    await asker.open(harvest=batch(5, "model.layers.77"))
    await asker.step(1, 0, rows(5))
    assert await sealed(asker) == []
    assert not await asyncio.to_thread(files.exists)


async def test_this_nodes_own_harvests_need_no_leave(attic: Attic, files: Path) -> None:
    shelve(attic, files, 0, own=OWN)
    asker = attic.asker()
    await asker.open(harvest=batch(5))
    await asker.step(1, 0, rows(5))
    (file,) = await sealed(asker)
    assert (file["module"], file["rows"], file["width"]) == ("model.layers.1", 5, HIDDEN)


async def test_the_budget_holds_for_all_runs_together(attic: Attic, files: Path) -> None:
    size = 100 * HIDDEN * 4
    shelf = shelve(attic, files, 3 * size)
    asker = attic.asker()
    await asker.open(harvest=batch(100, "model.layers.[12]"))
    await asker.step(1, 0, rows(100))
    for number in (2, 3):  # with what is reserved, and with what is written
        with pytest.raises(DiskFull, match="limit"):
            await asker.open(number, harvest=batch(100, "model.layers.[12]", number))
        await asker.open(number, harvest=batch(90, number=number))
        asker.close(number)
        if number == 2:
            await sealed(asker)
    await settled(lambda: attic.server.sessions.active == 1)  # nothing answers a close
    await asyncio.wrap_future(shelf.submit(lambda: None))
    assert len(await asyncio.to_thread(listed, files)) == 2


async def test_a_module_wider_than_the_model_counts_with_its_own_width(
    attic: Attic, files: Path
) -> None:
    shelf = shelve(attic, files, 100 * HIDDEN * 4)
    asker = attic.asker()
    await asker.open(harvest=batch(100, "model.layers.1.mlp.gate_proj"))
    await asker.step(1, 0, rows(100))
    asker.link.send(Seal(1))
    with pytest.raises(DiskFull, match="limit"):
        await asker.unwrapped()
    await asyncio.wrap_future(shelf.submit(lambda: None))
    assert await asyncio.to_thread(listed, files) == []
    # What was set aside for it is free again.
    asker.close(1)
    await asker.open(2, harvest=batch(100, number=1))


async def test_other_rows_than_announced_are_not_sealed(attic: Attic, files: Path) -> None:
    shelf = shelve(attic, files, 1 << 30)
    asker = attic.asker()
    await asker.open(harvest=batch(5))
    await asker.step(1, 0, rows(4))
    with pytest.raises(BadRequest, match="4 rows"):
        await sealed(asker)
    asker.close()
    await settled(lambda: attic.server.sessions.active == 0)
    await asyncio.wrap_future(shelf.submit(lambda: None))
    assert not await asyncio.to_thread(listed, files)


async def test_more_rows_than_announced_never_reach_the_disk(attic: Attic, files: Path) -> None:
    shelf = shelve(attic, files, 100 * HIDDEN * 4)
    asker = attic.asker()
    await asker.open(harvest=batch(1))
    await asker.step(1, 0, rows(4))
    for step in range(2, 6):
        await asker.step(step, 4 * step - 4, rows(4))
    with pytest.raises(BadRequest, match="More rows"):
        await sealed(asker)
    asker.close()
    await asyncio.wrap_future(shelf.submit(lambda: None))
    assert shelf.reserved_bytes == 0
    assert not await asyncio.to_thread(listed, files)


async def test_a_session_closed_while_it_opens_sets_nothing_aside(
    attic: Attic, files: Path
) -> None:
    shelf = shelve(attic, files, 100 * HIDDEN * 4)
    closed = shelf.recording(HarvestBatch.from_fields(batch(90)), OWN)
    closed.abort()
    runtime = await attic.server.weights.acquire()
    with pytest.raises(BadRequest, match="closed"):
        await closed.start(runtime, LayerRange(0, 4))
    await asyncio.wrap_future(shelf.submit(lambda: None))
    assert shelf.reserved_bytes == 0
    assert not await asyncio.to_thread(listed, files)


async def test_a_full_disk_leaves_nothing_set_aside(
    attic: Attic, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_full(file: recording.ModuleFile) -> None:
        file.stream = full
        file.path.touch()

    shelf = shelve(attic, files, 1 << 30)
    with await asyncio.to_thread(open, "/dev/full", "wb") as full:
        monkeypatch.setattr(recording.ModuleFile, "open", open_full)
        asker = attic.asker()
        await asker.open(harvest=batch(100))
        await asker.step(1, 0, rows(100))
        with pytest.raises(DiskFull, match="No space left"):
            await sealed(asker)
    assert shelf.reserved_bytes == 0
    assert not await asyncio.to_thread(listed, files)


def test_of_a_step_that_was_begun_again_only_the_last_rows_count() -> None:
    tensors = [torch.full((1, count, 2), float(count)) for count in (3, 1, 3, 1)]
    assert recording.last_rows(tensors, 4) == tensors[2:]
    assert recording.last_rows(tensors, 0) == []


async def test_a_neighbour_that_fails_spoils_no_harvest(
    attic: Attic, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows computed together are computed again one by one when one of them fails."""
    shelve(attic, files, 1 << 30)
    asker = attic.asker()
    await asker.open(1, harvest=batch(2, "model.layers.1"))
    await asker.open(2, harvest=batch(2, "model.layers.2"))
    await asker.open(3)
    call = recording.Tap.__call__

    def fail(tap: recording.Tap, hidden: torch.Tensor) -> torch.Tensor:
        if tap.module == "model.layers.2":
            raise RuntimeError("the neighbour fails")
        return call(tap, hidden)

    monkeypatch.setattr(recording.Tap, "__call__", fail)
    for position in range(2):
        for session in (3, 1, 2):  # while the first is computed, the others gather
            asker.send_step(position + 1, position, rows(1, seed=position), session)
        answers = [await asker.answer() for _ in range(3)]
        assert {type(answer) for answer in answers} == {Result, Failure}
        asker.close(2)
        await asker.open(2, harvest=batch(2, "model.layers.2"))
    (file,) = await sealed(asker)
    assert file["rows"] == 2


async def test_a_disk_that_fails_half_way_is_reported_and_nothing_is_left(
    attic: Attic, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelve(attic, files, 1 << 30)
    asker = attic.asker()
    await asker.open(harvest=batch(8))
    await asker.step(1, 0, rows(4))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording.ModuleFile, "append", full)
    await asker.step(2, 4, rows(4))
    with pytest.raises(DiskFull, match="No space left"):
        await sealed(asker)
    assert not await asyncio.to_thread(listed, files)


async def test_a_seal_that_fails_in_a_way_nobody_foresaw_is_answered(
    attic: Attic, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelve(attic, files, 1 << 30)
    asker = attic.asker()
    await asker.open(harvest=batch(4))
    await asker.step(1, 0, rows(4))

    def fail(*_: object) -> None:
        raise RuntimeError("no such day")

    monkeypatch.setattr(recording.ModuleFile, "finish", fail)
    with pytest.raises(DeviceFailed, match="no such day"):
        await sealed(asker)


async def test_a_directory_that_cannot_be_made_is_reported(attic: Attic, files: Path) -> None:
    await asyncio.to_thread(files.write_bytes, b"a file in the place of the directory")
    shelve(attic, files, 1 << 30)
    with pytest.raises(DiskFull, match="cannot be written"):
        await attic.asker().open(harvest=batch(5))
    assert attic.server.sessions.active == 0


async def test_a_slow_disk_holds_the_session_back_and_nobody_else(
    attic: Attic, files: Path
) -> None:
    shelf = shelve(attic, files, 1 << 30)
    asker = attic.asker()
    await asker.open(harvest=batch(24))
    await asker.open(2)
    gate = threading.Event()
    shelf.submit(lambda: gate.wait(30))
    for number in range(6):
        asker.send_step(number + 1, 4 * number, rows(4))
    for number in range(1, recording.UNDER_WAY):
        await asker.hidden(number)
    await settled(lambda: attic.server.queue_depth == 6 - recording.UNDER_WAY + 1)
    for number in range(20):  # another session computes on
        await asker.step(number + 1, number, rows(1), session=2)
    assert attic.server.queue_depth == 6 - recording.UNDER_WAY + 1
    gate.set()
    for number in range(recording.UNDER_WAY, 7):
        await asker.hidden(number)
    (file,) = await sealed(asker)
    assert file["rows"] == 24


async def test_a_session_that_ends_while_it_waits_for_the_disk_is_gone(
    attic: Attic, files: Path
) -> None:
    shelf = shelve(attic, files, 1 << 30)
    asker = attic.asker()
    await asker.open(harvest=batch(24))
    gate = threading.Event()
    shelf.submit(lambda: gate.wait(30))
    for number in range(6):
        asker.send_step(number + 1, 4 * number, rows(4))
    await asker.hidden(1)
    asker.close()
    gate.set()
    asker.send_open(2)
    while isinstance(answer := await asker.answer(), Result):
        assert answer.session == 1, "what was computed before it was closed may be answered still"
    assert isinstance(answer, Opened)
    await asker.step(1, 0, rows(3), session=2)
    await settled(lambda: attic.server.sessions.active == 1)
    assert attic.server.queue_depth == 0
    await asyncio.wrap_future(shelf.submit(lambda: None))
    assert not await asyncio.to_thread(listed, files)
    assert shelf.reserved_bytes == 0


async def test_seal_is_for_harvests(attic: Attic, files: Path) -> None:
    asker = attic.asker()
    await asker.open()
    with pytest.raises(MeshError, match="nothing to seal"):
        await sealed(asker)


async def test_one_row_of_a_batch_is_written_and_no_other(attic: Attic, files: Path) -> None:
    """Three sessions' rows are computed together; only one of them is harvested."""
    shelve(attic, files, 1 << 30)
    asker = attic.asker()
    await asker.open(1, harvest=batch(8, "model.layers.3"))
    for session in (2, 3):
        await asker.open(session)
    together = []
    for position in range(8):
        for session in (2, 1, 3):
            asker.send_step(position + 1, position, rows(1, seed=10 * session + position), session)
        answers = [await asker.answer() for _ in range(3)]
        together += [a for a in answers if isinstance(a, Result) and a.session == 1]
    (file,) = await sealed(asker)
    data = await asyncio.to_thread((files / file["file"]).read_bytes)
    # The last layer's output is what the session was answered with.
    assert data.endswith(b"".join(bytes(answer.tensor.data) for answer in together))
