"""The shard of a simulated hearth: the real service, sessions and device queue over toy layers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, cast

import torch

from mesh.accounts.ledger import ResourceLedger
from mesh.models.cuts import ANYWHERE
from mesh.shard.admission import LayerShape
from mesh.shard.runtime import StepInput
from mesh.shard.scheduler import Scheduler
from mesh.shard.server import ShardServer
from mesh.shard.service import ShardService
from mesh.shard.settings import ShardSettings
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import Endpoint, LayerRange, NodeId, ShardDescriptor, shard_id
from tests.pipeline.toy_mesh import HIDDEN, MODEL, TOTAL_LAYERS, WEIGHTS, ToySession
from tests.simulation.members.bounds import SESSIONS, SHARDS
from tests.simulation.members.machine import LoopTime

LAYERS = LayerRange(0, TOTAL_LAYERS)
LEASE_S = 20.0
SILENT_S = 2.0
PORT = 1000


class ToyCache:
    """Where a session's cache would be."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.session = ToySession(LAYERS)
        self.allocated_bytes = 0

    @property
    def length(self) -> int:
        return len(self.session.sums)

    def cut(self, position: int) -> None:
        del self.session.sums[position:]


class ToySpan:
    """Where the loaded layers would be."""

    device = torch.device("cpu")
    dtype = torch.float32
    batch_rows = 0
    """Else rows would wait for each other by what they really take, which no seed says."""

    def new_cache(self, max_tokens: int, hooks: Sequence[Any] = ()) -> ToyCache:
        return ToyCache(max_tokens)

    def forward(self, steps: Sequence[StepInput], layers: LayerRange) -> list[torch.Tensor]:
        return [self._one(step) for step in steps]

    def _one(self, step: StepInput) -> torch.Tensor:
        cache: Any = step.cache
        rows = [[int(value) for value in row] for row in step.hidden[0].tolist()]
        return torch.tensor([cache.session.run(step.position, rows)], dtype=torch.float32)


def descriptor(host: NodeId, name: str) -> ShardDescriptor:
    return ShardDescriptor(
        shard_id(MODEL, LAYERS), MODEL, WEIGHTS, LAYERS, TOTAL_LAYERS, 1, SESSIONS, host, name,
        Endpoint(f"wss://sim:{PORT}"), "fp32", "toy", datetime(2000, 1, 1, tzinfo=UTC),
    )  # fmt: skip


def service(host: NodeId, name: str) -> tuple[ShardService, ShardServer]:
    """A service with one shard of all layers."""
    settings = ShardSettings(
        max_concurrent_streams=SESSIONS, kv_tokens=400, session_lease_s=LEASE_S,
        silent_s=SILENT_S, park_lease_s=LEASE_S, inline_ms=0.0,
    )  # fmt: skip
    server = ShardServer(
        descriptor(host, name), lambda: cast("TorchRuntime", ToySpan()), settings,
        shape=LayerShape(HIDDEN, HIDDEN, ANYWHERE), scheduler=Scheduler(),
    )  # fmt: skip
    made = ShardService()
    made.accounts = ResourceLedger(LoopTime(), SHARDS)
    made.add(server)
    return made, server
