"""What changes on the disk after it came: it is found, said, given to nobody and fetched again."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from mesh.errors import TransferFailed, WeightsDamaged
from mesh.models.manifest import Manifest
from mesh.models.partial_writer import lock_directory
from mesh.paths import quantised_dir
from mesh.transfers.commands import Damaged
from mesh.transfers.repairs import Repairs
from mesh.types import LayerRange
from tests.transfers.house import MODEL, Fetcher, House, house, up
from tests.transfers.test_fetcher import right, spoil, whole
from tests.waiting import until

__all__ = ["whole"]

LAYER = "model.layers.2.mlp.up_proj.weight"


async def keeper_of(
    made: House, whole: Manifest, *, lies: bool = False, patience_s: float = 30.0
) -> tuple[Fetcher, Path]:
    """One who has fetched all of it from ``full``, and where that lies."""
    full, keeper = (
        made.start("full", whole.directory),
        made.start("keeper", lies=lies, patience_s=patience_s),
    )
    keeper.supervisor.repairs.first_s = 0.5
    await up(full, keeper)
    made.introduce()
    return keeper, await keeper.supervisor.ensure(MODEL, whole.weights_sha256)


async def find_spoiled(keeper: Fetcher, directory: Path, whole: Manifest) -> None:
    """A tensor changes where it lies, and that is found."""
    await asyncio.to_thread(spoil, directory, LAYER)
    assert await keeper.supervisor.reread(whole.weights_sha256) == 1


async def test_an_honest_machine_whose_disk_has_changed_is_no_liar(
    tmp_path: Path, whole: Manifest
) -> None:
    async with house(tmp_path, "full", "keeper", "empty") as made:
        keeper, directory = await keeper_of(made, whole)
        await asyncio.to_thread(spoil, directory, LAYER)
        empty = made.start("empty")
        await up(empty)
        empty.supervisor.hear(keeper.holding())
        fetched = asyncio.create_task(empty.supervisor.ensure(MODEL, whole.weights_sha256))
        await until(lambda: keeper.events)
        await until(lambda: keeper.supervisor.holdings[0].layers != whole.layers_here())
        empty.supervisor.hear(keeper.holding())
        await until(lambda: keeper.supervisor.holdings[0].layers == whole.layers_here())
        empty.supervisor.hear(keeper.holding())
        assert await asyncio.to_thread(right, await fetched, whole) == set(whole.tensors)
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)
        assert empty.events == []
        ((kind, said),) = keeper.events
        assert (kind, said["code"]) == ("warning", WeightsDamaged.code)
        assert LAYER in said["message"]
        assert str(directory) in said["message"]


async def test_what_has_changed_is_found_though_nobody_asks_for_it(
    tmp_path: Path, whole: Manifest
) -> None:
    async with house(tmp_path, "full", "keeper") as made:
        keeper, directory = await keeper_of(made, whole)
        assert await keeper.supervisor.reread() == 0
        keeper.supervisor.repairs.first_s = 3.0  # all of it is read before the first is fetched
        await asyncio.to_thread(spoil, directory)
        repaired: list[str] = []
        keeper.supervisor.repairs.on_repaired = repaired.append
        rounded = quantised_dir(tmp_path / "keeper/cache", whole.weights_sha256)
        await asyncio.to_thread((rounded / "int8").mkdir, parents=True)
        assert await keeper.supervisor.reread(whole.weights_sha256) == len(whole.tensors)
        assert await asyncio.to_thread(right, directory, whole) == set()
        await until(lambda: repaired == [whole.weights_sha256])
        assert not rounded.exists(), "it may be of what is wrong"
        assert keeper.supervisor.holdings[0].layers == whole.layers_here()
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)
        assert await keeper.supervisor.reread() == 0


async def test_where_one_tensor_has_changed_all_others_that_have_are_fetched_again_too(
    tmp_path: Path, whole: Manifest
) -> None:
    async with house(tmp_path, "full", "keeper", "empty") as made:
        keeper, directory = await keeper_of(made, whole)
        for tensor in (LAYER, "model.layers.5.mlp.up_proj.weight"):
            await asyncio.to_thread(spoil, directory, tensor)
        repaired: list[str] = []
        keeper.supervisor.repairs.on_repaired = repaired.append
        empty = made.start("empty", patience_s=0.5)
        await up(empty)
        empty.supervisor.hear(keeper.holding())
        with suppress(TransferFailed):  # unless it has come again by then
            await empty.supervisor.ensure(
                MODEL, whole.weights_sha256, [LayerRange(2, 3)], ends=False
            )
        await until(lambda: repaired == [whole.weights_sha256])
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)


async def test_what_is_found_while_the_first_is_fetched_is_fetched_as_well(
    tmp_path: Path, whole: Manifest
) -> None:
    async with house(tmp_path, "full", "keeper") as made:
        keeper, directory = await keeper_of(made, whole)
        keeper.supervisor.repairs.first_s = 0.0
        repaired: list[str] = []
        keeper.supervisor.repairs.on_repaired = repaired.append
        await asyncio.to_thread(spoil, directory)
        await keeper.supervisor.reread(whole.weights_sha256)
        await until(lambda: repaired and directory not in keeper.supervisor.repairs)
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)


@pytest.mark.parametrize("ends", [False, True])
async def test_what_is_found_of_layers_that_are_being_fetched_is_fetched_after_them(
    ends: bool,
) -> None:
    """And then all that was here at first: what was found last may be of ends that were incomplete
    for a moment, so that it says less."""
    begun, goes_on, fetched, read = asyncio.Event(), asyncio.Event(), list[Damaged](), list[str]()

    async def ensure(damaged: Damaged) -> None:
        fetched.append(damaged)
        begun.set()
        await goes_on.wait()

    async def reread(weights_sha256: str) -> None:
        read.append(weights_sha256)

    repairs, error = Repairs(ensure, reread), WeightsDamaged("One.", fix="None.")
    repairs.first_s = 0.0
    place, layers = Path("attic"), (LayerRange(0, 1),)
    first, second = (
        Damaged(MODEL, "ab" * 32, place, error, True, layers, had) for had in (ends, False)
    )
    repairs.take(first)
    await begun.wait()
    repairs.take(second)
    goes_on.set()
    await until(lambda: place not in repairs)
    assert fetched == ([first, second, first] if ends else [first, second])
    assert read == ["ab" * 32]


async def test_what_nobody_has_is_fetched_once_somebody_has_it(
    tmp_path: Path, whole: Manifest
) -> None:
    async with house(tmp_path, "full", "keeper") as made:
        keeper, directory = await keeper_of(made, whole, patience_s=0.2)
        keeper.supervisor.repairs.again_s = 0.1
        keeper.supervisor.hear([])
        await until(lambda: not keeper.supervisor.transfers)
        await find_spoiled(keeper, directory, whole)
        await until(lambda: keeper.supervisor.transfers)
        await until(lambda: not keeper.supervisor.transfers)
        assert LAYER not in await asyncio.to_thread(right, directory, whole)
        made.introduce()
        await until(lambda: keeper.supervisor.holdings[0].layers == whole.layers_here())
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)


async def test_what_had_changed_before_a_restart_is_fetched_again(
    tmp_path: Path, whole: Manifest
) -> None:
    async with house(tmp_path, "full", "keeper") as made:
        keeper, directory = await keeper_of(made, whole)
        await find_spoiled(keeper, directory, whole)
        await keeper.supervisor.stop()
        keeper = made.start("keeper")
        keeper.supervisor.repairs.first_s = 1.0
        await up(keeper)
        keeper.supervisor.replace()  # who comes next finds it, too
        await until(lambda: keeper.supervisor.starts == 2)
        made.introduce()
        await until(
            lambda: [held.layers for held in keeper.supervisor.holdings] == [whole.layers_here()]
        )
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)
        await until(lambda: directory not in keeper.supervisor.repairs)
        assert [said["code"] for _, said in keeper.events] == [WeightsDamaged.code]
        keeper.supervisor.replace()
        await until(lambda: keeper.supervisor.starts == 3)
        await up(keeper)
        assert len(keeper.events) == 1


async def test_what_cannot_be_noted_is_given_to_nobody_either(
    tmp_path: Path, whole: Manifest
) -> None:
    """A disk that has failed is often one that nobody may write to any more."""
    async with house(tmp_path, "full", "keeper") as made:
        keeper, directory = await keeper_of(made, whole)
        await asyncio.to_thread(spoil, directory, LAYER)
        (lock,) = await asyncio.to_thread(lambda: [*directory.glob("*.lock")])
        await asyncio.to_thread(lock.unlink)
        await asyncio.to_thread(lock.mkdir)  # it cannot be opened
        assert await keeper.supervisor.reread(whole.weights_sha256) == 1
        assert keeper.supervisor.holdings[0].layers == (LayerRange(0, 2), LayerRange(3, 8))
        assert [said["code"] for _, said in keeper.events] == [WeightsDamaged.code]


async def test_what_changes_while_somebody_else_writes_there_is_fetched_again_afterwards(
    tmp_path: Path, whole: Manifest
) -> None:
    async with house(tmp_path, "full", "keeper") as made:
        keeper, directory = await keeper_of(made, whole)
        repaired: list[str] = []
        keeper.supervisor.repairs.on_repaired = repaired.append
        other = await asyncio.to_thread(lock_directory, directory)
        await find_spoiled(keeper, directory, whole)
        await until(lambda: keeper.supervisor.transfers)
        os.close(other)
        await until(lambda: repaired)
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)
        assert keeper.supervisor.holdings[0].layers == whole.layers_here()


async def test_what_is_removed_is_not_fetched_again(tmp_path: Path, whole: Manifest) -> None:
    async with house(tmp_path, "full", "keeper") as made:
        keeper, directory = await keeper_of(made, whole)
        await find_spoiled(keeper, directory, whole)
        await keeper.supervisor.remove(directory)
        await asyncio.sleep(2 * keeper.supervisor.repairs.first_s)
        assert not await asyncio.to_thread(directory.exists)


async def test_a_file_of_somebody_elses_is_left_alone_and_not_offered(
    tmp_path: Path, whole: Manifest
) -> None:
    copy = await asyncio.to_thread(shutil.copytree, whole.directory, tmp_path / "copy")
    async with house(tmp_path, "giver", "empty") as made:
        giver, empty = made.start("giver", copy), made.start("empty", patience_s=0.5)
        await up(giver, empty)
        await asyncio.to_thread(spoil, copy, LAYER)
        assert await giver.supervisor.reread() == 1
        assert giver.supervisor.holdings[0].layers == (LayerRange(0, 2), LayerRange(3, 8))
        made.introduce()
        with pytest.raises(TransferFailed, match="has 1 of the tensors that are missing"):
            await empty.supervisor.ensure(MODEL, whole.weights_sha256)
        assert empty.events == []
        assert [kind for kind, _ in giver.events] == ["warning"]


async def test_who_lied_and_then_finds_out_is_asked_again(tmp_path: Path, whole: Manifest) -> None:
    """What is wrong on its disk was right when it was looked at last."""
    async with house(tmp_path, "full", "keeper", "empty") as made:
        keeper, directory = await keeper_of(made, whole, lies=True)
        await asyncio.to_thread(spoil, directory, LAYER)
        empty = made.start("empty", patience_s=0.5)
        await up(empty)
        empty.supervisor.hear(keeper.holding())
        for _ in range(2):
            with pytest.raises(TransferFailed, match="keeper: It gave wrong bytes"):
                await empty.supervisor.ensure(MODEL, whole.weights_sha256)
            empty.supervisor.hear(keeper.holding())
        assert await keeper.supervisor.reread(whole.weights_sha256) == 1
        empty.supervisor.hear(keeper.holding())
        await until(lambda: keeper.supervisor.holdings[0].layers == whole.layers_here())
        empty.supervisor.hear(keeper.holding())
        fetched = await empty.supervisor.ensure(MODEL, whole.weights_sha256)
        assert await asyncio.to_thread(right, fetched, whole) == set(whole.tensors)
        assert [kind for kind, _ in empty.events] == ["weights_lied"]
