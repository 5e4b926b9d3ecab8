"""Weights that are codes with scales, as fetchers move them: a layer comes with its scales."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mesh.deployments.shape import shape_of
from mesh.errors import WeightsMissing
from mesh.models.load import load_ends
from mesh.models.manifest import Manifest, read_manifest
from mesh.transfers.hub import HubSettings
from mesh.types import LayerRange
from tests import coded_files
from tests.checkpoints import make_checkpoint
from tests.coded_files import Form, write_coded
from tests.transfers.house import MODEL, house, up
from tests.transfers.hub_standin import HubStandin
from tests.transfers.test_fetch_gguf import span
from tests.transfers.test_fetcher import right
from tests.transfers.test_hub import weights_sent

FORMS = {"fp8": coded_files.fp8((128, 128)), "gptq": coded_files.gptq(4, 64, symmetric=True)}


@pytest.fixture(params=FORMS)
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Manifest:
    form: Form = FORMS[request.param]
    write_coded(make_checkpoint(tmp_path / "made", "llama", layers=4), tmp_path / "coded", form)
    return read_manifest(tmp_path / "coded", model_id=MODEL)


async def test_layers_then_the_ends_come_from_a_neighbour(tmp_path: Path, whole: Manifest) -> None:
    async with house(tmp_path, "full", "empty") as made:
        full, empty = made.start("full", whole.directory), made.start("empty")
        await up(full, empty)
        made.introduce()
        sha, layers = whole.weights_sha256, LayerRange(2, 4)
        directory = await empty.supervisor.ensure(MODEL, sha, [layers], ends=False)
        names = {entry.name for entry in whole.layer_tensors(layers)}
        assert len(names) > len(whole.layer_weights(layers))
        assert await asyncio.to_thread(right, directory, whole) == names
        part = await asyncio.to_thread(read_manifest, directory)
        assert (part.weights_sha256, part.dtype) == (sha, whole.dtype)
        assert part.layers_here() == (layers,)
        with pytest.raises(WeightsMissing):  # else it would compute with zeros
            await asyncio.to_thread(span, part, 0, 2)
        ours, theirs = [await asyncio.to_thread(span, each, 2, 4) for each in (part, whole)]
        for name, weight in theirs.items():
            assert torch.equal(ours[name], weight), name
        await empty.supervisor.ensure(MODEL, sha, [layers], ends=True)
        part = await asyncio.to_thread(read_manifest, directory)
        cpu = torch.device("cpu")
        assert await asyncio.to_thread(load_ends, part, dtype=torch.float32, device=cpu)


async def test_plans_are_made_of_headers_alone(tmp_path: Path, whole: Manifest) -> None:
    with HubStandin(whole.directory) as hub:
        async with house(tmp_path, "one") as made:
            made.hub = HubSettings(hub.url)
            one = made.start("one")
            await up(one)
            directory = await one.supervisor.headers("org/toy")
            found = await asyncio.to_thread(read_manifest, directory, is_hashed=False)
            as_read = replace(found, model_id=MODEL, weights_sha256=whole.weights_sha256)
            assert shape_of(as_read, 256) == shape_of(whole, 256)
            assert weights_sent(hub) == min(entry.offset for entry in whole.tensors.values())
