"""Llama 4's experts, computed only for the rows that go to them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from mesh.models.llama4 import only_those_met


def test_rows_meet_the_experts_that_they_go_to_and_nothing_else_changes() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48}
    config = Llama4TextConfig(**sizes, num_local_experts=8, num_experts_per_tok=2)
    torch.manual_seed(0)
    block: Any = Llama4TextMoe(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    found, gradients = [], []
    met: list[int] = []
    block.experts.act_fn.register_forward_pre_hook(lambda _, args: met.append(len(args[0])))
    for _ in range(2):
        met.clear()
        rows = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        given: list[torch.Tensor] = []
        handle = block.experts.register_forward_pre_hook(lambda _, args, to=given: to.append(*args))
        output, _ = block(rows)
        output.square().sum().backward()
        handle.remove()
        assert given[0].shape == (8 * 5, 32), "what goes in is what clients know"
        assert rows.grad is not None
        found.append(output.detach())
        gradients.append(rows.grad)
        block.config = config
        only_those_met(block)
        only_those_met(block)  # as layers may be shared that were adapted before
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
    assert sum(met) == 5 * 2
