"""Sampling, against Hugging Face's own generate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mesh.errors import InternalError
from mesh.models.candidates import candidates_of
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


def theirs(model: LlamaForCausalLM, count: int, **settings: object) -> list[int]:
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


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.6},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "repetition_penalty": 1.4},
    {"temperature": 0.8, "top_k": 20, "repetition_penalty": 0.6},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.9, "logit_bias": ((3, -100.0), (79, 2.5), (80, 1.5)), "top_k": 10},
]
GREEDY = [{"repetition_penalty": 1.3}, {"repetition_penalty": 0.7}]


def rows(count: int, vocab: int = 500) -> Iterator[torch.Tensor]:
    """From nearly even to nearly sure, some with many equal logits, some with impossible ones."""
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        row = torch.randn(vocab, generator=generator) * 2.0 ** (number % 6 - 1)
        if number % 3 == 1:
            row = row.round()
        if number % 5 == 2:
            row[::7] = -math.inf
        yield row


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_numbers_evenly_apart_draw_each_token_as_often_as_hugging_face_would(
    settings: dict[str, Any],
) -> None:
    draws, params = 512, SamplingParams(**settings)
    for row in rows(6):
        counts = torch.zeros(len(row))
        for number in range(draws):  # each as the first token after the prompt
            share = (number + 0.5) / draws
            counts[Sampler(params, PROMPT, lambda share=share: share).choose(row)] += 1
        expected = distribution(row, settings)
        assert (counts - draws * expected).abs().max() <= 1.001


def distribution(row: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """(vocab,): what `generate` draws from."""
    kinds = {
        "logit_bias": _added,
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    scores = row.unsqueeze(0)
    for name, kind in kinds.items():
        if name in settings:
            scores = kind(settings[name])(torch.tensor([PROMPT]), scores)
    return scores[0].softmax(-1)


def _added(bias: tuple[tuple[int, float], ...]) -> LogitsProcessor:
    return SequenceBiasLogitsProcessor({(token,): value for token, value in bias})


PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -2.0},
    {"frequency_penalty": -0.3, "repetition_penalty": 1.2},
    {"presence_penalty": 0.6, "frequency_penalty": 0.4, "logit_bias": ((3, 4.0), (5, -7.0))},
    {"presence_penalty": -1.0, "frequency_penalty": 0.2, "repetition_penalty": 0.8},
]
DRAWN: list[dict[str, Any]] = [{}, {"temperature": 0.9, "top_k": 12, "top_p": 0.95, "seed": 1}]


@pytest.mark.parametrize("drawn", DRAWN, ids=str)
@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties_are_for_what_the_answer_has(
    penalties: dict[str, Any], drawn: dict[str, Any]
) -> None:
    """OpenAI's formula, and vLLM's order. Some rows are near enough to even for the penalties to
    decide."""
    ours, theirs = SamplingParams(**penalties, **drawn), SamplingParams(**drawn)
    by_rule, by_hand = Sampler(ours, PROMPT), Sampler(theirs, PROMPT)
    said: list[int] = []
    told = changed = 0
    for row in rows(120):
        expected = row.clone().unsqueeze(0)
        if bias := penalties.get("logit_bias"):
            expected = _added(bias)(torch.tensor([PROMPT]), expected)
        factor = penalties.get("repetition_penalty", 1.0)
        rule = RepetitionPenaltyLogitsProcessor(factor)
        expected = rule(torch.tensor([PROMPT + said]), expected)[0]
        times = torch.bincount(torch.tensor(said, dtype=torch.long), minlength=len(row))
        expected = expected - penalties.get("frequency_penalty", 0.0) * times
        expected = expected - penalties.get("presence_penalty", 0.0) * (times > 0)
        token = by_rule.choose_among(candidates_of(row))
        told += token is not None
        said.append(by_rule.choose_from(row) if token is None else token)
        assert said[-1] == by_hand.choose(expected)
        changed += not drawn and said[-1] != int(row.argmax())
    assert told > 5
    assert drawn or changed > 3


@pytest.mark.parametrize("settings", SETTINGS + GREEDY + PENALTIES, ids=str)
def test_the_strongest_tell_what_the_whole_row_does_or_that_they_cannot(
    settings: dict[str, Any],
) -> None:
    for seed, row in enumerate(rows(240)):
        params = SamplingParams(seed=seed, **settings)
        told = Sampler(params, PROMPT).choose_among(candidates_of(row))
        assert told in (None, Sampler(params, PROMPT).choose_from(row))


USUAL = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1},
    {"repetition_penalty": 1.3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "presence_penalty": 1.5},
]


@pytest.mark.parametrize("settings", USUAL, ids=str)
def test_the_strongest_nearly_always_tell_where_few_tokens_are_likely(
    settings: dict[str, Any],
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(32000, generator=generator) * 1.5 for _ in range(40)]
    for row in logits:
        row[torch.randint(32000, (30,), generator=generator)] += torch.linspace(3, 14, 30)
    told = sum(
        Sampler(SamplingParams(seed=seed, **settings), PROMPT).choose_among(candidates_of(row))
        is not None
        for seed, row in enumerate(logits)
    )
    assert told >= 34, told


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.4),
        SamplingParams(temperature=0.8, repetition_penalty=0.7, top_k=7, seed=0),
        SamplingParams(temperature=1.3, top_p=0.8, seed=0),
        SamplingParams(frequency_penalty=1.5, logit_bias=((7, 3.0),)),
        SamplingParams(temperature=0.9, top_k=500, min_p=0.02, seed=0),
    ],
)
@pytest.mark.parametrize("few", [1, 3, 40, 300])
def test_what_is_not_allowed_has_no_chance(params: SamplingParams, few: int) -> None:
    """As if its logits were minus infinity, which they are for Hugging Face's processors."""
    generator = torch.Generator().manual_seed(few)
    prompt, said = list(range(0, 400, 7)), set[int]()
    bounded, masked = Sampler(params, prompt), Sampler(params, prompt)
    for _ in range(60):
        row = torch.randn(400, generator=generator) * 3
        allowed = torch.zeros(448, dtype=torch.bool)  # a tokenizer may have more than the model
        allowed[torch.randperm(400, generator=generator)[:few]] = True
        token = bounded.choose(row, None, allowed.numpy())
        assert token == masked.choose(row.masked_fill(~allowed[:400], -math.inf))
        assert allowed[token]
        said.add(token)
        kept = Sampler(params, prompt).choose_among(candidates_of(row), allowed.numpy())
        assert kept is None or allowed[kept]
    assert len(said) > 1


