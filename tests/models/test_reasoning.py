"""What a model thinks aloud is kept apart from its answer, however its text is cut into tokens."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from mesh.models.manifest import read_manifest
from mesh.models.reasoning import ReasoningMarks, Thoughts
from mesh.models.tokenizer import Tokenizer
from mesh.pipeline.checkpoint import CheckpointText
from mesh.pipeline.completion import Completion, thoughts_of
from mesh.types import GenerationRequest, ModelId, SamplingParams
from tests.checkpoints import make_tokenizer
from tests.models.conftest import Checkpoint

MARKS = ReasoningMarks("<think>", "</think>")


def split(pieces: list[str], *, open_already: bool = False) -> tuple[str, str]:
    thoughts = Thoughts(MARKS, open_already=open_already)
    parts = [*(thoughts.push(None, piece) for piece in pieces), thoughts.flush()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("text", "open_already", "expected"),
    [
        ("<think>\nwhy\n\nso</think>\n\nhi", False, ("why\n\nso", "hi")),
        ("\n <think>why</think>hi", False, ("why", "hi")),
        ("\nwhy</think>hi", True, ("why", "hi")),
        ("why <thi", True, ("why <thi", "")),
        ("<think>never closed </th", False, ("never closed </th", "")),
        ("<thin ice", False, ("", "<thin ice")),
        ("<think", False, ("", "<think")),
        ("say <think>x</think>", False, ("", "say <think>x</think>")),
        ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        ("<think></think>\n\n", False, ("", "")),
        ("  plain", False, ("", "  plain")),
        ("", False, ("", "")),
    ],
)
@given(data=st.data())
def test_the_parts_do_not_depend_on_where_the_text_is_cut(
    text: str, open_already: bool, expected: tuple[str, str], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    bounds = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert split(pieces, open_already=open_already) == expected


def test_reasoning_is_told_before_it_ends() -> None:
    thoughts = Thoughts(MARKS, open_already=False)
    said = [thoughts.push(None, piece) for piece in ("<think>", "\n", "one ", "two <", "b")]
    assert said == [("", ""), ("", ""), ("one ", ""), ("two ", ""), ("<b", "")]


def _text(directory: Path, template: str, *, special: bool) -> CheckpointText:
    tokenizer = make_tokenizer.__wrapped__(384, sentencepiece=False)
    marks = [AddedToken(mark, special=special) for mark in (MARKS.opening, MARKS.closing)]
    tokenizer.add_tokens(marks, special_tokens=special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return CheckpointText(Tokenizer.load(read_manifest(directory)), 512)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("opened", [False, True])
def test_an_answer_through_a_real_tokenizer(
    checkpoint: Checkpoint, tmp_path: Path, special: bool, opened: bool
) -> None:
    directory = shutil.copytree(checkpoint("llama", layers=3), tmp_path / "thinker")
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    template = "{{ messages[-1]['content'].split('</think>')[-1] }}\n" + (
        "<think>\n" if opened else "{# <think> #}"
    )
    text = _text(directory, template, special=special)
    ask = GenerationRequest(
        "r", ModelId("m"), messages=({"role": "user", "content": "hello"},),
        sampling=SamplingParams(stop=("STOP",)),
    )  # fmt: skip
    prompt = text.prompt_ids(ask, None)
    start = "" if opened else "<think>\n"
    ids = text.prompt_ids(
        GenerationRequest(
            "r", ModelId("m"), prompt=f"{start}the STOP rain</think>\n\nGrüße STOP x"
        ),
        None,
    )
    ids = [token for token in ids if token not in {1}]
    answer = Completion(text, ask, prompt, 99, 0.0)
    deltas = []
    for token in ids:
        deltas.append(answer.take(token, torch.zeros(512)))
        if answer.finish_reason:
            break
    assert "".join(delta.reasoning for delta in deltas) == "the STOP rain"
    assert "".join(delta.text for delta in deltas) == "Grüße "
    assert answer.finish_reason == "stop"


def test_nothing_is_split_without_marks_in_the_template_nor_in_a_continued_text(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = shutil.copytree(checkpoint("llama", layers=3), tmp_path / "plain")
    chat = GenerationRequest("r", ModelId("m"), messages=({"role": "user", "content": "hello"},))
    plain = CheckpointText(Tokenizer.load(read_manifest(directory)), 512)
    assert thoughts_of(plain, chat, [5]) is None
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    marked = _text(directory, "{# <think> </think> #}x", special=False)
    assert thoughts_of(marked, chat, [5]) is not None
    assert thoughts_of(marked, GenerationRequest("r", ModelId("m"), prompt="x"), [5]) is None
