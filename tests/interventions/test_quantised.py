"""Traces over shards in few bits give the numbers of the same model on one machine, in torch."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from nnsight.modeling.transformers import TransformersModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from mesh.interventions.skeleton import job_model, load_skeleton
from mesh.models.load import load_span
from mesh.shard import int4
from mesh.shard.compiled.experts import ExpertMatrices, put_blocks
from mesh.shard.compiled.formats import BlockLinear, Quant, dense_weight, quantise
from mesh.shard.compiled.latent import LatentLinear
from mesh.shard.compiled.parts import layer_parts
from mesh.shard.compiled.products import latent_rows, product_modules, quant_of
from mesh.shard.compiled.store import quantised_span
from mesh.shard.taps.borrowing import sharing
from mesh.shard.taps.session import TapLimits, TapSession
from mesh.shard.taps.tree import SpanTree
from mesh.types import LayerRange
from tests.interventions.cases import CASES, GRADIENTS, Parts
from tests.interventions.test_traces import GRADIENT_TOLERANCE
from tests.interventions.worlds import CPU, SPLITS, DirectChannel, checkpoint, equal
from tests.models.chain import aligned

WORLDS = (("llama", "int8"), ("gpt2", "int4"), ("qwen3_moe", "int4"))
HOPS = 2


@cache
def reference(family: str, quant: Quant) -> Parts:
    """nnsight over the whole model, whose layers have the weights that the codes stand for."""
    directory = checkpoint(family).directory
    module: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    aligned(module)
    put_in_blocks(module, quant)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return Parts(TransformersModel(module, task="text-generation", tokenizer=tokenizer))


def put_in_blocks(module: Any, quant: Quant) -> None:
    """Give its layers the weights that codes of so few bits stand for."""
    module.requires_grad_(False)
    base = module.base_model
    for number, layer in enumerate(base.h if hasattr(base, "h") else base.layers):
        parts = layer_parts(layer, module.config, number)
        latent = {linear: [] for _, linear in latent_rows(parts.mixer)}
        for rows, linear in latent_rows(parts.mixer):
            latent[linear].append(quantise(rows.weight, quant))
        few = {
            id(each): quant_of(name, quant)
            for name, modules in product_modules(parts).items()
            for each in modules
        }
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if child in latent:
                    setattr(parent, name, LatentLinear(*latent[child]))
                elif id(child) in few:
                    matrix = quantise(dense_weight(child), few[id(child)])
                    transposed = isinstance(child, Conv1D)
                    linear = BlockLinear(matrix, child.bias, transposed=transposed)
                    setattr(parent, name, linear)
        for matrices, *_ in product_modules(parts).values():
            if isinstance(matrices, ExpertMatrices):
                put_blocks(matrices, quantise(matrices.weight, quant))


@cache
def tree(family: str, layers: LayerRange, quant: Quant, *, packed: bool) -> SpanTree:
    loaded = load_span(checkpoint(family), layers, dtype=torch.float32, device=CPU)
    aligned(loaded.module)
    rounded = quantised_span(loaded, quant, "", None).loaded
    if packed:
        int4.to_device(rounded.module, CPU, torch.float32)
        shared = sharing(rounded)
        assert shared is not None
        rounded = shared
    return SpanTree(rounded, CPU)


@cache
def spread(family: str, quant: Quant, *, packed: bool = False) -> Parts:
    sessions = [
        TapSession(tree(family, held, quant, packed=packed), run, TapLimits())
        for run, held in SPLITS[HOPS]
    ]
    skeleton = load_skeleton(checkpoint(family), dtype=torch.float32)
    runs = [run for run, _ in SPLITS[HOPS]]
    return Parts(job_model(skeleton, DirectChannel(sessions), runs, lambda line: None))


@pytest.mark.parametrize(("family", "quant"), WORLDS)
@pytest.mark.parametrize("name", [*CASES, *GRADIENTS])
def test_values_are_those_of_one_machine(name: str, family: str, quant: Quant) -> None:
    run, tolerance = CASES.get(name), 0.0
    if run is None:
        run, tolerance = GRADIENTS[name], GRADIENT_TOLERANCE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = run(reference(family, quant))
        found = run(spread(family, quant))
    equal(found, expected, tolerance)


@pytest.mark.parametrize("name", ["every_layer", "at_boundaries"])
@pytest.mark.parametrize("family", ["qwen3_5", "minicpm3", "gemma4"])
def test_states_and_latents_are_those_of_one_machine(name: str, family: str) -> None:
    test_values_are_those_of_one_machine(name, family, "int4")


@pytest.mark.parametrize("name", ["every_layer", "at_boundaries", *GRADIENTS])
def test_what_torch_computes_in_4_bit_shows_what_its_codes_stand_for(name: str) -> None:
    run = CASES.get(name) or GRADIENTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = run(reference("gemma4", "int4"))
        found = run(spread("gemma4", "int4", packed=True))
    equal(found, expected, GRADIENT_TOLERANCE)


def test_the_weight_of_keys_and_values_of_latents_is_what_is_computed_with() -> None:
    models = [made("minicpm3", "int4").model for made in (reference, spread)]
    seen = []
    for model in models:
        with model.trace("hello"):
            weight = model.model.layers[1].self_attn.kv_b_proj.weight.save()
        seen.append(weight)
    assert torch.equal(*seen)


@pytest.mark.parametrize(("family", "packed"), [("qwen3_moe", False), ("gemma4", True)])
def test_the_weights_of_all_experts_are_not_made_dense_for_who_asks(
    family: str, packed: bool
) -> None:
    model = spread(family, "int4", packed=packed).model

    def read() -> None:
        with model.trace("hello"):
            layer = model.model.layers[1]
            experts = layer.experts if family == "gemma4" else layer.mlp.experts
            experts.gate_up_proj.sum().save()

    with pytest.raises(Exception, match="is in few bits here, one expert by itself"):
        read()
