"""GGUF files as fetchers move them: layers of them, their heads, and what is not believed."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mesh.errors import BadCheckpoint, BadRequest, TransferFailed, WeightsMissing
from mesh.models.gguf.container import read_gguf_header
from mesh.models.gguf.contents import settings_of
from mesh.models.load import load_span
from mesh.models.manifest import Manifest, read_manifest
from mesh.models.partial import JOURNAL, journal_of, read_partial, read_record
from mesh.transfers import documents
from mesh.transfers.hub import HubSettings
from mesh.transfers.shelf import Shelf, StoredCheckpoint
from mesh.types import LayerRange
from mesh.wire.messages import Part
from tests.checkpoints import LLAMA3_ROPE, make_checkpoint
from tests.gguf_files import write_gguf
from tests.transfers.house import MODEL, house, hub_house, up
from tests.transfers.hub_standin import HubStandin
from tests.transfers.test_fetcher import right, sent, stored, weights_bytes
from tests.transfers.test_hub_gguf import HEADER_BYTES

LAYERS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its rotary embedding is scaled, which a GGUF file says by a tensor; and what its layers are
    activated with stands in the header."""
    return make_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), "apertus", layers=LAYERS, hidden=256, vocab=9000,
        rope_parameters=LLAMA3_ROPE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """In two files, beside another model, and beside what is of neither."""
    folder = tmp_path_factory.mktemp("files")
    file = write_gguf(checkpoint, folder / "toy.gguf", "Q8_0", parts=2)
    write_gguf(checkpoint, folder / "other.gguf", "Q4_0")
    (folder / "tokenizer.json").write_text("of another")
    return read_manifest(file, model_id=MODEL)


async def test_layers_then_the_rest_come_from_a_neighbour(tmp_path: Path, whole: Manifest) -> None:
    other = await asyncio.to_thread(read_manifest, whole.directory / "other.gguf")
    async with house(tmp_path, "full", "empty", "late") as made:
        full = made.start("full", whole.path, other.path)
        empty, late = made.start("empty"), made.start("late")
        await up(full, empty, late)
        held = {each.weights_sha256: each for each in full.supervisor.holdings}
        assert held.keys() == {whole.weights_sha256, other.weights_sha256}
        assert [each.directory for each in held.values()] == [whole.path, other.path]
        made.introduce()
        sha, settings = whole.weights_sha256, {entry.name for entry in whole.settings_tensors()}
        assert settings == {"rope_freqs.weight"}
        directory = await empty.supervisor.ensure(MODEL, sha, [LayerRange(2, 4)], ends=False)
        layers = {entry.name for entry in whole.layer_tensors(LayerRange(2, 4))}
        assert await asyncio.to_thread(right, directory, whole) == layers | settings
        part = await asyncio.to_thread(read_manifest, directory)
        assert (part.config, part.weights_sha256) == (whole.config, sha)
        with pytest.raises(WeightsMissing):  # else it would compute with zeros
            await asyncio.to_thread(span, part, 0, 2)
        ours, theirs = [await asyncio.to_thread(span, each, 2, 4) for each in (part, whole)]
        for name, weight in theirs.items():
            assert torch.equal(ours[name], weight), name
        assert await empty.supervisor.ensure(MODEL, sha) == directory
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)
        assert await sent(full) == weights_bytes(whole)
        # Who has fetched gives as well.
        (held_now,) = empty.holding()
        assert held_now.held.files_sha256 == held[sha].files_sha256
        late.supervisor.hear([held_now])
        directory = await late.supervisor.ensure(MODEL, sha, [LayerRange(0, 1)])
        assert await asyncio.to_thread(right, directory, whole) > settings
        await late.supervisor.remove(directory)
        assert late.supervisor.holdings == ()


def span(manifest: Manifest, first: int, stop: int) -> dict[str, torch.Tensor]:
    layers, cpu = LayerRange(first, stop), torch.device("cpu")
    loaded = load_span(manifest, layers, dtype=torch.float32, device=cpu)
    return {name: weight.clone() for name, weight in loaded.module.state_dict().items()}


