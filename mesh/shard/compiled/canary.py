"""Whether the weights that onnxruntime holds are still what was loaded.

It keeps them in a form and a place of its own, so they are not hashed but asked: each layer
computes the same row over and over, and its bits must stay what they were. Every weight has a part
in them; of a mixture of experts not in those of one row, so it is asked with others in turns.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mesh.shard.compiled.runtime import CompiledRuntime


class CanaryCheck:
    """A `mesh.shard.weight_check.Check`. Keeps nothing from being freed."""

    def __init__(self, runtime: CompiledRuntime) -> None:
        self._runtime = weakref.ref(runtime)
        self._expected: dict[tuple[int, int], torch.Tensor] = {}
        self._layers = runtime.layers
        self._next = runtime.layers.start
        self.rounds = 0
        """How often every layer was asked."""

    def step(self, size: int) -> str | None:
        """Ask the next layer, however large; its name when its answer has changed."""
        runtime = self._runtime()
        if runtime is None:
            return None
        layer, row = self._next, self.rounds % runtime.probes
        found = runtime.probe(layer, row)
        expected = self._expected.setdefault((layer, row), found)
        self._next += 1
        if self._next == self._layers.stop:
            self._next = self._layers.start
            self.rounds += 1
        return None if torch.equal(found, expected) else f"layer {layer}"
