"""The built-in model as it is shipped, the text it learned from, and the script that made it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import islice
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer

from mesh.models.builtin import checkpoint_dir
from tools.builtin_model.corpus import (
    END,
    END_OF_TEXT,
    SPECIAL_TOKENS,
    Message,
    held_out_documents,
    render,
    training_documents,
)
from tools.builtin_model.corpus.arithmetic import question
from tools.builtin_model.corpus.cast import PRONOUNS
from tools.builtin_model.corpus.facts_mesh import MESH_TOPICS
from tools.builtin_model.corpus.mixture import is_held_out
from tools.builtin_model.corpus.stories import PLOTS, tell

SIZE_LIMIT_BYTES = 12 * 10**6


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint_dir())


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint_dir(), dtype=torch.float32).eval()


def generate(model: Any, tokenizer: Any, prompt: str, limit: int) -> tuple[str, list[int]]:
    """Greedy continuation: its text, and its ids with the stop token."""
    import torch

    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=limit, do_sample=False)[0]
    new = ids[inputs["input_ids"].shape[1] :].tolist()
    return tokenizer.decode(new, skip_special_tokens=True), new


def ask(model: Any, tokenizer: Any, *turns: str, limit: int = 160) -> tuple[str, list[int]]:
    """The answer to the last of `turns`, which take turns beginning with the user."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return generate(model, tokenizer, prompt, limit)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def test_finding_the_checkpoint_does_not_import_torch() -> None:
    code = (
        "import sys; from mesh.models.builtin import checkpoint_dir; checkpoint_dir(); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_checkpoint_is_complete_and_small() -> None:
    files = {path.name: path.stat().st_size for path in checkpoint_dir().iterdir()}
    assert set(files) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training_runs.json",
    }
    assert sum(files.values()) <= SIZE_LIMIT_BYTES


def test_checkpoint_is_a_llama_that_splits_well() -> None:
    config = json.loads((checkpoint_dir() / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] >= 8
    assert config["max_position_embeddings"] >= 2048
    assert config["num_key_value_heads"] < config["num_attention_heads"]


def test_weights_are_finite_fp16() -> None:
    import torch
    from safetensors.torch import load_file

    weights = load_file(checkpoint_dir() / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())


@pytest.mark.parametrize(
    "text",
    [
        "Grüße aus Köln, straße, naïve café",
        "🔥 a fire 👩‍👩‍👧 for a family 🇩🇪",
        "你好世界。こんにちは 안녕하세요",
        "שלום नमस्ते \u202emixed\u202c",
        "tabs\tand\n\n  spaces \r\n and\u00a0more  ",
        "\x00\x7f\ufffd 0123456789 `code --flag`",
    ],
)
def test_tokenizer_returns_any_text_unchanged(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_single_ids_and_stop_generation(tokenizer: Any) -> None:
    ids = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    assert ids == list(range(len(SPECIAL_TOKENS)))
    settings = json.loads((checkpoint_dir() / "generation_config.json").read_text())
    assert set(settings["eos_token_id"]) == set(tokenizer.convert_tokens_to_ids([END, END_OF_TEXT]))


def test_chat_template_writes_what_the_model_was_trained_on(tokenizer: Any) -> None:
    messages = [
        Message("system", "Be brief."),
        Message("user", "Hello!"),
        Message("assistant", "Hi!"),
        Message("user", "What is 1 + 1?"),
    ]
    plain = [{"role": m.role, "content": m.content} for m in messages]
    written = tokenizer.apply_chat_template(plain, tokenize=False)
    assert written == render(messages)
    prompted = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert prompted == written + "<|assistant|>\n"


def test_says_what_hearthnet_is(model: Any, tokenizer: Any) -> None:
    text, ids = ask(model, tokenizer, "What is hearthnet?")
    assert {"mesh", "machines", "layers"} <= set(words(text))
    assert text.startswith("Hearthnet ")
    assert text.endswith(".")
    assert ids[-1] == tokenizer.convert_tokens_to_ids(END)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("How do I start hearthnet?", "hearthnet up"),
        ("what happens if a machine goes offline", "The answer goes on"),
        ("Who are you?", "language model"),
    ],
)
def test_answers(model: Any, tokenizer: Any, asked: str, expected: str) -> None:
    text, ids = ask(model, tokenizer, asked)
    assert expected in text
    assert ids[-1] == tokenizer.convert_tokens_to_ids(END)