async def test_who_alone_says_another_head_is_not_believed(
    tmp_path: Path, checkpoint: Path
) -> None:
    """Its weights are the same: their hash does not prove what the template is."""
    files = []
    for name, said in (("one", "as it is"), ("two", "as it is"), ("liar", "obey the neighbour")):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "toy.gguf"
        files.append(
            await asyncio.to_thread(
                lambda file=file, said=said: write_gguf(
                    checkpoint, file, "Q8_0", edit=lambda made: made.add_description(said)
                )
            )
        )
    manifests = [await asyncio.to_thread(read_manifest, file) for file in files]
    assert len({each.weights_sha256 for each in manifests}) == 1
    sha = manifests[0].weights_sha256
    async with house(tmp_path, "one", "two", "liar", "empty") as made:
        one, two, liar = (made.start(file.parent.name, file) for file in files)
        empty = made.start("empty", patience_s=0.5)
        await up(one, two, liar, empty)
        empty.supervisor.hear([*liar.holding(), *one.holding()])
        with pytest.raises(TransferFailed, match="other configs or tokenizers"):
            await empty.supervisor.ensure(MODEL, sha)
        empty.supervisor.hear([*liar.holding(), *one.holding(), *two.holding()])
        directory = await empty.supervisor.ensure(MODEL, sha)
        assert await asyncio.to_thread(right, directory, manifests[0]) == set(manifests[0].tensors)
        # Nor is one who says the hash of the others and gives its own.
        (pretender,) = liar.holding()
        agreed = one.holding()[0].held.files_sha256
        await empty.supervisor.remove(directory)
        empty.supervisor.hear(
            [replace(pretender, held=replace(pretender.held, files_sha256=agreed))]
        )
        with pytest.raises(TransferFailed, match="another config or tokenizer"):
            await empty.supervisor.ensure(MODEL, sha)


async def test_a_setting_that_is_another_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "liar").mkdir()
    file = tmp_path / "liar" / "toy.gguf"
    await asyncio.to_thread(write_gguf, checkpoint, file, "Q8_0")
    manifest = await asyncio.to_thread(read_manifest, file)
    async with house(tmp_path, "liar", "empty") as made:
        liar, empty = made.start("liar", file, lies=True), made.start("empty", patience_s=0.5)
        await up(liar, empty)
        made.introduce()
        await asyncio.to_thread(change, manifest, "rope_freqs.weight")
        with pytest.raises(TransferFailed, match=r"rope_freqs\.weight is not what was said of it"):
            await empty.supervisor.ensure(MODEL, manifest.weights_sha256)
        assert empty.supervisor.holdings == ()


def change(manifest: Manifest, name: str) -> None:
    """As a liar does, whose file looks as it did when it was read."""
    entry = manifest.tensors[name]
    before = entry.file.stat()
    with entry.file.open("r+b") as stream:
        stream.seek(entry.offset)
        stream.write(bytes(each ^ 1 for each in stored(manifest, name)))
    os.utime(entry.file, ns=(before.st_atime_ns, before.st_mtime_ns))


async def test_without_its_settings_it_is_not_read(tmp_path: Path, whole: Manifest) -> None:
    async with house(tmp_path, "full", "empty") as made:
        full, empty = made.start("full", whole.path), made.start("empty")
        await up(full, empty)
        made.introduce()
        directory = await empty.supervisor.ensure(MODEL, whole.weights_sha256, (), ends=False)
    partial = await asyncio.to_thread(read_partial, directory)
    assert partial is not None
    assert partial.complete == {"rope_freqs.weight"}
    journal = journal_of(whole.tensors, set(whole.tensors) - partial.complete)
    await asyncio.to_thread((directory / JOURNAL).write_bytes, journal)
    with pytest.raises(WeightsMissing, match="rope_freqs"):
        await asyncio.to_thread(read_manifest, directory)


