"""Whether the weights that onnxruntime holds are still what was loaded.

It keeps them in a form and a place of its own, so they are not hashed but asked: each layer
computes the same rows over and over, and their bits must stay what they were. Every weight has a
part in them: but for experts that a row does not meet, and changes that are lost where a row is
rounded before a product. So layers are asked with many rows in turns, and with the first one in
between.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh.shard.compiled.runtime import CompiledRuntime


class CanaryCheck:
    """A `mesh.shard.weight_check.Check`. Keeps nothing from being freed."""

    def __init__(self, runtime: CompiledRuntime) -> None:
        self._runtime = weakref.ref(runtime)
        self._expected: dict[tuple[int, int], bytes] = {}
        self._layers = runtime.layers
        self._next = runtime.layers.start
        self.rounds = 0
        """How often every layer was asked."""

    def step(self, size: int) -> str | None:
        """Ask the next layer, however large; its name when its answer has changed."""
        runtime = self._runtime()
        if runtime is None:
            return None
        layer, others = self._next, runtime.probes - 1
        row = 1 + self.rounds // 2 % others if self.rounds % 2 else 0
        found = hashlib.sha256(runtime.probe(layer, row).numpy().tobytes()).digest()
        expected = self._expected.setdefault((layer, row), found)
        self._next += 1
        if self._next == self._layers.stop:
            self._next = self._layers.start
            self.rounds += 1
        return None if found == expected else f"layer {layer}"