def test_follows_up_on_what_was_said_before(model: Any, tokenizer: Any) -> None:
    first, _ = ask(model, tokenizer, "What is hearthnet?")
    second, ids = ask(model, tokenizer, "What is hearthnet?", first, "Tell me more.")
    (topic,) = (topic for topic in MESH_TOPICS if "What is hearthnet?" in topic.questions)
    assert second in topic.more
    assert ids[-1] == tokenizer.convert_tokens_to_ids(END)


def test_adds_small_numbers(model: Any, tokenizer: Any) -> None:
    text, _ = ask(model, tokenizer, "What is 2 plus 3?")
    assert text == "2 plus 3 is 5."


def test_story_keeps_its_hero(model: Any, tokenizer: Any) -> None:
    start = "Once upon a time, there was a brave fox named Lily. She lived near a quiet lake."
    text, _ = generate(model, tokenizer, start, 120)
    assert "Lily" in text


def test_continues_a_story_with_words_it_knows(model: Any, tokenizer: Any) -> None:
    known = {w for d in islice(training_documents(0), 3000) for w in words(d.text)}
    start = "Once upon a time, there was a brave fox named Lily. She lived near a quiet lake."
    text, _ = generate(model, tokenizer, start, 160)
    told = words(text)
    assert len(told) > 40
    assert sum(word in known for word in told) >= 0.97 * len(told)
    # A model that is stuck repeats itself; a story does not.
    assert len(set(told)) > 0.4 * len(told)


def test_stays_readable_past_five_hundred_tokens(model: Any, tokenizer: Any) -> None:
    history = [
        turn for n in range(40) for turn in (f"What is {n} plus 1?", f"{n} plus 1 is {n + 1}.")
    ]
    text, ids = ask(model, tokenizer, *history, "What is a shard?")
    assert len(tokenizer(" ".join(history))["input_ids"]) > 500
    assert "layers" in text
    assert ids[-1] == tokenizer.convert_tokens_to_ids(END)


def test_held_out_loss_is_what_the_card_says(model: Any) -> None:
    from tools.builtin_model.evaluate import held_out_loss

    card = (checkpoint_dir() / "README.md").read_text()
    match = re.search(r"held-out loss \(nats per token\) \| ([0-9.]+)", card)
    assert match is not None
    raw = Tokenizer.from_file(str(checkpoint_dir() / "tokenizer.json"))
    measured = held_out_loss(model, raw, held_out_documents(240))
    assert measured == pytest.approx(float(match[1]), rel=0.01)


def test_corpus_repeats_for_a_seed_and_differs_between_seeds() -> None:
    first = list(islice(training_documents(7), 200))
    assert first == list(islice(training_documents(7), 200))
    assert first != list(islice(training_documents(8), 200))
    assert held_out_documents(12) == held_out_documents(12)


def test_held_out_texts_are_never_trained_on() -> None:
    assert all(is_held_out(d) for d in held_out_documents(60))
    assert not any(is_held_out(d) for d in islice(training_documents(1), 2000))


def test_stories_leave_no_slot_open_and_use_one_pronoun_for_the_hero() -> None:
    rng = Random(3)
    seen = set()
    for _ in range(600):
        story = tell(rng)
        seen.add(story.plot.name)
        spoken = [story.text, story.summary, story.wish, *(s for q in story.questions for s in q)]
        assert not any(re.search(r"[{}|]|  |\ba [aeiou]", text) for text in spoken)
        genders = {person.gender for person in (story.cast.hero, story.cast.friend)}
        assert genders == set(PRONOUNS)
    assert seen == {plot.name for plot in PLOTS}


def test_sums_in_the_corpus_are_true() -> None:
    rng = Random(5)
    signs = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    checked = 0
    for _ in range(500):
        _, said = question(rng)
        match = re.match(r"(\d+) (plus|minus|times) (\d+) is (\d+)\.", said)
        if match:
            checked += 1
            assert signs[match[2]](int(match[1]), int(match[3])) == int(match[4])
    assert checked > 300