def test_what_is_said_of_a_gguf_model_has_nothing_from_beside_it(whole: Manifest) -> None:
    said = documents.document_of(whole, "", None)
    assert (said.small, [file.name for file in said.weights]) == (
        (), ["toy-00001-of-00002.gguf", "toy-00002-of-00002.gguf"],
    )  # fmt: skip
    assert documents.decode(documents.encode(said), whole.weights_sha256) == said
    small = documents.SmallFile("tokenizer.json", 10, "0" * 64)
    both = documents.encode(replace(said, small=(small,)))
    with pytest.raises(BadCheckpoint, match="neither safetensors nor GGUF files alone"):
        documents.decode(both, whole.weights_sha256)
    file, _ = said.weights
    heads = [replace(file, name=f"{n}.gguf", header=documents.MAX_SMALL_BYTES // 2) for n in "abc"]
    for weights in ((file, file), tuple(heads)):
        many = documents.encode(replace(said, weights=weights))
        with pytest.raises(BadCheckpoint, match="whose headers have"):
            documents.decode(many, whole.weights_sha256)


def test_a_description_has_no_more_of_small_files_than_memory_takes(tmp_path: Path) -> None:
    toy = read_manifest(make_checkpoint(tmp_path / "toy", "llama", layers=2, vocab=300))
    said, most = documents.document_of(toy, "", None), documents.MAX_SMALL_BYTES
    small = [documents.SmallFile(name, most, "0" * 64) for name in ("vocab.json", "merges.txt")]
    few = replace(said, small=tuple(small))
    assert documents.decode(documents.encode(few), toy.weights_sha256) == few
    many = replace(said, small=(*small, documents.SmallFile("vocab.txt", 1, "0" * 64)))
    with pytest.raises(BadCheckpoint, match="bytes of small files"):
        documents.decode(documents.encode(many), toy.weights_sha256)
    named = [f"additional_chat_templates/{n:02}.jinja" for n in range(17)]
    small = [documents.SmallFile(name, 1, "0" * 64) for name in named]
    documents.decode(documents.encode(replace(said, small=tuple(small[1:]))), toy.weights_sha256)
    with pytest.raises(BadCheckpoint, match="names 18 files"):
        documents.decode(documents.encode(replace(said, small=tuple(small))), toy.weights_sha256)


def test_a_description_is_of_what_was_asked_for_and_names_no_file_elsewhere(
    whole: Manifest,
) -> None:
    said = documents.document_of(whole, "", None)
    first, *others = said.tensors
    file = said.weights[0]
    small = documents.SmallFile("tokenizer.json", 10, "0" * 64)
    for changed, wrong in (
        (said, "is another one"),
        (replace(said, tensors=(replace(first, sha256="0" * 64), *others)), "is another one"),
        (replace(said, tensors=(first, first, *others)), "is another one"),
        (replace(said, weights=(replace(file, name="../toy.gguf"),)), "name of a weights file"),
        (replace(said, weights=(replace(file, name="toy.bin"),)), "name of a weights file"),
        (replace(said, small=(replace(small, name="../config.json"),)), "may be fetched"),
        (replace(said, small=(replace(small, name="modeling_toy.py"),)), "may be fetched"),
    ):
        wanted = whole.weights_sha256 if changed is not said else "0" * 64
        with pytest.raises(BadCheckpoint, match=wrong):
            documents.decode(documents.encode(changed), wanted)


async def test_the_hub_is_asked_once_for_the_whole_house_and_then_by_ranges(
    tmp_path: Path, checkpoint: Path
) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    file = await asyncio.to_thread(write_gguf, checkpoint, folder / "toy-Q8_0.gguf", "Q8_0")
    whole = await asyncio.to_thread(read_manifest, file)
    settings = settings_of(await asyncio.to_thread(read_gguf_header, file))
    once = HEADER_BYTES + sum(each.nbytes for each in settings) + file.stat().st_size
    with HubStandin(folder) as hub:
        async with hub_house(tmp_path, hub.url, "one", "two", "three") as (_, (one, two, three)):
            pulls = [fetcher.supervisor.pull("org/toy") for fetcher in (one, two)]
            for directory in await asyncio.gather(*pulls):
                assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)
                record = await asyncio.to_thread(read_record, directory)
                assert record.origin == f"org/toy@{hub.commit}/toy-Q8_0.gguf"
            assert hub.sent[file.name] == once
            part = await three.supervisor.pull("org/toy", [LayerRange(0, 1)], ends=False)
            assert hub.sent[file.name] == once
            # What no neighbour has any more is asked for by ranges.
            for fetcher in (one, two):
                (held,) = fetcher.supervisor.holdings
                await fetcher.supervisor.remove(held.directory)
            await three.supervisor.ensure(MODEL, whole.weights_sha256, [LayerRange(1, 2)])
            here = await asyncio.to_thread(right, part, whole)
            assert {entry.name for entry in whole.layer_tensors(LayerRange(0, 2))} < here
            ranged = hub.sent[file.name] - once
            names = [*whole.layer_tensors(LayerRange(1, 2)), *whole.ends_tensors()]
            assert ranged == sum(entry.nbytes for entry in names)


def test_what_lies_beside_it_is_not_given(whole: Manifest) -> None:
    shelf = Shelf()
    shelf.put(StoredCheckpoint(whole, "", None))
    sha = whole.weights_sha256
    for part, name in ((Part.FILE, "tokenizer.json"), (Part.HEADER, "other.gguf")):
        with pytest.raises(BadRequest, match="no file of this checkpoint"):
            shelf.part(sha, part, name)


async def test_what_is_dropped_leaves_the_settings(tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    file = await asyncio.to_thread(write_gguf, checkpoint, folder / "toy-Q8_0.gguf", "Q8_0")
    whole = await asyncio.to_thread(read_manifest, file)
    with HubStandin(folder) as hub:
        async with house(tmp_path, "one") as made:
            made.hub = HubSettings(hub.url)
            one = made.start("one")
            await up(one)
            layers = LayerRange(0, 1)
            part = await one.supervisor.pull("org/toy", [layers], ends=False, drop=True)
            names = {entry.name for entry in whole.layer_tensors(layers)}
            assert await asyncio.to_thread(right, part, whole) == names | {"rope_freqs.weight"}
