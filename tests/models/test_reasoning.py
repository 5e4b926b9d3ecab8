"""What a model thinks aloud is kept apart from its answer, however its text is cut into tokens."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from mesh.models.call_forms import QWEN_TAGS
from mesh.models.calling_thoughts import CallingThoughts
from mesh.models.channels import ChannelMarks, Channels
from mesh.models.manifest import read_manifest
from mesh.models.reasoning import PartMarks, ReasoningMarks, Thoughts, marks_in
from mesh.models.splitting import Splitter
from mesh.models.tokenizer import Tokenizer
from mesh.pipeline.checkpoint import CheckpointText
from mesh.pipeline.completion import Completion, thoughts_of
from mesh.types import GenerationRequest, ModelId, SamplingParams, ToolUse
from tests.checkpoints import make_tokenizer
from tests.models.conftest import Checkpoint

MARKS = ReasoningMarks("<think>", "</think>")


GEMMA = ReasoningMarks("<|channel>", "<channel|>", label="thought")
COHERE = ReasoningMarks(
    "<|START_THINKING|>", "<|END_THINKING|>", frame=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
)
OPEN = ReasoningMarks("<think:opensource>", "</think:opensource>")
TOLD = "<|tool_calls|>x<|calls|>"
APRIEL = ReasoningMarks(
    "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", frame=("", "[END FINAL RESPONSE]")
)
CALL = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"


def split(splitter: Splitter, pieces: list[str]) -> tuple[str, str]:
    parts = [*(splitter.push(piece) for piece in pieces), splitter.flush()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


def pieces_of(text: str, data: st.DataObject) -> list[str]:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


@pytest.mark.parametrize(
    ("text", "open_already", "expected"),
    [
        ("<think>\nwhy\n\nso</think>\n\nhi", False, ("why\n\nso", "hi")),
        ("\n <think>why</think>hi", False, ("why", "hi")),
        ("\nwhy</think>hi", True, ("why", "hi")),
        ("why <thi", True, ("why <thi", "")),
        ("<think>\nwhy</think>hi", True, ("why", "hi")),
        ("<thi", True, ("<thi", "")),
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
    for pieces in (pieces_of(text, data), list(text)):
        assert split(Thoughts(MARKS, open_already=open_already), pieces) == expected


@pytest.mark.parametrize(
    ("marks", "text", "expected"),
    [
        (GEMMA, "<|channel>thought\nwhy\n<channel|>hi", ("why\n", "hi")),
        (GEMMA, "<|channel>th", ("th", "")),
        (GEMMA, "<|channel>thorough<channel|>hi", ("thorough", "hi")),
        (GEMMA, "hi", ("", "hi")),
        (
            COHERE,
            "<|START_THINKING|>why<|END_THINKING|>\n<|START_RESPONSE|>\nhi <|END<|END_RESPONSE|>\n",
            ("why", "hi <|END\n"),
        ),
        (COHERE, "<|START_RESPONSE|>hi <|END_RESPONSE", ("", "hi <|END_RESPONSE")),
        (COHERE, "<|START_THINKING|>a<|END_THINKING|><|START_AC", ("a", "<|START_AC")),
        (COHERE, " hi <|START_RESPONSE|>", ("", " hi <|START_RESPONSE|>")),
        (
            APRIEL,
            "Here are my reasoning steps:\nwhy\n[BEGIN FINAL RESPONSE]\nhi [END FINAL RESPONSE]",
            ("why\n", "hi "),
        ),
    ],
)
@given(data=st.data())
def test_labels_and_frames_are_no_part_of_what_stands_in_them(
    marks: ReasoningMarks, text: str, expected: tuple[str, str], data: st.DataObject
) -> None:
    for pieces in (pieces_of(text, data), list(text)):
        assert split(marks.splitter("", is_begun=False), pieces) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>final<|message|>"
            "It is so.<|return|>",
            ("Why?", "It is so."),
        ),
        (
            f"<|channel|>analysis<|message|>Look.<|end|><|start|>assistant{CALL}{{}}<|call|>",
            ("Look.", f"{CALL}{{}}<|call|>"),
        ),
        # As the template itself writes calls of earlier turns.
        (
            ' to=functions.look<|channel|>commentary json<|message|>{"a": 1}<|call|>',
            ("", f'{CALL}{{"a": 1}}<|call|>'),
        ),
        # A preamble is for who asked; what is of one kind stands apart.
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
            "<|end|><|start|>assistant<|channel|>commentary<|message|>First:<|end|>\n<|start|>"
            "assistant<|channel|>final<|message|>c <|d<|end|>",
            ("a\n\nb", "First:\n\nc <|d"),
        ),
        # What is to no function is as its channel says.
        (
            "<|channel|>commentary to=assistant<|channel|>analysis<|message|>a<|end|><|start|>"
            "assistant<|channel|>commentary to=user<|channel|>final<|message|>b",
            ("a", "b"),
        ),
        ("<|channel|>analysis<|message|>cut <|e", ("cut <|e", "")),
        (f"{CALL}{{", ("", f"{CALL}{{")),
        ("<|channel|>final<|message|>hi<|end|><|start|>assi", ("", "hi")),
        ("<|channel|>fi", ("", "")),
        ("<|channel|>final<|message|>hi<|end|> <|return|>", ("", "hi")),
        ("<|message|>bare", ("", "bare")),
        ("<<|message|>no header", ("", "<<|message|>no header")),
        ("plain to=you <|message|> and", ("", "plain to=you <|message|> and")),
        ("<|start|>" + "no header " * 60, ("", "<|start|>" + "no header " * 60)),
        ("", ("", "")),
    ],
)
@given(data=st.data())
def test_channels_are_told_apart_however_they_are_cut(
    text: str, expected: tuple[str, str], data: st.DataObject
) -> None:
    for pieces in (pieces_of(text, data), list(text)):
        assert split(Channels(is_begun=False), pieces) == expected


@given(data=st.data())
def test_marks_in_any_order_end_and_are_read_alike_however_they_are_cut(
    data: st.DataObject,
) -> None:
    channels = [
        *ChannelMarks().tokens,
        "assistant",
        "analysis",
        " to=functions.look",
        "a",
        "<",
        "\n",
    ]
    pairs = [*COHERE.tokens, *GEMMA.tokens, GEMMA.label, "a", "<|", "\n"]
    special = replace(GEMMA, unseen={7: GEMMA.opening, 8: GEMMA.closing})
    for bits, marks in (
        (channels, ChannelMarks()), (pairs, COHERE), (pairs, GEMMA), (pairs, special),
    ):  # fmt: skip
        text = "".join(data.draw(st.lists(st.sampled_from(bits), max_size=9)))
        whole = split(marks.splitter("", is_begun=False), [text])
        for pieces in (pieces_of(text, data), list(text)):
            assert split(marks.splitter("", is_begun=False), pieces) == whole


def test_channels_are_told_as_they_come_and_an_answer_that_has_begun_goes_on() -> None:
    channels = ChannelMarks().splitter("", is_begun=False)
    said = [channels.push(piece) for piece in ("<|channel|>", "analysis", "<|message|>", "a", "b")]
    assert said == [("", ""), ("", ""), ("", ""), ("a", ""), ("b", "")]
    assert split(ChannelMarks().splitter("", is_begun=True), ["on ", "it"]) == ("", "on it")
    unread = ChannelMarks().splitter("", is_begun=False, calls=False)
    assert split(unread, [f"{CALL}{{}}<|call|>"]) == ("", "{}")


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        ("{{ x.split('</think>') }}<think>", MARKS),
        ("<|channel|>analysis<|message|>{{ x }}<|end|>", ChannelMarks()),
        ("'<|channel>thought\\n<channel|>'", GEMMA),
        ("<|START_THINKING|><|END_THINKING|><|START_RESPONSE|><|END_RESPONSE|>", COHERE),
        (
            "after 'Here is my thought process:' and 'Here is my response:'",
            ReasoningMarks("Here is my thought process:", "Here is my response:"),
        ),
        (
            "between <think></think> and between <response></response>",
            ReasoningMarks("<think>", "</think>", frame=("<response>", "</response>")),
        ),
        ("{{ x.split('</think>')[-1] }}<｜Assistant｜>", MARKS),
        ("<|im_start|>assistant\\n<think>", MARKS),
        ("set t = ':opensource' '</think{}>'.format(t)", OPEN),
        ("'<|begin|>assistant<|think|>' + x + '<|end|>'", PartMarks()),
        ("say 'Here is my response:'", None),
        (
            "{{ x.split('<answer>')[-1].strip('</answer>') }}<think>\\n\\n</think>",
            ReasoningMarks("<think>", "</think>", frame=("<answer>", "</answer>")),
        ),
        ("Here are my reasoning steps:\\n [BEGIN FINAL RESPONSE] [END FINAL RESPONSE]", APRIEL),
        ("<|start|>assistant<|channel|>final<|message|>", None),
    ],
)
def test_marks_are_known_by_the_template(template: str, marks: object) -> None:
    assert marks_in(template) == marks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|think|>why<|end|><|begin|>assistant<|content|>hi<|flush|>", ("why", "hi")),
        ("<|think|>why<|end|><|begin|>assistant<|tool_calls|>x<|calls|>", ("why", TOLD)),
        (
            "<|content|>I look.<|end|><|begin|>assistant<|tool_calls|>x<|calls|>",
            ("", f"I look.{TOLD}"),
        ),
        ("<|content|>hi<|end|><|begin|>assis", ("", "hi")),
        ("<|think|>why <|en", ("why <|en", "")),
        ("hi <|thi", ("", "hi <|thi")),
        ("", ("", "")),
    ],
)
@given(data=st.data())
def test_parts_are_told_apart_by_their_heads(
    text: str, expected: tuple[str, str], data: st.DataObject
) -> None:
    for pieces in (pieces_of(text, data), list(text)):
        assert split(PartMarks().splitter("", is_begun=False), pieces) == expected


def test_what_ends_a_thought_ends_no_answer(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("llama", layers=3), tmp_path / "parts")
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = make_tokenizer.__wrapped__(384, sentencepiece=False)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in PartMarks().tokens], True)
    tokenizer.chat_template = (
        "{% for m in messages %}<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|begin|>assistant{% endif %}"
        "{# <|begin|>assistant<|think|> #}"
    )
    tokenizer.save_pretrained(directory)
    read = Tokenizer.load(read_manifest(directory))
    assert read.id_of("<|end|>") not in read.eos_ids
    ids = read.encode_chat([{"role": "user", "content": "hi"}], begun="So")
    shown = "<|begin|>user<|content|>hi<|end|><|begin|>assistant<|content|>So"
    assert tokenizer.decode(ids) == shown


def test_reasoning_is_told_before_it_ends() -> None:
    thoughts = Thoughts(MARKS, open_already=False)
    said = [thoughts.push(piece) for piece in ("<think>", "\n", "one ", "two <", "b")]
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
    assert thoughts_of(plain, chat, [5])[0] is None
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    marked = _text(directory, "{# <think> </think> #}x", special=False)
    assert thoughts_of(marked, chat, [5])[0] is not None
    assert thoughts_of(marked, GenerationRequest("r", ModelId("m"), prompt="x"), [5])[0] is None


CALL_OF_QWEN = "<tool_call>\n<function=look>\n<parameter=city>\nKöln\n</parameter>\n</function>\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"I look.\n{CALL_OF_QWEN}</tool_call>", ("I look.\n", f"{CALL_OF_QWEN}</tool_call>")),
        (f"why</think>{CALL_OF_QWEN}", ("why", CALL_OF_QWEN)),
        (f"a {CALL_OF_QWEN * 2}", ("a ", CALL_OF_QWEN * 2)),
        (f"no <tool_call> but {CALL_OF_QWEN}", ("no <tool_call> but ", CALL_OF_QWEN)),
        # What more is thought behind, or only speaks of calls, or of other functions, is reasoning.
        (f"as {CALL_OF_QWEN}</think>hi", (f"as {CALL_OF_QWEN}", "hi")),
        (f"as {CALL_OF_QWEN}</tool_call> says", (f"as {CALL_OF_QWEN}</tool_call> says", "")),
        ("a <tool_call> is wanted</think>hi", ("a <tool_call> is wanted", "hi")),
        (
            "<tool_call><function=x></tool_call> <to",
            ("<tool_call><function=x></tool_call> <to", ""),
        ),
        ("<tool_call>\n<func", ("<tool_call>\n<func", "")),
    ],
)
@given(data=st.data())
def test_calls_end_what_is_thought(
    text: str, expected: tuple[str, str], data: st.DataObject
) -> None:
    look = {"type": "function", "function": {"name": "look"}}

    def splitter() -> Splitter:
        return CallingThoughts(Thoughts(MARKS, open_already=True), QWEN_TAGS, ToolUse((look,)))

    for pieces in ([text], list(text), pieces_of(text, data)):
        assert split(splitter(), pieces) == expected


@pytest.mark.parametrize(
    ("marks", "text", "expected"),
    [
        (GEMMA, "<|channel>thought\nwhy\n<channel|>hi", ("why\n", "hi")),
        (GEMMA, "hi<channel|>, you", ("", "hi, you")),
        (GEMMA, " <|channel>thought\nwhy\n<channel|>hi", ("why\n", "hi")),
        (GEMMA, "<|channel><|channel>thought\nwhy<channel|><channel|>hi", ("why", "hi")),
        (GEMMA, "hi <|channel>thought\n<channel|>you", ("", "hi you")),
        (GEMMA, "<|channel>thought\na<channel|>hi<|channel>thought\nb<channel|>!", ("ab", "hi!")),
        (GEMMA, "hi <|chan", ("", "hi <|chan")),
        (
            COHERE,
            "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>hi<|END_RESPONSE|>",
            ("a", "hi"),
        ),
    ],
)
@given(data=st.data())
def test_marks_that_no_text_has_in_it_are_never_shown(
    marks: ReasoningMarks, text: str, expected: tuple[str, str], data: st.DataObject
) -> None:
    special = replace(marks, unseen={7: marks.opening, 8: marks.closing})
    for pieces in (pieces_of(text, data), list(text), [text]):
        assert split(special.splitter("", is_begun=False), pieces) == expected
