"""A shard process whose device fails for good, or for ever, in the middle of its work.

``python -m mesh.child tests.shard.doomed_host``; what happens is said by `DOOM`, the name of the
model that is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import torch

from mesh.shard.host import main
from mesh.shard.loading import HostedOn, LoadedShard, ShardRequest, load_shard
from mesh.shard.runtime import SpanRuntime, StepInput
from mesh.types import LayerRange

ASSERTS = "asserts"
STANDS_STILL = "stands still"
STUCK_S = 2.0


class DoomedRuntime(SpanRuntime):
    """Computes its first step; from the second on its device does what `doom` says."""

    doom = ""
    steps = 0

    def forward(
        self, steps: Sequence[StepInput], layers: LayerRange | None = None
    ) -> list[torch.Tensor]:
        self.steps += 1
        if self.steps > 1 and self.doom == ASSERTS:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with")
        if self.steps > 1 and self.doom == STANDS_STILL:
            threading.Event().wait()
        return super().forward(steps, layers)


def load(request: ShardRequest, place: HostedOn) -> LoadedShard:
    """As `load_shard`, with another runtime over the same weights."""
    loaded = load_shard(request, place)

    def runtime() -> SpanRuntime:
        made = loaded.load()
        doomed = DoomedRuntime.__new__(DoomedRuntime)
        doomed.__dict__.update(made.__dict__)
        doomed.doom = str(request.model_id)
        return doomed

    return replace(loaded, load=runtime)


if __name__ == "__main__":
    main(load, stuck_s=STUCK_S)
