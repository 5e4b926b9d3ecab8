"""A shard process that something happens to: which of these, the name of its model says.

``python -m mesh.processes.entry tests.shard.doomed_host``. A model of any other name is loaded and
served.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mesh.errors import DeviceFailed
from mesh.shard import process
from mesh.shard.load_plan import LoadPlan
from mesh.shard.loading import LoadedShard, load_shard
from mesh.shard.runtime import StepInput
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange

ASSERTS = "asserts"
"""From the second step on, the device is lost."""
STANDS_STILL = "stands still"
"""The second step never ends."""
KILLED = "killed"
"""The process is killed while it loads, as by a kernel that has no memory left."""
STUMBLES = "stumbles"
"""The first load fails for a reason that passes."""
LINGERS = "lingers"
"""Loading stops half-way for ever."""
HOG = "hog"
"""Loading takes far more memory than anybody could know."""
STUCK_S = 2.0
GROUP = "PYTHON_TEST_GROUP"
"""The control group that the hog enters."""

_loads = itertools.count()


class DoomedRuntime(TorchRuntime):
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


def load(plan: LoadPlan) -> LoadedShard:
    """As `load_shard`, with another runtime over the same weights."""
    doom = plan.request.model_id
    if doom == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if doom == STUMBLES and next(_loads) == 0:
        raise DeviceFailed("The disk was slow.", fix="Wait.")
    if doom == LINGERS:
        plan.progress.begin("reading", 100)
        plan.progress.add(50)
        threading.Event().wait()
    if doom == HOG:
        group = Path(os.environ[GROUP])
        (group / "cgroup.procs").write_text(str(os.getpid()))
        plan = replace(plan, need=bytearray(8 << 30))  # type: ignore[arg-type] # never got so far
    loaded = load_shard(plan)

    def runtime() -> TorchRuntime:
        made = loaded.load()
        doomed = DoomedRuntime.__new__(DoomedRuntime)
        doomed.__dict__.update(made.__dict__)
        doomed.doom = str(doom)
        return doomed

    return replace(loaded, load=runtime)


def main() -> None:
    """Be the process."""
    process.main(load, stuck_s=STUCK_S)
