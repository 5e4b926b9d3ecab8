"""Sampling, against Hugging Face's own generate."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mesh.pipeline.sampler import Sampler, logprob_of
from mesh.types import SamplingParams

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def ours(model: LlamaForCausalLM, params: SamplingParams, count: int) -> list[int]:
    sampler = Sampler(params, PROMPT)
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(count):
            ids.append(sampler.choose(model(torch.tensor([ids])).logits[0, -1]))
    return ids[len(PROMPT) :]


def theirs(
    model: LlamaForCausalLM, count: int, seed: int | None = None, **settings: object
) -> list[int]:
    if seed is not None:
        torch.manual_seed(seed)
    with torch.no_grad():
        out = model.generate(
            torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            max_new_tokens=count, min_new_tokens=count, pad_token_id=0, **settings,
        )  # fmt: skip
    return out[0, len(PROMPT) :].tolist()


def test_greedy_equals_generate(model: LlamaForCausalLM) -> None:
    assert ours(model, SamplingParams(), 24) == theirs(model, 24, do_sample=False)


def test_greedy_with_repetition_penalty_equals_generate(model: LlamaForCausalLM) -> None:
    plain = ours(model, SamplingParams(), 24)
    mine = ours(model, SamplingParams(repetition_penalty=1.3), 24)
    assert mine == theirs(model, 24, do_sample=False, repetition_penalty=1.3)
    assert mine != plain


@pytest.mark.parametrize("temperature", [9e-6, 1e-38, 1e-45, 5e-324])
def test_next_to_no_temperature_is_greedy(model: LlamaForCausalLM, temperature: float) -> None:
    drawn = ours(model, SamplingParams(temperature=temperature), 24)
    assert drawn == ours(model, SamplingParams(), 24)


@pytest.mark.parametrize("penalty", [0.01, 10.0])
def test_the_least_temperature_draws_with_every_allowed_penalty(penalty: float) -> None:
    params = SamplingParams(temperature=1e-5, repetition_penalty=penalty)
    logits = torch.linspace(-1000, 1000, 128)
    assert Sampler(params, list(range(128))).choose(logits) == 127


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    ],
)
def test_the_same_seed_draws_the_same_tokens_as_generate(
    model: LlamaForCausalLM, settings: dict[str, float]
) -> None:
    mine = ours(model, SamplingParams(seed=7, **settings), 24)  # type: ignore[arg-type]
    reference = {"top_k": 0, **settings}
    assert mine == theirs(model, 24, seed=7, do_sample=True, **reference)


def test_without_a_seed_two_runs_differ(model: LlamaForCausalLM) -> None:
    params = SamplingParams(temperature=1.5)
    assert ours(model, params, 32) != ours(model, params, 32)


def test_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0])
    entry = logprob_of(logits, 2, 2, lambda token: f"<{token}>")
    expected = torch.log_softmax(logits, -1)
    assert entry.logprob == pytest.approx(float(expected[2]))
    assert [(i, text) for i, text, _ in entry.top] == [(1, "<1>"), (2, "<2>")]
