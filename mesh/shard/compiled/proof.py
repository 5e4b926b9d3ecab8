"""Whether the graphs of a family compute what its modules do, and whether this CPU computes them.

The first is shown on a twin (`mesh.shard.twins`) once for a structure, the second on the first
layer whenever layers are loaded.
"""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import torch

from mesh.errors import DeviceFailed
from mesh.models.families import Family
from mesh.models.span import LoadedSpan
from mesh.shard.compiled.runtime import CompiledRuntime
from mesh.shard.compiled.store import dense_span
from mesh.shard.runtime import StepInput
from mesh.shard.twins import POSITIONS, Way, require_right
from mesh.shard.views import layer_view
from mesh.types import LayerRange

_CHECKED_ROWS = 4
_ROUNDING = 0.1


def require_compilable(
    family: Family, cache_dir: Path | None, positions: int | None = None
) -> None:
    """Return if graphs are right for the family's models in sessions of at most `positions` (None:
    of any length). Raises NotCompilable with the reason.

    Blocks for up to a few seconds the first time a structure is seen.
    """
    require_right(_GRAPHS, family, cache_dir, positions)


def _runtime_of(loaded: LoadedSpan) -> CompiledRuntime:
    return CompiledRuntime(dense_span(loaded), threads=1, positions=POSITIONS)


_GRAPHS = Way("compiled", "graphs", onnxruntime.__version__, _runtime_of)


@torch.inference_mode()
def check_kernels(runtime: CompiledRuntime) -> str:
    """Compare the first layer, as this CPU computes it, with what its weights stand for.

    Also whether a row has the same bits alone, in a chunk and beside another session: what came of
    that, for people. Raises DeviceFailed when the layer is further off than rounding a row to 8 bit
    explains.
    """
    first = LayerRange(runtime.layers.start, runtime.layers.start + 1)
    seeded = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _CHECKED_ROWS, runtime.row_size, generator=seeded)
    view = layer_view(runtime.loaded.module, 0, 1)
    expected = view(inputs_embeds=hidden, use_cache=False).last_hidden_state
    whole, cut, other = (runtime.new_cache(_CHECKED_ROWS) for _ in range(3))
    (found,) = runtime.forward([StepInput(whole, 0, hidden)], first)
    runtime.forward([StepInput(cut, 0, hidden[:, :-1])], first)
    last = StepInput(cut, _CHECKED_ROWS - 1, hidden[:, -1:])
    (alone,) = runtime.forward([last], first)
    steps = [last, StepInput(other, 0, hidden[:, :-1])] if runtime.batch_rows else [last]
    beside = runtime.forward(steps, first)[0]
    # Relative to what the layer adds: the residual stream would hide it. Of the rows the middle
    # one: another may, by a hair, go to other experts.
    added = (expected - hidden).norm(dim=-1)
    error = float(((found - expected).norm(dim=-1) / added).median())
    if not error <= _ROUNDING:
        raise DeviceFailed(
            f"Layer {first.start} in few bits is off by {error:.0%} on this CPU.",
            fix="Serve it unquantised (--quant none), and report the CPU and this line.",
        )
    if torch.equal(alone, found[:, -1:]) and torch.equal(beside, alone):
        return "rows: the same bits in any chunk and batch"
    return "rows: other last bits in other chunks or batches on this CPU"
