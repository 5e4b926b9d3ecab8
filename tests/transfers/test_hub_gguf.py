"""A repository of the hub that has only GGUF files: which is meant, and what plans need of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.deployments.shape import shape_of
from mesh.errors import BadCheckpoint, BadRequest, MeshError, ModelNotFound, TransferFailed
from mesh.models.builtin import checkpoint_dir
from mesh.models.manifest import read_manifest
from mesh.transfers.hub import HubSettings
from mesh.types import LayerRange
from tests.checkpoints import LLAMA3_ROPE, make_checkpoint
from tests.gguf_files import write_gguf
from tests.transfers.house import Fetcher, house, up
from tests.transfers.hub_standin import HubStandin

HEADER_BYTES = 1 << 20
"""What is read of a file before it comes."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "repository").mkdir()
    write_gguf(checkpoint_dir(), tmp_path / "repository" / "toy-Q8_0.gguf", "Q8_0")
    return tmp_path / "repository"


def sent(hub: HubStandin) -> int:
    return sum(count for name, count in hub.sent.items() if name.endswith(".gguf"))


@asynccontextmanager
async def fetcher(tmp_path: Path, hub: HubStandin) -> AsyncIterator[Fetcher]:
    async with house(tmp_path, "one") as made:
        made.hub = HubSettings(hub.url)
        one = made.start("one")
        await up(one)
        yield one


async def test_the_only_one_comes_whole_and_is_removed_as_any(tmp_path: Path, folder: Path) -> None:
    content = await asyncio.to_thread((folder / "toy-Q8_0.gguf").read_bytes)
    with HubStandin(folder) as hub:
        hub.mischief.suffix, hub.mischief.cut = ".gguf", 2
        async with fetcher(tmp_path, hub) as one:
            directory = await one.supervisor.pull("org/toy")
            file = directory / "toy-Q8_0.gguf"
            assert await asyncio.to_thread(file.read_bytes) == content
            all_of_it = HEADER_BYTES + len(content)
            assert sent(hub) == all_of_it  # also where it broke off
            (held,) = one.supervisor.holdings
            assert (held.model_id, held.directory, held.is_partial) == ("org/toy", directory, True)
            assert held.here_bytes == held.total_bytes
            assert await one.supervisor.pull("org/toy") == directory
            assert sent(hub) == all_of_it
            await one.supervisor.remove(directory)
            assert not await asyncio.to_thread(directory.exists)


async def test_of_several_one_is_to_be_named(tmp_path: Path, folder: Path) -> None:
    other = await asyncio.to_thread(write_gguf, checkpoint_dir(), folder / "toy-Q4_0.gguf", "Q4_0")
    await asyncio.to_thread((folder / "mmproj-toy.gguf").write_bytes, b"sees pictures")
    with HubStandin(folder) as hub:
        async with fetcher(tmp_path, hub) as one:
            with pytest.raises(BadRequest, match=r"2 GGUF models: toy-Q4_0.gguf, toy-Q8_0.gguf"):
                await one.supervisor.pull("org/toy")
            with pytest.raises(ModelNotFound, match=r"no toy-Q2_K.gguf. It has toy-Q4_0.gguf"):
                await one.supervisor.pull("org/toy/toy-Q2_K.gguf")
            assert sent(hub) == 0
            directory = await one.supervisor.pull("org/toy/toy-Q4_0.gguf")
            assert (
                await asyncio.to_thread((directory / other.name).read_bytes) == other.read_bytes()
            )
            await one.supervisor.pull("org/toy/toy-Q8_0.gguf")
            held = {each.model_id: each.weights_sha256 for each in one.supervisor.holdings}
    assert held.keys() == {"org/toy/toy-Q4_0.gguf", "org/toy/toy-Q8_0.gguf"}
    assert len({*held.values()}) == 2


async def test_wrong_bytes_get_no_name(tmp_path: Path, folder: Path) -> None:
    with HubStandin(folder) as hub:
        hub.mischief.wrong = 3  # the header as well, where it does not show
        async with fetcher(tmp_path, hub) as one:
            with pytest.raises(TransferFailed, match="other bytes than the hub says, 2 times"):
                await one.supervisor.pull("org/toy")
            assert not any(held.weights_sha256 for held in one.supervisor.holdings)
            await one.supervisor.pull("org/toy")


