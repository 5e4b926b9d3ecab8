"""What a node says of its checkpoints while they change under it."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.errors import WeightsMissing
from mesh.models.manifest import Manifest, read_manifest
from mesh.transfers import documents
from mesh.transfers.asking import WeightsLink
from mesh.transfers.commands import PeerHolding
from mesh.transfers.fetches import Fetches, FetchSettings
from mesh.transfers.outside import HubClaims
from mesh.transfers.pacing import Pace
from mesh.transfers.shelf import Shelf, StoredCheckpoint
from mesh.types import ModelId, NodeId
from mesh.wire.messages import Part
from tests.checkpoints import make_checkpoint


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return read_manifest(make_checkpoint(tmp_path / "toy", "llama", layers=4, hidden=64, vocab=300))


class SlowNames(frozenset[str]):
    """Tensor names that are looked through slowly: until `proceed`, once somebody has `begun`."""

    def __new__(cls, names: frozenset[str]) -> SlowNames:
        made = super().__new__(cls, names)
        made.begun, made.proceed = threading.Event(), threading.Event()
        return made

    begun: threading.Event
    proceed: threading.Event

    def __contains__(self, name: object) -> bool:
        self.begun.set()
        assert self.proceed.wait(20)
        return super().__contains__(name)


def test_what_comes_while_it_is_told_is_told_to_the_next_who_asks(manifest: Manifest) -> None:
    shelf, names = Shelf(), frozenset(manifest.tensors)
    few = SlowNames(frozenset(sorted(names)[:3]))
    shelf.put(StoredCheckpoint(manifest, "", few))
    sha256 = manifest.weights_sha256
    asking = threading.Thread(target=shelf.part, args=(sha256, Part.DOCUMENT, ""))
    asking.start()
    assert few.begun.wait(20)
    shelf.put(StoredCheckpoint(manifest, "", names))
    few.proceed.set()
    asking.join(20)
    told = shelf.part(sha256, Part.DOCUMENT, "")
    assert documents.decode(told.read(0, told.size), sha256).here == names


def test_what_is_told_is_of_one_moment_though_more_comes_meanwhile(manifest: Manifest) -> None:
    shelf, names = Shelf(), frozenset(manifest.tensors)
    few, sha256 = frozenset(sorted(names)[:3]), manifest.weights_sha256
    for before, now in ((few, names), (names, few)):
        shelf.put(StoredCheckpoint(manifest, "", before))
        told = shelf.part(sha256, Part.DOCUMENT, "")
        shelf.put(StoredCheckpoint(manifest, "", now))
        assert documents.decode(told.read(0, told.size), sha256).here == before


@pytest.mark.parametrize("kind", [Part.FILE, Part.TENSOR])
def test_what_has_become_shorter_is_refused_not_given_in_part(
    manifest: Manifest, kind: Part
) -> None:
    shelf = Shelf()
    shelf.put(StoredCheckpoint(manifest, "", None))
    name = "config.json" if kind is Part.FILE else min(manifest.tensors)
    told = shelf.part(manifest.weights_sha256, kind, name)
    assert len(told.read(0, told.size)) == told.size
    entry = manifest.tensors[min(manifest.tensors)]
    file = manifest.directory / name if kind is Part.FILE else entry.file
    with file.open("r+b") as stream:
        stream.truncate(10)
    with pytest.raises(WeightsMissing, match="shorter"):
        told.read(0, told.size)


def test_what_its_owner_has_deleted_is_not_told_any_more(manifest: Manifest) -> None:
    shelf = Shelf()
    shelf.put(StoredCheckpoint(manifest, "", None))
    assert [held.weights_sha256 for held in shelf.holdings()] == [manifest.weights_sha256]
    shutil.rmtree(manifest.directory)
    assert shelf.holdings() == []
    assert shelf.all() == []


def test_what_nobody_can_look_for_any_more_is_not_told(manifest: Manifest, tmp_path: Path) -> None:
    shelf = Shelf()
    shelf.put(StoredCheckpoint(manifest, "", None))
    shelf.look()
    assert [kept.place for kept in shelf.all()] == [manifest.path]
    odd = replace(manifest, directory=tmp_path / ("x" * 300))  # a name that no disk takes
    shelf.put(StoredCheckpoint(odd, "", None))
    shelf.look()
    assert [kept.place for kept in shelf.all()] == [manifest.path]


async def test_who_fetches_from_the_hub_says_so_until_all_here_who_do_have_ended(
    tmp_path: Path,
) -> None:
    async def dial(peer: PeerHolding) -> WeightsLink:
        raise AssertionError(peer)

    shelf = Shelf()
    fetches = Fetches(FetchSettings(tmp_path), shelf, dial, Pace())
    claims = HubClaims(NodeId("one"), shelf, fetches, patience_s=1.0)
    claim = ("org/toy@0", ModelId("org/toy"), tmp_path)
    async with claims.made(*claim):
        async with claims.made(*claim) as is_first:
            assert is_first
        assert [held.origin for held in shelf.holdings()] == ["org/toy@0"]
    assert shelf.holdings() == []
