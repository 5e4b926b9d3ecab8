"""Which tokens are allowed, with tokenizers of both kinds; and what is said without the library."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from mesh.errors import BadRequest
from mesh.models.constraint import Constraint, Grammars
from mesh.models.tokenizer import Tokenizer
from mesh.types import GenerationRequest, ModelId
from tests.pipeline.scripted_asker import EOS, tokenizer_with

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


def asked(schema: dict[str, object]) -> GenerationRequest:
    return GenerationRequest("r", ModelId("m"), schema=schema)


def constraint(*, sentencepiece: bool) -> tuple[Constraint, Tokenizer]:
    tokenizer = tokenizer_with("", sentencepiece=sentencepiece)
    text = Tokenizer(tokenizer, frozenset({EOS}))
    made = text.grammars(len(tokenizer) + 40).constraint(asked(SCHEMA), None, None)
    assert made is not None
    return made, text


@pytest.mark.parametrize("sentencepiece", [False, True])
@pytest.mark.parametrize(
    ("text", "is_said"),
    [
        ('{"city": "Köln 🐈 \\"}{"}', True),
        ('{\n  "city": "",\n  "n": -12\n}', True),
        ('{"n": 1}', False),
        ('{"city": 1}', False),
        ('{"city": "a", "m": 1}', False),
        ('{"city": "a"} and more', False),
        ('{\n\n\n\n"city": "a"}', False),
        ('{"city": "a\nb"}', False),
    ],
)
def test_what_is_allowed_is_what_the_schema_says(
    sentencepiece: bool, text: str, is_said: bool
) -> None:
    made, tokenizer = constraint(sentencepiece=sentencepiece)
    left = text.encode()
    while left:
        spelt = {int(i): tokenizer.token_bytes(int(i)) for i in np.flatnonzero(made.allowed())}
        fit = [token for token, said in spelt.items() if said and left.startswith(said)]
        if not fit:
            break
        token = max(fit, key=lambda one: len(spelt[one]))
        made.take(token)
        left = left[len(spelt[token]) :]
    assert (not left and made.is_over) == is_said
    if is_said:
        assert np.flatnonzero(made.allowed()).tolist() == [EOS]


def test_only_tokens_that_there_are_are_allowed() -> None:
    made, tokenizer = constraint(sentencepiece=False)
    for token in tokenizer.encode('{"city": "a'):
        made.take(token)
    allowed = made.allowed()
    assert allowed.sum() > 200
    assert not allowed[len(tokenizer.vocabulary()) :].any()
    # A model may have fewer logits than its tokenizer tokens.
    assert tokenizer.grammars(100).constraint(asked(SCHEMA), None, None) is not None


def test_a_tokenizer_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(BadRequest, match="with this model's tokenizer: it is no fast one"):
        Grammars(None, 5, ()).constraint(asked(SCHEMA), None, None)


def test_a_grammar_that_is_too_much_work_is_refused() -> None:
    patterns = (".*a.{20}", ".*b.{19}", ".*c.{21}")
    huge = {"allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}
    grammars = Tokenizer(tokenizer_with(""), frozenset({EOS})).grammars(400)
    for much in (huge, {"const": "x" * (128 << 10)}):
        with pytest.raises(BadRequest, match="cannot be followed"):
            grammars.constraint(asked(much), None, None)


def test_without_the_library_the_extra_is_named() -> None:
    script = (
        "import sys; sys.modules['llguidance'] = None\n"
        "from mesh.errors import BadRequest\n"
        "from mesh.models.constraint import Grammars\n"
        "from mesh.types import GenerationRequest, ModelId, ToolUse\n"
        "tools = ToolUse((), required=True)\n"
        "for more in ({'schema': {}}, {'tools': tools}, {'tools': ToolUse(())}):\n"
        "    asked = GenerationRequest('r', ModelId('m'), **more)\n"
        "    try:\n"
        "        print(Grammars(None, 5, ()).constraint(asked, None, None))\n"
        "    except BadRequest as error:\n"
        "        print(error.param, error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    formats, choice, free = run.stdout.splitlines()
    assert formats.startswith("response_format ")
    assert choice.startswith("tool_choice ")
    assert all("pip install 'hearthnet[structured]'" in said for said in (formats, choice))
    assert free == "None"
