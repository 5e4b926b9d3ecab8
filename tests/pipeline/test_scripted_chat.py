"""A chat's answer through the whole asker: its reasoning apart, no space before its first word."""

from __future__ import annotations

import pytest

from mesh.types import GenerationRequest, SamplingParams, TokenDelta
from tests.pipeline.scripted_asker import ScriptedAsker, tokenizer_with
from tests.pipeline.toy_mesh import MODEL

THINKS = "{{ messages[-1]['content'] }}\n<think>\n{# </think> #}"


@pytest.mark.parametrize("sentencepiece", [False, True])
async def test_a_chat_is_known_as_one_when_its_prompt_is_token_ids(sentencepiece: bool) -> None:
    asker = ScriptedAsker(tokenizer_with(THINKS, sentencepiece=sentencepiece))
    asker.says("the rain</think>\n\nhi there")
    request = GenerationRequest(
        "r", MODEL, messages=({"role": "user", "content": "hello"},), sampling=SamplingParams()
    )
    deltas = [f async for f in asker.generate(request) if isinstance(f, TokenDelta)]
    assert "".join(delta.reasoning for delta in deltas) == "the rain"
    assert "".join(delta.text for delta in deltas) == "hi there"
    await asker.close()
