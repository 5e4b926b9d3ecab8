"""What is told of weights that are fetched for a deployment."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.deployments.phases import Phase, Phases
from mesh.deployments.weights import LocalWeights
from mesh.errors import TransferFailed
from mesh.node.fetched_weights import FetchedWeights
from mesh.types import LayerRange, shard_id
from tests.transfers.house import MODEL, house, up

LAYERS = LayerRange(0, 2)
SHARD = shard_id(MODEL, LAYERS)


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
