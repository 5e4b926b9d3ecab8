"""Edits inside a loaded span, family by family, and in the second session of a spot check."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mesh.errors import BadSteering
from mesh.pipeline.checkpoint import load_asker
from mesh.pipeline.claims import Claims
from mesh.pipeline.commands import AskerOptions
from mesh.pipeline.hop import HopSession, Patience
from mesh.pipeline.links import HopLinks
from mesh.pipeline.terms import SessionTerms
from mesh.routing.cover import key_of
from mesh.shard.hooks import hooked
from mesh.shard.runtime import StepInput
from mesh.shard.steering import SessionEdits, _Added
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import Edit, LayerRange, RouteHop, Site, WireDtype
from mesh.wire.activations import to_torch, to_wire
from tests import secure
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.mesh_e2e.spread import MODEL
from tests.research.steering.local import edit, load, low_rank_file, steered
from tests.shard.spans import HIDDEN, WHOLE, checkpoint, rows, runtime

SPAN = LayerRange(1, 3)


def hidden_states(model: Any, embeds: torch.Tensor, edits: list[Edit]) -> list[torch.Tensor]:
    """What enters each layer, as the whole model computes it."""
    seen: list[torch.Tensor] = []
    layers = model.model.layers if hasattr(model, "model") else model.transformer.h
    handles = [
        layer.register_forward_pre_hook(
            lambda _m, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        for layer in layers
    ]
    with torch.no_grad(), steered(model, edits):
        model(inputs_embeds=embeds)
    for handle in handles:
        handle.remove()
    return seen


def part_of(module: Any, *names: str) -> str:
    """What of these it has."""
    return next(name for name in names if hasattr(module, name))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_steered_like_by_a_hook(family: str) -> None:
    model = load(checkpoint(family).directory)
    layers = model.model.layers if hasattr(model, "model") else model.transformer.h
    first, second = (part_of(layers[i], "self_attn", "attn", "linear_attn", "conv") for i in (1, 2))
    edits = [
        edit(1),
        edit(1, first, data=low_rank_file()),
        edit(2, part_of(layers[2], "mlp", "feed_forward"), data=low_rank_file(seed=3)),
        edit(2, second, "input"),
        edit(1, f"{first}.{part_of(getattr(layers[1], first), 'o_proj', 'c_proj', 'out_proj')}"),
    ]
    entered = hidden_states(model, rows(9), edits)
    plain = hidden_states(model, rows(9), [])
    span: TorchRuntime = runtime(family, SPAN)
    hooks = SessionEdits.check(edits, SPAN, HIDDEN).hooks(span)
    # In two steps, and the second one row by row: every way a step is computed.
    cache = span.new_cache(32)
    outputs = [
        span.forward([StepInput(cache, first, entered[1][:, first:last], hooks)])[0]
        for first, last in pairwise([0, 6, 7, 8, 9])
    ]
    assert close(torch.cat(outputs, 1), entered[3])
    assert not close(entered[3], plain[3])


def test_a_forward_without_hooks_is_left_alone() -> None:
    span = runtime()
    layer = span.layer(1)
    hooks = SessionEdits.check([edit(1)], WHOLE, HIDDEN).hooks(span)
    span.forward([StepInput(span.new_cache(32), 0, rows(3), hooks)])
    for module in (layer, layer.mlp):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


class Mixed(nn.Module):
    """Passes a part of it the rows of all sessions in another order, and another part twice."""

    def __init__(self) -> None:
        super().__init__()
        self.turned, self.twice = nn.Identity(), nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        turned: torch.Tensor = self.turned(hidden.transpose(0, 1)).transpose(0, 1)
        again: torch.Tensor = self.twice(self.twice(turned))
        return again


@pytest.mark.parametrize(("part", "why"), [("turned", "does not pass"), ("twice", "than once")])
def test_a_place_without_one_row_per_token_is_refused(part: str, why: str) -> None:
    layer = Mixed()
    hook = _Added(Site(1, part), torch.ones(HIDDEN))
    with pytest.raises(BadSteering, match=why), hooked(lambda _: layer, [(0, hook)], (2, 3)):
        layer(torch.zeros(2, 3, HIDDEN))
    assert not layer.turned._forward_hooks


def test_experts_are_no_place_and_say_so() -> None:
    span = runtime("qwen3_moe", SPAN)
    for part in ("mlp.experts", "mlp.gate"):
        hooks = SessionEdits.check([edit(1, part)], SPAN, HIDDEN).hooks(span)
        with pytest.raises(BadSteering, match=r"does not pass|cannot be followed"):
            span.forward([StepInput(span.new_cache(32), 0, rows(3), hooks)])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama", layers=4)


async def test_the_second_session_of_a_spot_check_is_steered_too(
    directory: Path, tmp_path: Path
) -> None:
    shard = {"directory": str(directory), "model_id": MODEL, "layers": str(SPAN), "dtype": "fp32",
             "advertise_host": "127.0.0.1"}  # fmt: skip
    edits = [edit(1), edit(2, "mlp"), edit(3)]  # the last is another hop's
    entered = hidden_states(load(directory), rows(7), edits)
    async with secure.hosting(tmp_path / "cache", shard) as host:
        (hosted,) = host.shards.values()
        options = AskerOptions("fp32", "cpu", 1, tmp_path / "cache")
        asker, _ = await asyncio.to_thread(load_asker, directory, MODEL, options)
        terms = SessionTerms(MODEL, asker.weights_sha256, 32, WireDtype.FP32, tuple(edits))
        lines = HopLinks(secure.dial)
        line = await lines.link(hosted.descriptor.host, hosted.descriptor.endpoint)
        claim = Claims().claim(key_of(hosted.descriptor))
        shadow = HopSession(RouteHop(hosted.descriptor, SPAN), line, claim, terms, Patience(20.0))
        await shadow.open()
        answer = await shadow.exchange(0, to_wire(entered[1], WireDtype.FP32))
        assert close(to_torch(answer), entered[3])
        shadow.close()
        await lines.close()
