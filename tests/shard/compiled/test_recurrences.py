"""What mixers with a running state are made of, as lean layers and graphs read it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from mesh.models.load import LoadedSpan, load_span
from mesh.shard.compiled.runtime import CompiledRuntime
from mesh.shard.compiled.store import dense_span
from mesh.shard.runtime import Runtime
from mesh.shard.torch_runtime import TorchRuntime
from tests.shard.spans import CPU, WHOLE, checkpoint, relative_error, rows, step


def normed_in_groups() -> LoadedSpan:
    """Granite 4's layers with the norm that they have from transformers 5.23 on."""
    loaded = load_span(checkpoint("granitemoehybrid_dense"), WHOLE, dtype=torch.float32, device=CPU)
    module: Any = loaded.module
    for mixer in (layer.mamba for layer in module.layers if layer.mamba is not None):
        norm = mixer.norm
        size = len(norm.weight) // mixer.n_groups
        mixer.norm = Zamba2RMSNormGated(len(norm.weight), size, eps=norm.variance_epsilon)
        mixer.norm.weight = norm.weight
    return loaded


@pytest.mark.parametrize("way", ["lean", "graphs"])
def test_a_gate_whose_norm_is_of_groups_gives_what_modules_give(way: str) -> None:
    span: Runtime
    if way == "lean":
        span = TorchRuntime(normed_in_groups(), device=CPU, dtype=torch.float32, lean=True)
        assert span.is_lean
    else:
        span = CompiledRuntime(dense_span(normed_in_groups()), threads=1, positions=64)
    modules = TorchRuntime(normed_in_groups(), device=CPU, dtype=torch.float32)
    assert not modules.is_lean
    hidden = rows(33)
    found, expected = span.new_cache(64), modules.new_cache(64)
    for start, stop in ((0, 30), (30, 31), (31, 33)):
        part = hidden[:, start:stop]
        given = step(span, found, start, part)
        assert relative_error(given, step(modules, expected, start, part)) < 1e-4
