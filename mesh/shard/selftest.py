"""A test inference: a loaded span computes before anybody may use it.

Knows nothing of what is right, only of what no sound weights give.
"""

from __future__ import annotations

import torch

from mesh.errors import ShardCorrupt
from mesh.shard.runtime import Runtime, StepInput

_ROWS = 2


def self_test(runtime: Runtime) -> None:
    """Run a few rows through every layer, as a session's first step.

    Raises ShardCorrupt when what comes out is not finite, and what the device raises.
    """
    size = runtime.hidden_size
    row = torch.linspace(-1, 1, size, dtype=runtime.dtype, device=runtime.device)
    hidden = row.expand(1, _ROWS, size).contiguous()
    (output,) = runtime.forward([StepInput(runtime.new_cache(_ROWS), 0, hidden)])
    if output.shape != hidden.shape or not bool(torch.isfinite(output).all()):
        raise ShardCorrupt(
            f"Layers {runtime.layers} gave something else than finite numbers in their test.",
            fix="Download the checkpoint again; if it is whole, choose another --dtype.",
        )
