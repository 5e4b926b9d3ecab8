"""The script that trains the built-in model: batches, attention, workers, and what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tools.builtin_model import attention
from tools.builtin_model.batching import batches, take
from tools.builtin_model.corpus import ASSISTANT, END, PAD, SPECIAL_TOKENS, USER
from tools.builtin_model.export import read_runs
from tools.builtin_model.train import Recipe, Shape, begin, train
from tools.builtin_model.workers import together

SHAPE = Shape(
    vocabulary=400, hidden=32, feed_forward=64, layers=2, heads=2, kv_heads=1, positions=2048
)
RECIPE = Recipe(
    steps=8,
    stop=5,
    step_tokens=512,
    warmup=2,
    tokenizer_texts=200,
    held_out_texts=4,
    save_every=3,
)
USER_ID, ASSISTANT_ID, END_ID, PAD_ID = map(SPECIAL_TOKENS.index, (USER, ASSISTANT, END, PAD))


def test_a_step_has_whole_texts_until_it_has_its_tokens() -> None:
    texts = iter([[7] * 10, [8] * 10, [9] * 300, [7] * 10])
    assert [len(text) for text in take(texts, 25, 128)] == [10, 10, 128]
    assert len(next(texts)) == 10


def test_every_text_has_a_row_of_its_own_and_little_padding() -> None:
    texts = [[10 + at] * length for at, length in enumerate((20, 500, 21, 480, 22, 19, 100))]
    made = batches(texts, 1200)
    rows = [row[row != PAD_ID].tolist() for batch in made for row in batch.ids]
    assert sorted(rows) == sorted(texts)
    for batch in made:
        assert batch.ids.numel() <= 1200 + batch.ids.shape[0] * 16
        assert (batch.ids != PAD_ID).float().mean() > 0.6


def test_what_the_user_says_counts_little_and_padding_never() -> None:
    said, answered = list(range(50, 90)), list(range(100, 140))
    chat = [USER_ID, *said, END_ID, ASSISTANT_ID, *answered, END_ID]
    (batch,) = batches([chat, chat[:-9]], 512)
    scored = set(batch.ids[0, 1:][batch.scored[0]].tolist())
    assert scored >= {END_ID, ASSISTANT_ID, *answered}
    assert len(scored & set(said)) == len(said) / 10
    assert PAD_ID not in batch.ids[:, 1:][batch.scored]


def test_attention_in_blocks_is_causal_attention() -> None:
    torch.manual_seed(3)
    query, key, value = (torch.randn(2, heads, 300, 16) for heads in (4, 2, 2))
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    ours, _ = attention.attend(None, query, key, value, None, scaling=0.25)
    ours_gradients = torch.autograd.grad(ours.float().square().sum(), leaves)
    exact = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.25, enable_gqa=True
    ).transpose(1, 2)
    gradients = torch.autograd.grad(exact.square().sum(), leaves)
    assert torch.allclose(ours.float(), exact, atol=0.02)
    for one, other in zip(ours_gradients, gradients, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


def test_attention_in_blocks_refuses_a_mask() -> None:
    tensor = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="without a mask"):
        attention.attend(None, tensor, tensor, tensor, torch.ones(1, 1, 4, 4), scaling=1.0)


def test_trainer_writes_a_checkpoint_that_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loss = train(tmp_path, *begin(SHAPE, RECIPE, None), RECIPE, "the command")
    assert 0 < loss < 8
    first = read_runs(tmp_path)
    again = begin(SHAPE, RECIPE, tmp_path)
    further = train(tmp_path, *again, RECIPE, "the second command", first)
    assert further < loss
    assert "the command\nthe second command\n" in (tmp_path / "README.md").read_text()
    assert [run.steps for run in read_runs(tmp_path)] == [5, 5]
    assert not list(tmp_path.glob(".*"))
    reread = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = AutoTokenizer.from_pretrained(tmp_path)("Hello!", return_tensors="pt")["input_ids"]
    assert reread(input_ids=ids).logits.shape == (1, ids.shape[1], 400)


def _train(out: Path) -> None:
    train(out, *begin(SHAPE, RECIPE, None), RECIPE, "the command")


def test_two_workers_learn_what_one_learns(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weights: list[dict[str, Any]] = []
    for count in (1, 2):
        together(count, _train, tmp_path / str(count))
        weights.append(load_file(tmp_path / str(count) / "model.safetensors"))
    for name, tensor in weights[0].items():
        difference = (tensor.float() - weights[1][name].float()).norm()
        assert difference < 0.02 * tensor.float().norm(), name
