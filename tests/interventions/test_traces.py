"""Every kind of trace, on the whole model and over hops of overlapping shards: the same numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch

from mesh.errors import BadRequest
from mesh.interventions.hooks import RemoteLayerError
from tests.interventions.cases import CASES, GRADIENTS, PROMPT, Parts
from tests.interventions.worlds import WITH_IMAGES, Remote, equal, module_of, remote, whole

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "gemma3", "qwen3_moe")
GRADIENT_TOLERANCE = 1e-4


@cache
def reference(family: str) -> Parts:
    return Parts(whole(family))


@cache
def spread(family: str, hops: int) -> tuple[Parts, Remote]:
    world = remote(family, hops)
    return Parts(world.model), world


OTHER_NUMBERS_OF_HOPS = (
    "every_layer", "edit_in_place", "skip_batched", "generate_iter", "generate_beams",
    "source_recursive", "cache_everything", "session", "attentions", "of_the_residual",
    "across_a_session", "batched",
)  # fmt: skip


WITH_STATES = (
    "edit_in_place", "skip_batched", "generate_iter", "session", "of_the_residual", "batched",
    "through_replacements", "attribution_patching",
)  # fmt: skip
WITH_SCORES = (
    "replace_output", "edit_in_place", "skip_mlp", "modules_called_by_hand", "source_recursive",
    "attentions", "edited", "batched", "through_a_skip", "attribution_patching",
)  # fmt: skip
INSIDE_A_WHOLE = (
    "every_layer", "batch_with_padding", "generate_iter", "generate_past_the_window", "source_read",
    "source_of_the_loop", "edited_model", "attentions", "of_the_residual",
)  # fmt: skip
WITH_KEYS_OF_OTHERS = (
    "every_layer", "keyword_inputs", "edit_in_place", "generate_beams", "cache_cut_short",
    "source_of_the_loop", "attentions", "session", "of_the_residual", "through_replacements",
    "attribution_patching",
)  # fmt: skip
WITH_STREAMS = (
    "keyword_inputs", "edit_in_place", "generate_beams", "cache_cut_short", "session", "attentions",
    "of_the_residual", "attribution_patching",
)  # fmt: skip
WITH_INDEXERS = (
    "every_layer", "generate_iter", "generate_beams", "cache_cut_short", "batch_with_padding",
    "attentions", "session", "of_the_residual",
)  # fmt: skip
WITH_A_SHARED_CHOICE = (
    "every_layer", "long_prompt", "batch_with_padding", "generate_iter", "generate_beams",
    "cache_cut_short", "skip_mlp", "attentions", "session",
    "of_hidden_states", "attribution_patching",
)  # fmt: skip
OF_TUPLES = ("every_layer", "hidden_states", "generate_beams", "of_hidden_states")
ELSEWHERE = (
    *(("qwen3_5", 2, name) for name in WITH_STATES),
    *(("gpt_oss", 3, name) for name in WITH_SCORES),
    *((WITH_IMAGES, 3, name) for name in INSIDE_A_WHOLE),
    *((family, 3, name) for family in ("bamba", "falcon_h1") for name in OF_TUPLES),
    *(("gemma4_e", 2, name) for name in WITH_KEYS_OF_OTHERS),
    *(("gemma3n", 2, name) for name in WITH_STREAMS),
    *(("axk2", 2, name) for name in WITH_INDEXERS),
    *(("glm_moe_dsa_shared", 2, name) for name in WITH_A_SHARED_CHOICE),
    ("lfm2", 3, "generate_by_prompt_lookup"),
)
"""What is different in layers with running states, where an MLP or a layer gives more than a
tensor, where layers take more than hidden states, or several for each position, and where text is
a part of what a model is for."""


def matrix(cases: Iterable[str]) -> list[tuple[str, str, int]]:
    """Every case and family over three hops; some also over one, two and four, and `ELSEWHERE`."""
    few = [("llama", 1), ("gpt2", 2), ("qwen3", 4), ("gemma4", 3)]
    three = [(family, 3) for family in FAMILIES]
    return [
        (name, family, hops)
        for name in cases
        for family, hops in (
            *three,
            *(few if name in OTHER_NUMBERS_OF_HOPS else []),
            *((family, hops) for family, hops, found in ELSEWHERE if found == name),
        )
    ]


def compare(run: Callable[[Parts], Any], family: str, hops: int, tolerance: float) -> None:
    parts, world = spread(family, hops)
    with warnings.catch_warnings():
        # What transformers and nnsight say about generation settings is not the subject.
        warnings.simplefilter("ignore")
        expected = run(reference(family))
        found = run(parts)
    equal(found, expected, tolerance)
    assert world.log == []  # no layer ran in the job


@pytest.mark.parametrize(("name", "family", "hops"), matrix(CASES))
def test_values_are_those_of_one_machine(name: str, family: str, hops: int) -> None:
    compare(CASES[name], family, hops, 0.0)


@pytest.mark.parametrize(("name", "family", "hops"), matrix(GRADIENTS))
def test_gradients_are_those_of_one_machine(name: str, family: str, hops: int) -> None:
    compare(GRADIENTS[name], family, hops, GRADIENT_TOLERANCE)


def test_what_layers_choose_for_the_next_ones_is_read_and_replaced() -> None:
    def choice(parts: Parts) -> Any:
        seen, taken = parts.layers[2], parts.layers[3]
        with parts.model.trace(torch.arange(10, 50).unsqueeze(0)):
            chosen = seen.output[1].save()
            seen.output = (seen.output[0], chosen.flip(1).clamp(max=3))
            given = taken.inputs[1]["prev_topk_indices"].save()
            out = parts.model.output.logits.save()
        return chosen, given, out

    compare(choice, "glm_moe_dsa_shared", 2, 0.0)


@pytest.mark.parametrize("hops", [1, 4])
def test_a_span_nobody_looks_into_takes_one_message_as_in_plain_chat(hops: int) -> None:
    world = remote("llama", hops)
    CASES["logits"](Parts(world.model))
    assert world.channel.messages == hops
    world.model.generate(PROMPT, max_new_tokens=4, do_sample=False)
    assert world.channel.messages == hops + hops * 4
    with world.model.trace(PROMPT):
        Parts(world.model).layers[0].output.save()
    assert world.channel.messages == hops + hops * 4 + hops + 1


def test_a_model_for_images_has_the_parts_that_it_has_at_the_client() -> None:
    """A request names all of them; those for images refuse to compute."""
    (ours, theirs) = (
        module_of(model) for model in (remote(WITH_IMAGES, 1).model, whole(WITH_IMAGES))
    )
    assert {name for name, _ in ours.named_modules()} == {n for n, _ in theirs.named_modules()}
    with pytest.raises(BadRequest, match="only text is served"):
        ours(input_ids=torch.tensor([[5]]), pixel_values=torch.zeros(1, 3, 28, 28))


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_what_a_layer_is_given_that_is_no_tensor_is_missed_by_that_layer(layer: int) -> None:
    """The first and the last of these layers hand it to another hop."""
    parts, _ = spread("llama", 3)
    missing = f"'tuple' object has no attribute 'dtype' .layer {layer + 1}, input_layernorm"
    with pytest.raises(RemoteLayerError, match=missing), parts.model.trace(PROMPT):
        parts.layers[layer].output = (parts.layers[layer].output,)  # as transformers once gave it