@pytest.mark.parametrize("named", ["org/toy", "org/toy/toy-Q8_0.gguf"])
async def test_plans_are_made_of_its_header_and_of_what_is_a_setting(
    named: str, tmp_path: Path, folder: Path
) -> None:
    shape = {"layers": 4, "hidden": 256, "vocab": 9000}
    checkpoint = make_checkpoint(tmp_path / "long", "llama", **shape, rope_parameters=LLAMA3_ROPE)
    file = folder / "toy-Q8_0.gguf"  # longer before its tensors than what is asked for at first
    write_gguf(checkpoint, file, "F16", edit=lambda made: made.add_description("-" * 1_500_000))
    whole = await asyncio.to_thread(read_manifest, file)
    with HubStandin(folder) as hub:
        async with fetcher(tmp_path, hub) as one:
            head = await one.supervisor.headers(named)
            found = await asyncio.to_thread(read_manifest, head, is_hashed=False)
            assert found.config == whole.config  # and so how its frequencies are scaled
            assert shape_of(found, 256) == replace(shape_of(whole, 256), weights_sha256="")
            asked = sent(hub)
            assert 1_500_000 < asked < whole.tensors["lm_head.weight"].nbytes + 1_500_000
            assert await one.supervisor.headers(named) == head
            assert sent(hub) == asked
            assert one.supervisor.holdings == ()  # what is kept for plans is no model


async def test_what_is_no_gguf_file_is_refused_before_it_comes(
    tmp_path: Path, folder: Path
) -> None:
    await asyncio.to_thread((folder / "toy-Q8_0.gguf").write_bytes, b"-" * 5_000_000)
    with HubStandin(folder) as hub:
        async with fetcher(tmp_path, hub) as one:
            with pytest.raises(BadCheckpoint, match=r"does not begin as a GGUF file does"):
                await one.supervisor.headers("org/toy")
            assert sent(hub) <= 1 << 20


@pytest.mark.parametrize("bad", ["truncated: tensor", "'zlama' that is not read"])
async def test_what_its_header_refuses_is_refused_before_it_comes(
    bad: str, tmp_path: Path, folder: Path
) -> None:
    file = folder / "toy-Q8_0.gguf"
    content = await asyncio.to_thread(file.read_bytes)
    is_cut = bad.startswith("truncated")
    made = content[:-100_000] if is_cut else content.replace(b"llama", b"zlama")
    await asyncio.to_thread(file.write_bytes, made)
    with HubStandin(folder) as hub:
        async with fetcher(tmp_path, hub) as one:
            with pytest.raises(MeshError, match=bad):
                await one.supervisor.pull("org/toy")
    assert sent(hub) <= HEADER_BYTES


async def test_a_model_of_which_a_part_is_missing_is_refused_before_it_comes(
    tmp_path: Path, folder: Path
) -> None:
    await asyncio.to_thread(write_gguf, checkpoint_dir(), folder / "cut.gguf", "Q8_0", parts=2)
    await asyncio.to_thread((folder / "cut-00002-of-00002.gguf").unlink)
    with HubStandin(folder) as hub:
        async with fetcher(tmp_path, hub) as one:
            with pytest.raises(BadCheckpoint, match=r"no cut-00002-of-00002.gguf, which belongs"):
                await one.supervisor.pull("org/toy/cut-00001-of-00002.gguf")
            assert sent(hub) == 0


async def test_large_ones_come_out_of_the_folders_that_they_lie_in(
    tmp_path: Path, folder: Path
) -> None:
    """All of it from the hub, and by ranges what no neighbour has."""
    deep = folder / "Q8_0"
    await asyncio.to_thread(deep.mkdir)
    await asyncio.to_thread(write_gguf, checkpoint_dir(), deep / "big.gguf", "Q8_0", parts=3)
    await asyncio.to_thread((folder / "toy-Q8_0.gguf").rename, deep / "toy.gguf")
    first = "big-00001-of-00003.gguf"
    whole = await asyncio.to_thread(read_manifest, deep / first)
    with HubStandin(folder) as hub:
        async with fetcher(tmp_path, hub) as one:
            with pytest.raises(BadRequest, match=f"2 GGUF models: Q8_0/{first}, Q8_0/toy.gguf"):
                await one.supervisor.pull("org/toy")
            for named in (f"org/toy/{first}", f"org/toy/Q8_0/{first}"):
                head = await one.supervisor.headers(named)
                assert head.name == first
            directory = await one.supervisor.pull(
                f"org/toy/Q8_0/{first}", (LayerRange(0, 2),), drop=True
            )
            (held,) = one.supervisor.holdings
            assert (held.model_id, held.weights_sha256) == (
                f"org/toy/{first}", whole.weights_sha256,
            )  # fmt: skip
            assert held.here_bytes < held.total_bytes
            assert await one.supervisor.pull(f"org/toy/{first}") == directory
            (held,) = one.supervisor.holdings
            assert held.here_bytes == held.total_bytes
            again = await asyncio.to_thread(read_manifest, directory)
            assert again.weights_sha256 == whole.weights_sha256
            await asyncio.to_thread((folder / "toy.gguf").write_bytes, b"GGUF")
            with pytest.raises(BadRequest, match=r"a toy.gguf in several folders: Q8_0, \."):
                await one.supervisor.pull("org/toy/toy.gguf")
            await asyncio.to_thread((folder / ".gguf").write_bytes, b"GGUF")  # has no name
            with pytest.raises(ModelNotFound, match=r"no none.gguf. It has .gguf, Q8_0/big"):
                await one.supervisor.pull("org/toy/none.gguf")
