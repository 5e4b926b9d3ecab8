"""Whether lean layers of a family compute what its modules do.

Shown on a twin (`mesh.shard.twins`), once for a structure. Whether this CPU computes them right
with the weights at hand is looked at when layers are loaded (`selfcheck.lean_agrees`).
"""

from __future__ import annotations

from pathlib import Path

import torch

from mesh.errors import DeviceFailed
from mesh.models.families import Family
from mesh.models.span import LoadedSpan
from mesh.shard import lean
from mesh.shard.torch_runtime import TorchRuntime
from mesh.shard.twins import Way, require_right


def require_lean(family: Family, cache_dir: Path | None, positions: int | None = None) -> None:
    """Return if they are right for the family's models in sessions of at most `positions` (None: of
    any length). Raises NotCompilable with the reason.

    Blocks for up to a second the first time a structure is seen.
    """
    require_right(_LEAN, family, cache_dir, positions)


def _runtime_of(loaded: LoadedSpan) -> TorchRuntime:
    lean.fused_places(loaded.module)  # raises what is against it
    runtime = TorchRuntime(loaded, device=torch.device("cpu"), dtype=torch.float32, lean=True)
    if not runtime.is_lean:
        raise DeviceFailed(
            f"Lean layers were not taken: {runtime.reasons[0]}.",
            fix="Nothing is lost but speed.",
        )
    return runtime


_LEAN = Way("lean", "lean layers", torch.__version__, _runtime_of)