def test_a_row_that_is_not_finite_is_an_error() -> None:
    for value in (math.inf, math.nan):
        row = torch.zeros(1000)
        row[3] = value
        sampler = Sampler(SamplingParams(temperature=1.0), PROMPT)
        with pytest.raises(InternalError, match="not finite"):
            sampler.choose(row)


def test_every_seed_draws_its_own_tokens_again(model: LlamaForCausalLM) -> None:
    drawn = {
        seed: ours(model, SamplingParams(temperature=1.5, seed=seed), 16) for seed in (-7, 0, 7)
    }
    assert len({tuple(ids) for ids in drawn.values()}) == 3
    assert drawn[-7] == ours(model, SamplingParams(temperature=1.5, seed=-7), 16)


def test_without_a_seed_two_runs_differ(model: LlamaForCausalLM) -> None:
    params = SamplingParams(temperature=1.5)
    assert ours(model, params, 32) != ours(model, params, 32)


def test_logprobs_are_the_models_own() -> None:
    row = torch.randn(200, generator=torch.Generator().manual_seed(0))
    expected = torch.log_softmax(row, -1)
    order = row.argsort(descending=True).tolist()
    for token in (order[0], order[20], order[199]):
        entry = logprob_of(candidates_of(row), token, 2, lambda token: f"<{token}>".encode(), row)
        assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-6)
        assert [(i, text) for i, text, _ in entry.top] == [
            (i, f"<{i}>".encode()) for i in order[:2]
        ]
        values = [value for _, _, value in entry.top]
        assert values == pytest.approx(expected[order[:2]].tolist(), abs=1e-6)
