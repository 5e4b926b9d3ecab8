"""A model whose layers keep a running state, over three nodes: as on one machine, whoever dies.

The nodes serve it from a GGUF file, and Hugging Face runs the checkpoint that it was made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nnsight.modeling import huggingface
from nnsight.modeling.transformers import TransformersModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf
from tests.mesh_e2e.conftest import StartNode, starter
from tests.mesh_e2e.spread import hugging_face
from tests.mesh_e2e.test_losing_nodes import serving, stream
from tests.ndif import client
from tests.waiting import wait_until

PROMPT = [5 + (7 * i) % 300 for i in range(300)]
COUNT = 120

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class House:
    """Who asks, and who holds which layers: the middle ones two."""

    def __init__(self, start: StartNode, directory: Path, file: Path) -> None:
        self.directory = directory
        held = {"attic": "0-1", "barn": "2-3", "cellar": "2-3", "study": "4-5"}
        model = f"{file}=qwen"
        self.nodes = {
            name: start(name, "--model", model, "--layers", layers, "--dtype", "fp32")
            for name, layers in held.items()
        }
        self.asker = start("sofa", "--model", model, "--layers", "none", "--dtype", "fp32")
        self.asker.wait_ready()
        wait_until(lambda: serving(self.asker) == set(held))

    def said(self, prompt: list[int], count: int = COUNT) -> list[int]:
        """What Hugging Face says."""
        return hugging_face(self.directory, prompt, count)[0]

    def kill_the_middle(self) -> None:
        route = self.asker.get("/mesh/v1/status")["generations"][0]["route"]
        self.nodes[route[1]["node"]].kill()

    def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        """The ids of an answer, and how many tokens of the prompt were there already."""
        said = self.asker.post("/v1/completions", self.order(prompt)).json()
        assert len(said["hearthnet"]["route"]) == 3
        assert said["hearthnet"]["failovers"] == 0
        cached: int = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        return said["hearthnet"]["token_ids"], cached

    @staticmethod
    def order(prompt: list[int]) -> dict[str, Any]:
        """Of the greedy answer to it."""
        return {
            "model": "qwen", "prompt": prompt, "max_tokens": COUNT, "temperature": 0,
            "ignore_eos": True, "wire_dtype": "fp32", "fallback_to_local": False,
        }  # fmt: skip


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made = tmp_path_factory.mktemp("made")
    directory = make_checkpoint(made / "qwen", "qwen3_5", layers=6, linear_num_value_heads=6)
    file = write_gguf(directory, made / "qwen.gguf")
    with starter(tmp_path_factory.mktemp("nodes")) as start:
        yield House(start, directory, file)


def test_a_chat_goes_on_where_it_was_and_where_its_last_answer_is_left_out(house: House) -> None:
    ids, cached = house.ask(PROMPT)
    assert (ids, cached) == (house.said(PROMPT), 0)
    second = [*PROMPT, *ids, *range(20, 60)]
    answer, cached = house.ask(second)
    assert (answer, cached) == (house.said(second), len(PROMPT) + COUNT - 1)
    # As templates do that leave out what was thought.
    third = [*second[:-3], *range(70, 90)]
    answer, cached = house.ask(third)
    assert (answer, cached) == (house.said(third), len(second) - 3)
    # Another text that begins alike: as far as hops have states.
    fourth = [*PROMPT[:280], *range(100, 130)]
    answer, cached = house.ask(fourth)
    assert answer == house.said(fourth)
    # One that leaves out more than hops can go back to is none that they have lost.
    long = [5 + (11 * i) % 300 for i in range(700)]
    house.ask(long)
    fifth = [*long[:450], *range(60, 90)]
    answer, cached = house.ask(fifth)
    assert (answer, cached) == (house.said(fifth), 0)


def test_a_clients_trace_gives_the_numbers_of_one_machine(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: Any = AutoModelForCausalLM.from_pretrained(house.directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(house.directory)
    local = TransformersModel(whole, task="text-generation", tokenizer=tokenizer)
    client.configure(monkeypatch, HOST=house.asker.url, APIKEY=house.asker.record.api_key)
    monkeypatch.setitem(huggingface._ID_CACHE, str(house.directory), "qwen")
    model = TransformersModel(str(house.directory), task="text-generation")
    with model.trace("The kettle sings", remote=True):
        hidden = model.model.layers[1].output.save()
        model.model.layers[3].linear_attn.output[:] = 0.0
        after = model.model.layers[5].output.save()
        cache = model.output.past_key_values.save()
    with local.trace("The kettle sings"):
        here = local.model.layers[1].output.save()
        local.model.layers[3].linear_attn.output[:] = 0.0
        after_here = local.model.layers[5].output.save()
        cache_here = local.output.past_key_values.save()
    torch.testing.assert_close(hidden, here, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after, after_here, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(cache.layers, cache_here.layers, strict=True):
        assert type(ours) is type(theirs)
        if hasattr(theirs, "keys"):
            torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
            continue
        for name in ("conv_states", "recurrent_states"):
            states, expected = getattr(ours, name), getattr(theirs, name)
            torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
        assert ours.has_previous_state == theirs.has_previous_state


def test_a_clients_generation_gives_the_tokens_of_one_machine(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.configure(monkeypatch, HOST=house.asker.url, APIKEY=house.asker.record.api_key)
    monkeypatch.setitem(huggingface._ID_CACHE, str(house.directory), "qwen")
    model = TransformersModel(str(house.directory), task="text-generation")
    tokenizer = AutoTokenizer.from_pretrained(house.directory)
    prompt = tokenizer("The kettle sings")["input_ids"]
    with model.generate("The kettle sings", max_new_tokens=6, do_sample=False, remote=True):
        said = model.generator.output.save()
    assert said[0].tolist()[len(prompt) :] == house.said(prompt, 6)


def test_the_answer_is_the_same_when_the_node_in_its_middle_is_killed(house: House) -> None:
    prompt = PROMPT[13:]
    facts, _, ids, _ = stream(house.asker, COUNT // 2, house.kill_the_middle, **house.order(prompt))
    assert (ids, facts["failovers"]) == (house.said(prompt), 1)
