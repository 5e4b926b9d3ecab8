"""An answer's text: as it follows what was asked."""

from __future__ import annotations

import pytest

from mesh.models.tokenizer import Tokenizer
from mesh.pipeline.checkpoint import CheckpointText
from mesh.pipeline.completion import Completion
from mesh.types import GenerationRequest, ModelId
from tests.checkpoints import make_tokenizer

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
