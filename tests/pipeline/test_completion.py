"""An answer's text: as it follows what was asked."""

from __future__ import annotations

import json

import pytest

from mesh.models.tokenizer import Tokenizer
from mesh.pipeline.checkpoint import CheckpointText
from mesh.pipeline.completion import Completion
from mesh.types import GenerationRequest, ModelId, ToolUse
from tests.checkpoints import make_tokenizer
from tests.pipeline.scripted_asker import EOS, tokenizer_with

VOCAB = 384
TEXT = "the cat sings, the cat é sings"


@pytest.mark.parametrize("sentencepiece", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_a_continued_text_keeps_the_space_before_its_first_word(
    sentencepiece: bool, is_chat: bool
) -> None:
    tokenizer = Tokenizer(make_tokenizer(VOCAB, sentencepiece=sentencepiece), frozenset())
    ids = tokenizer.encode(TEXT)
    for cut in range(1, len(ids)):
        prompt, said = ids[:cut], ids[cut:]
        request = GenerationRequest(
            "r",
            ModelId("m"),
            messages=({"role": "user", "content": "x"},) if is_chat else None,
            prompt_ids=None if is_chat else tuple(prompt),
        )
        text = CheckpointText(tokenizer, VOCAB)
        answer = Completion(text, request, prompt, len(said), 0.0)
        shown = "".join(answer.take(token).text for token in said)
        if is_chat:
            assert shown == tokenizer.decode(said)
        elif "\ufffd" not in tokenizer.decode(prompt):
            assert tokenizer.decode(prompt) + shown == TEXT


@pytest.mark.parametrize("sentencepiece", [False, True])
def test_marks_stand_behind_bytes_that_waited_for_more_of_a_character(sentencepiece: bool) -> None:
    template = "{{ tools | tojson }}{# [THINK][/THINK][TOOL_CALLS] #}"
    special = ("[THINK]", "[/THINK]", "[TOOL_CALLS]")
    made = tokenizer_with(template, special=special, sentencepiece=sentencepiece)
    text = CheckpointText(Tokenizer(made, frozenset({EOS})), len(made))
    look = {"type": "function", "function": {"name": "look", "parameters": {}}}
    asked = ({"role": "user", "content": "x"},)
    request = GenerationRequest("r", ModelId("m"), messages=asked, tools=ToolUse((look,)))
    call = '[TOOL_CALLS][{"name": "look", "arguments": {"city": "é"}}]'
    said = made(f"[THINK]how \U0001f600[/THINK]so \U0001f600{call}", add_special_tokens=False)
    answer = Completion(text, request, text.prompt_ids(request, None), 999, 0.0)
    deltas = [answer.take(token) for token in (*said["input_ids"], EOS)]
    assert "".join(delta.reasoning for delta in deltas).strip() == "how \U0001f600"
    assert "".join(delta.text for delta in deltas).strip() == "so \U0001f600"
    told = "".join(news.arguments for delta in deltas for news in delta.tool_calls)
    assert (json.loads(told), answer.finish_reason) == ({"city": "é"}, "tool_calls")
