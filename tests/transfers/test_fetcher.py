"""Fetchers as they run: what is fetched is what it should be, from one or several, whole or in
part, and whoever lies is caught."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import shutil
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mesh.errors import Busy, DiskFull, ModelInUse, TransferFailed
from mesh.models.manifest import Manifest, read_manifest
from mesh.models.partial import PIECE_BYTES, read_journal
from mesh.models.partial_writer import PartialWriter, pieces_of
from mesh.models.rounded import note_place
from mesh.paths import quantised_dir
from mesh.transfers.commands import LocalCheckpoint
from mesh.transfers.fetching import WantedLayers, fetching
from mesh.transfers.pacing import Pace
from mesh.transfers.piece_picker import MAX_IN_HAND
from mesh.transfers.shelf import Shelf
from mesh.types import LayerRange, ModelId
from tests.checkpoints import make_checkpoint
from tests.models.test_partial import empty_copy
from tests.transfers.house import MODEL, Fetcher, house, up
from tests.waiting import awake


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    directory = make_checkpoint(
        tmp_path_factory.mktemp("whole"), "llama", layers=8, hidden=256, vocab=9000
    )
    return read_manifest(directory, model_id=MODEL)


def small_checkpoint(directory: Path) -> Path:
    return make_checkpoint(directory, "llama", layers=2, hidden=64, vocab=300)


@asynccontextmanager
async def empty_beside(tmp_path: Path, whole: Manifest) -> AsyncIterator[Fetcher]:
    """A node that has nothing, and knows one that has all of the model."""
    async with house(tmp_path, "full", "empty") as made:
        full, empty = made.start("full", whole.directory), made.start("empty")
        await up(full, empty)
        made.introduce()
        yield empty


async def used_elsewhere(directory: Path) -> asyncio.subprocess.Process:
    """Another process that uses a checkpoint, from now on and until it ends."""
    script = (
        "import pathlib, sys, time; from mesh.models.in_use import use;"
        f"use(pathlib.Path({str(directory)!r})); print('used', flush=True); time.sleep(100)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"used\n"
    return process


async def test_layers_then_the_rest_come_from_a_neighbour(tmp_path: Path, whole: Manifest) -> None:
    cache = tmp_path / "empty" / "cache"
    await asyncio.to_thread(note_place, cache, "ab" * 32, tmp_path / "deleted by hand")
    async with house(tmp_path, "full", "empty") as made:
        full, empty = made.start("full", whole.directory), made.start("empty")
        await up(full, empty)
        assert not await asyncio.to_thread(quantised_dir(cache, "ab" * 32).exists)
        made.introduce()
        sha = whole.weights_sha256
        directory = await empty.supervisor.ensure(MODEL, sha, [LayerRange(4, 8)], ends=False)
        names = {entry.name for entry in whole.layer_tensors(LayerRange(4, 8))}
        assert await asyncio.to_thread(right, directory, whole) == names
        (held,) = empty.supervisor.holdings
        assert (held.layers, held.ends) == ((LayerRange(4, 8),), False)
        assert await empty.supervisor.ensure(MODEL, sha) == directory
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)
        assert await sent(full) == weights_bytes(whole)
        # Somebody deletes what was offered; whatever is asked for next is answered all the same.
        gone = await asyncio.to_thread(small_checkpoint, tmp_path / "gone")
        empty.supervisor.offer(LocalCheckpoint(ModelId("gone"), gone))
        async with asyncio.timeout(20):
            while len(empty.supervisor.holdings) < 2:  # noqa: ASYNC110 - it says so by itself
                await asyncio.sleep(0.05)
            await asyncio.to_thread(shutil.rmtree, gone)
            other = await used_elsewhere(directory)
            with pytest.raises(ModelInUse, match="A node of this machine still uses"):
                await empty.supervisor.remove(directory)
            assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)
            other.kill()
            await other.wait()
            writer = await asyncio.to_thread(PartialWriter, directory)
            with pytest.raises(Busy, match="Another process of this user writes"):
                await empty.supervisor.remove(directory)
            await asyncio.to_thread(writer.close)
            rounded = quantised_dir(cache, sha) / "int8"
            await asyncio.to_thread(rounded.mkdir, parents=True)
            await empty.supervisor.remove(directory)
        assert empty.supervisor.holdings == ()
        assert not await asyncio.to_thread(rounded.exists)
        left = await asyncio.to_thread(lambda: [*directory.parent.glob("*/*")])
        assert left == [], "nothing is left that could be in the way"


async def test_a_fetch_cancelled_as_it_begins_keeps_nobody_out(
    tmp_path: Path, whole: Manifest
) -> None:
    copy = await asyncio.to_thread(empty_copy, whole, tmp_path)

    async def fetch() -> None:
        async with fetching(copy, WantedLayers(None), Shelf(), Pace()) as begun:
            await begun.run()

    run = asyncio.create_task(fetch())
    await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    (await asyncio.to_thread(PartialWriter, copy)).close()


async def test_what_is_removed_while_another_node_fills_it_is_fetched_anew(
    tmp_path: Path, whole: Manifest
) -> None:
    async with empty_beside(tmp_path, whole) as empty:
        sha = whole.weights_sha256
        directory = await empty.supervisor.ensure(MODEL, sha, [LayerRange(0, 1)])
        with await asyncio.to_thread(PartialWriter, directory):
            rest = asyncio.create_task(empty.supervisor.ensure(MODEL, sha))
            async with asyncio.timeout(20):
                while "Another process" not in str(empty.supervisor.transfers):  # noqa: ASYNC110 - it says so by itself
                    await asyncio.sleep(0.05)
            await asyncio.to_thread(shutil.rmtree, directory)
        assert await rest == directory
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)


async def test_nobody_has_it(tmp_path: Path, whole: Manifest) -> None:
    async with house(tmp_path, "empty") as made:
        empty = made.start("empty", patience_s=0.5)
        await up(empty)
        with pytest.raises(TransferFailed, match="No node that is up can give"):
            await empty.supervisor.ensure(MODEL, whole.weights_sha256)


@pytest.mark.skipif(sys.platform != "linux", reason="another process's limits are Linux's to set")
async def test_a_disk_that_takes_no_file_so_large_is_said_at_once(
    tmp_path: Path, whole: Manifest
) -> None:
    """FAT takes four gigabytes; who has the model has no part in it."""
    async with empty_beside(tmp_path, whole) as empty:
        assert empty.supervisor.pid is not None
        before = resource.prlimit(empty.supervisor.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(empty.supervisor.pid, resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        async with asyncio.timeout(20):
            with pytest.raises(DiskFull, match="takes no file of the size"):
                await empty.supervisor.ensure(MODEL, whole.weights_sha256)
        resource.prlimit(empty.supervisor.pid, resource.RLIMIT_FSIZE, before)
        await empty.supervisor.ensure(MODEL, whole.weights_sha256)


async def test_two_give_each_a_part_and_a_third_from_who_is_at_it(
    tmp_path: Path, whole: Manifest
) -> None:
    async with house(tmp_path, "one", "two", "empty", "late") as made:
        one = made.start("one", whole.directory, bytes_per_s=20e6)
        two = made.start("two", whole.directory, bytes_per_s=20e6)
        empty, late = made.start("empty"), made.start("late")
        await up(one, two, empty, late)
        made.introduce()
        directory = await empty.supervisor.ensure(MODEL, whole.weights_sha256)
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)
        shares = [await sent(one), await sent(two)]
        # At the end pieces of a slow one may be asked of the other as well.
        assert 0 <= sum(shares) - weights_bytes(whole) <= 2 * PIECE_BYTES
        assert min(shares) > 0.2 * sum(shares)
        # Who has fetched gives as well: the others may go.
        late.supervisor.hear(empty.holding())
        directory = await late.supervisor.ensure(MODEL, whole.weights_sha256)
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)


async def test_a_liar_is_named_and_asked_no_more(tmp_path: Path, whole: Manifest) -> None:
    copy = await asyncio.to_thread(shutil.copytree, whole.directory, tmp_path / "copy")
    async with house(tmp_path, "honest", "liar", "empty") as made:
        liar = made.start("liar", copy, lies=True)
        honest, empty = made.start("honest", whole.directory), made.start("empty")
        await up(honest, liar, empty)
        await asyncio.to_thread(spoil, copy)
        empty.supervisor.hear(liar.holding())
        fetch = asyncio.create_task(empty.supervisor.ensure(MODEL, whole.weights_sha256))
        async with asyncio.timeout(20):
            while not empty.events:  # noqa: ASYNC110 - a process has no event for it
                await asyncio.sleep(0.02)
        given = await sent(liar)
        empty.supervisor.hear([*liar.holding(), *honest.holding()])
        directory = await fetch
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)
        ((kind, fields),) = empty.events
        assert (kind, fields["name"]) == ("weights_lied", "liar")
        assert await sent(liar) == given


async def test_a_liar_is_remembered_when_the_fetcher_has_rested(
    tmp_path: Path, whole: Manifest
) -> None:
    copy = await asyncio.to_thread(shutil.copytree, whole.directory, tmp_path / "copy")
    async with house(tmp_path, "honest", "liar", "empty") as made:
        liar = made.start("liar", copy, lies=True)
        honest = made.start("honest", whole.directory)
        empty = made.start("empty", idle_s=0.5, unasked_s=0.5)
        await up(honest, liar, empty)
        await asyncio.to_thread(spoil, copy)
        empty.supervisor.hear(liar.holding())
        first = empty.supervisor.ensure(MODEL, whole.weights_sha256, [LayerRange(0, 2)])
        fetch = asyncio.create_task(first)
        async with asyncio.timeout(40):
            while not empty.events:  # noqa: ASYNC110 - a process has no event for it
                await asyncio.sleep(0.02)
            empty.supervisor.hear([*liar.holding(), *honest.holding()])
            await fetch
            while not empty.supervisor.is_resting:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)
        given, starts = await sent(liar), empty.supervisor.starts
        directory = await empty.supervisor.ensure(MODEL, whole.weights_sha256)
        assert empty.supervisor.starts > starts
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)
        assert await sent(liar) == given
        assert len(empty.events) == 1


async def test_who_alone_has_another_tokenizer_is_not_believed(
    tmp_path: Path, whole: Manifest
) -> None:
    """It is asked first; hashes of its own would prove its tokenizer."""
    copy = await asyncio.to_thread(shutil.copytree, whole.directory, tmp_path / "copy")
    tokenizer = await asyncio.to_thread((copy / "tokenizer.json").read_bytes)
    other = tokenizer.replace(b"the", b"eht")
    assert other != tokenizer
    await asyncio.to_thread((copy / "tokenizer.json").write_bytes, other)
    async with house(tmp_path, "liar", "one", "two", "empty") as made:
        liar, empty = made.start("liar", copy), made.start("empty", patience_s=0.5)
        one, two = made.start("one", whole.directory), made.start("two", whole.directory)
        await up(liar, one, two, empty)
        empty.supervisor.hear([*liar.holding(), *one.holding()])
        with pytest.raises(TransferFailed, match="other configs or tokenizers"):
            await empty.supervisor.ensure(MODEL, whole.weights_sha256)
        empty.supervisor.hear([*liar.holding(), *one.holding(), *two.holding()])
        directory = await empty.supervisor.ensure(MODEL, whole.weights_sha256)
        # Its tensors are as good as those of the others; `right` looks at the tokenizer too.
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)


async def test_a_giver_that_dies_is_replaced(tmp_path: Path, whole: Manifest) -> None:
    async with house(tmp_path, "dies", "lives", "empty") as made:
        dies = made.start("dies", whole.directory, bytes_per_s=10e6)
        lives, empty = made.start("lives", whole.directory, bytes_per_s=10e6), made.start("empty")
        await up(dies, lives, empty)
        made.introduce()
        fetch = asyncio.create_task(empty.supervisor.ensure(MODEL, whole.weights_sha256))
        await progress(empty, 0.2)
        assert dies.supervisor.pid is not None
        os.kill(dies.supervisor.pid, signal.SIGKILL)
        directory = await fetch
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)


@pytest.mark.slow
async def test_kills_cost_no_complete_tensor(tmp_path: Path, whole: Manifest) -> None:
    """The fetching process is killed 12 times: bytes are equal, and what it had noted of them when
    it was killed, complete tensors and pieces of others, is not given to it again.

    A piece that was under way is: what a kill costs is at most what may be under way.
    """
    rng, kills = random.Random(7), 12
    async with house(tmp_path, "full", "empty") as made:
        full = made.start("full", whole.directory, bytes_per_s=12e6)
        empty = made.start("empty")
        empty.supervisor.restart_delays_s = (3.0,)  # the giver has counted, and gives nothing
        await up(full, empty)
        made.introduce()
        fetch = asyncio.create_task(empty.supervisor.ensure(MODEL, whole.weights_sha256))
        complete: set[str] = set()
        lost = uncounted = 0
        while empty.supervisor.starts <= kills and not fetch.done():
            await up(empty)
            await asyncio.sleep(rng.uniform(0.0, 0.4))
            starts = empty.supervisor.starts
            assert empty.supervisor.pid is not None
            os.kill(empty.supervisor.pid, signal.SIGKILL)
            uncounted += 1
            given = await sent(full)
            if empty.supervisor.starts != starts:
                continue  # this machine stood still: more is given by now
            for record in await asyncio.to_thread(list, (made.root / "empty/models").glob("toy@*")):
                now = await asyncio.to_thread(right, record, whole)
                assert now >= complete  # what was complete is so for ever
                complete = now
                costs = given - await asyncio.to_thread(noted, record, whole) - lost
                assert 0 <= costs <= uncounted * MAX_IN_HAND * PIECE_BYTES
                lost += costs
            uncounted = 0
            async with asyncio.timeout(20):
                while empty.supervisor.starts == starts:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.02)
        directory = await fetch
        assert empty.supervisor.starts > 10
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)
        costs = await sent(full) - weights_bytes(whole) - lost
        assert 0 <= costs <= uncounted * MAX_IN_HAND * PIECE_BYTES


def noted(directory: Path, whole: Manifest) -> int:
    """How many bytes of weights its journal says are there."""
    present = read_journal(directory, sorted(whole.tensors))
    total = sum(whole.tensors[name].nbytes for name in present.complete)
    for name, numbers in present.pieces.items():
        pieces = pieces_of(whole.tensors[name].nbytes)
        total += sum(stop - start for start, stop in (pieces[number] for number in numbers))
    return total


async def test_no_faster_than_it_may(tmp_path: Path, whole: Manifest) -> None:
    """In either direction, by the clock of whoever waits for it."""
    rate = 8e6
    for limited in ("full", "empty"):
        async with house(tmp_path / limited, "full", "empty") as made:
            full, empty = (
                made.start(name, *have, bytes_per_s=rate if name == limited else 0.0)
                for name, have in (("full", (whole.directory,)), ("empty", ()))
            )
            await up(full, empty)
            made.introduce()
            begin = asyncio.get_running_loop().time()
            await empty.supervisor.ensure(MODEL, whole.weights_sha256)
            took_s = asyncio.get_running_loop().time() - begin
            # A bucket begins with no more than a tenth of a second's worth, or one piece.
            assert weights_bytes(whole) - PIECE_BYTES <= took_s * rate


def weights_bytes(manifest: Manifest) -> int:
    return sum(entry.nbytes for entry in manifest.tensors.values())


def stored(manifest: Manifest, name: str) -> bytes:
    entry = manifest.tensors[name]
    with entry.file.open("rb") as stream:
        stream.seek(entry.offset)
        return stream.read(entry.nbytes)


def right(directory: Path, whole: Manifest) -> set[str]:
    """The tensors that are said to be there, all of which are what they should be."""
    ours = read_manifest(directory)
    present = {name for name, entry in ours.tensors.items() if entry.present}
    for name in present:
        assert stored(ours, name) == stored(whole, name), name
    names = [file.name for file in whole.heads] or ["config.json", "tokenizer.json"]
    for name in names:
        ours_has, has = (each.joinpath(name).read_bytes() for each in (directory, whole.directory))
        end = whole.heads.get(whole.directory / name)
        assert ours_has[:end] == has[:end]
        assert len(ours_has) == len(has)
    return present


def spoil(directory: Path, *names: str) -> None:
    """Change a bit of these tensors, or of every one, or change it back, as a bad disk does: nobody
    touched it."""
    tensors = read_manifest(directory).tensors
    for entry in [tensors[name] for name in names or tensors]:
        before = entry.file.stat()
        with entry.file.open("r+b") as stream:
            stream.seek(entry.offset)
            first = stream.read(1)[0]
            stream.seek(entry.offset)
            stream.write(bytes([first ^ 1]))
        os.utime(entry.file, ns=(before.st_atime_ns, before.st_mtime_ns))


async def sent(fetcher: Fetcher) -> int:
    """How many bytes of weights it has sent, by its own count, small files and headers left out."""
    await awake(1.1)  # it tells twice a second
    return fetcher.supervisor.sent_bytes


async def progress(fetcher: Fetcher, part: float) -> None:
    """Until so much of what it fetches is here."""
    async with asyncio.timeout(20):
        while not any(  # noqa: ASYNC110 - as above
            t.done_bytes > part * t.total_bytes > 0 for t in fetcher.supervisor.transfers
        ):
            await asyncio.sleep(0.02)
