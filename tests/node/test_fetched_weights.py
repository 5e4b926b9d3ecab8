"""What is told of weights that are fetched for a deployment."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.deployments.phases import Phase, Phases
from mesh.deployments.weights import LocalWeights
from mesh.deployments.wishes import Deployment, Wish
from mesh.errors import TransferFailed
from mesh.models.manifest import read_manifest
from mesh.node.deployed_weights import DeployedWeights
from mesh.node.fetched_weights import FetchedWeights
from mesh.types import LayerRange, ModelId, NodeId, shard_id
from tests.checkpoints import make_checkpoint
from tests.transfers.house import MODEL, house, up
from tests.waiting import until

LAYERS = LayerRange(0, 2)
SHARD = shard_id(MODEL, LAYERS)
HERE = NodeId("attic")


async def test_a_span_says_what_its_weights_wait_for(tmp_path: Path) -> None:
    told: list[str | None] = []
    phases = Phases(lambda *_: None)
    phases.put(SHARD, Phase.PROVISIONING)

    def far(*said: Any) -> None:
        phases.bytes(SHARD, *said)
        row = phases.get(SHARD)
        assert row is not None
        told.append(row.reason)

    async with house(tmp_path, "empty") as made:
        empty = made.start("empty", patience_s=4.0)
        await up(empty)
        here: Any = SimpleNamespace(fetcher=empty.supervisor)
        weights = FetchedWeights(LocalWeights({}, [], None), here, None, thin=False)
        with pytest.raises(TransferFailed, match="No node that is up can give"):
            await weights.ensure(MODEL, "ab" * 32, [LAYERS], far, runs_ends=False)
    assert set(told) == {"no node that is up has it"}


@pytest.fixture
def hashes(tmp_path: Path) -> dict[str, str]:
    """Of checkpoints in a folder of models; the attic has read them, but not what is new."""
    cache, found = tmp_path / "attic" / "cache", dict[str, str]()
    for seed, name in enumerate(("toy", "new", "unwanted")):
        place = make_checkpoint(tmp_path / "models" / name, "llama", layers=2, seed=seed)
        by = cache if name != "new" else tmp_path / "another"
        found[name] = read_manifest(place, cache_dir=by).weights_sha256
    return found


async def test_what_lies_here_of_what_is_deployed_is_offered_by_whoever_started_again(
    hashes: dict[str, str], tmp_path: Path
) -> None:
    """Nothing that would have to be read whole for its hash, and nothing that nobody wants."""
    wished = {
        f"{number:016x}": Deployment(
            Wish(f"{number:016x}", ModelId(name), hashes[name], 2, 1), None, "cd" * 32, HERE, 0
        )
        for number, name in enumerate(("toy", "new"))
    }
    async with house(tmp_path, "attic") as made:
        attic = made.start("attic")
        await up(attic)
        local = LocalWeights({}, [tmp_path / "models"], tmp_path / "attic" / "cache")
        here = DeployedWeights(lambda: wished, local, attic.supervisor.offer)
        here.start()
        await until(lambda: bool(attic.supervisor.holdings))
        await here.stop()
        assert [each.weights_sha256 for each in attic.supervisor.holdings] == [hashes["toy"]]
