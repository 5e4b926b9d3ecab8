"""The toy model of `tests.pipeline.toy_mesh` with running sums: the same numbers in linear time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mesh.types import LayerRange
from tests.pipeline.toy_mesh import HIDDEN, TOTAL_LAYERS, ToyEnds, ToySession, toy_layer


class SummedSession(ToySession):
    """A toy session whose `inputs` are sums over the positions so far."""

    def run(self, position: int, rows: list[list[int]]) -> list[list[int]]:
        """As `ToySession.run`."""
        assert position <= len(self.inputs), "a hole in the positions"
        del self.inputs[position:]
        outputs = []
        for row in rows:
            before = self.inputs[-1] if self.inputs else [[0] * HIDDEN] * len(self.layers)
            sums, value = [], row
            for layer, past in zip(range(self.layers.start, self.layers.stop), before, strict=True):
                sums.append([a + b for a, b in zip(past, value, strict=True)])
                value = toy_layer(layer, value, past)
            self.inputs.append(sums)
            outputs.append(value)
        return outputs


def whole_model(prompt: Sequence[int], count: int) -> list[int]:
    """What `count` greedy tokens after `prompt` have to be; equals `toy_mesh.expected_tokens`."""
    ends, session = ToyEnds(), SummedSession(LayerRange(0, TOTAL_LAYERS))
    ids, tokens, position = list(prompt), [], 0
    for _ in range(count):
        rows = [[int(v) for v in row] for row in ends.embed(torch.tensor([ids]), position)[0]]
        last = session.run(position, rows)[-1]
        position += len(ids)
        tokens.append(int(ends.logits(torch.tensor([[last]], dtype=torch.float32)).argmax()))
        ids = [tokens[-1]]
    return tokens
