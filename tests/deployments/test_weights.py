"""Where a deployment finds GGUF files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mesh.deployments.weights import LocalWeights
from mesh.errors import MeshError, ModelNotFound
from mesh.models.builtin import checkpoint_dir
from mesh.types import LayerRange, ModelId
from tests.full_disk import file_size_limit
from tests.gguf_files import write_gguf

_ALL = (LayerRange(0, 8),)


async def test_a_file_is_found_by_its_path_and_where_models_are(tmp_path: Path) -> None:
    file = write_gguf(checkpoint_dir(), tmp_path / "house--small.gguf", "Q8_0")
    weights = LocalWeights({}, [tmp_path], None)
    by_path = await weights.find(str(file))
    assert (by_path.model_id, by_path.total_layers) == ("house--small", 8)
    named = await weights.find(f"{file}=mine")
    assert (named.model_id, named.weights_sha256) == ("mine", by_path.weights_sha256)
    by_name = await weights.find("house/small")
    assert by_name.weights_sha256 == by_path.weights_sha256
    sha256 = by_path.weights_sha256
    path = await weights.ensure(ModelId("house/small"), sha256, _ALL, lambda *far: None)
    assert path == file
    with pytest.raises(ModelNotFound, match="has other weights"):
        await weights.ensure(ModelId("house/small"), "0" * 64, _ALL, lambda *far: None)
    with pytest.raises(ModelNotFound):
        await weights.find(str(tmp_path / "none.gguf"))


async def test_a_snapshot_that_has_only_a_file_is_found(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--house--small" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    write_gguf(checkpoint_dir(), snapshot / "small-f16.gguf", "F16")
    weights = LocalWeights({}, [tmp_path], None)
    assert (await weights.find("house/small")).model_id == "house/small"
    (snapshot / "Q8_0").mkdir()
    write_gguf(checkpoint_dir(), snapshot / "Q8_0" / "large.gguf", "Q8_0")
    for named in ("house/small/large.gguf", "house/small/Q8_0/large.gguf"):
        assert (await weights.find(named)).model_id == "house/small/large.gguf"


async def test_of_several_snapshots_the_one_is_found_that_is_the_main_revision(
    tmp_path: Path,
) -> None:
    repository, names = tmp_path / "models--house--small", ("0" * 40, "1" * 40)
    kinds = dict(zip(names, ("Q8_0", "Q4_0"), strict=True))
    (repository / "refs").mkdir(parents=True)
    for name, kind in kinds.items():
        (repository / "snapshots" / name).mkdir(parents=True)
        write_gguf(checkpoint_dir(), repository / "snapshots" / name / "small.gguf", kind)
    weights = LocalWeights({}, [tmp_path], None)
    for name in names:
        (repository / "refs" / "main").write_text(name)
        found = await weights.manifest("house/small")
        assert (found.directory.name, found.dtype) == (name, kinds[name].lower())


async def test_what_was_named_by_its_path_is_found_by_its_name_after_a_restart(
    tmp_path: Path,
) -> None:
    file = write_gguf(checkpoint_dir(), tmp_path / "elsewhere.gguf", "Q8_0")
    state = tmp_path / "state.json"
    before = LocalWeights({}, [], None, state)
    with file_size_limit(0):
        await before.find(f"{file}=mine")
    found = await before.find(f"{file}=mine")  # again, once the disk has room
    again = LocalWeights({}, [], None, state)
    assert await again.find("mine") == found
    place = await again.ensure(ModelId("mine"), found.weights_sha256, _ALL, lambda *far: None)
    assert place == file
    file.unlink()
    with pytest.raises(ModelNotFound):
        await again.find("mine")


@pytest.mark.parametrize(
    ("name", "why"), [("empty", "has no config.json"), ("gone.gguf", "is not there")]
)
async def test_what_is_wrong_with_a_path_is_said(tmp_path: Path, name: str, why: str) -> None:
    await asyncio.to_thread((tmp_path / "empty").mkdir)
    with pytest.raises(MeshError, match=why):
        await LocalWeights({}, (), None).manifest(str(tmp_path / name))


@pytest.mark.parametrize(
    "name", ["x" * 300, f"house/{'x' * 300}", f"/{'x' * 300}", "x\0", "house/x\0", "/x\0=y"]
)
async def test_a_name_that_no_file_can_have_is_no_bug(tmp_path: Path, name: str) -> None:
    # From 3.14 on, pathlib says of such a name just that there is no file.
    said = "cannot be looked for: File name too long|are not on this machine"
    with pytest.raises(ModelNotFound, match=said) as told:
        await LocalWeights({}, [tmp_path], None).manifest(name)
    assert len(str(told.value)) < 400 + len(str(tmp_path))


async def test_what_cannot_be_looked_at_keeps_nothing_else_from_being_found(tmp_path: Path) -> None:
    """A path as here, or one that this user may not see."""
    file = write_gguf(checkpoint_dir(), tmp_path / "house--small.gguf", "Q8_0")
    unseen = Path(f"/{'d' * 300}")
    weights = LocalWeights({}, [unseen, tmp_path], tmp_path / "cache")
    found = await weights.find("house/small")
    what = found.model_id, found.weights_sha256
    assert await weights.ensure(*what, _ALL, lambda *far: None) == file
    assert await weights.kept(*what) == file


async def test_a_name_that_no_file_can_have_is_that_of_none_here(tmp_path: Path) -> None:
    """Another member may have deployed it: the others' files are offered all the same."""
    weights, long = LocalWeights({}, [tmp_path], tmp_path / "cache"), ModelId("x" * 250)
    assert await weights.kept(long, "0" * 64) is None
    with pytest.raises(ModelNotFound):
        await weights.ensure(long, "0" * 64, _ALL, lambda *far: None)
