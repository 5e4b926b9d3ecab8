"""Prompts, chats, and text that arrives in whole characters."""

from __future__ import annotations

import base64
import copy
import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from mesh.errors import BadCheckpoint, BadRequest, ContextTooLong
from mesh.models.bounded import Bounds
from mesh.models.detokenize import decoder_for
from mesh.models.manifest import Manifest, read_manifest
from mesh.models.text_lengths import longest_token_bytes, most_growth
from mesh.models.tokenizer import WHITE_SPACE, Tokenizer
from tests.checkpoints import make_tokenizer
from tests.models.conftest import Checkpoint

VOCAB = 384
CAT = "🐈"


def _tokenizer(kind: str) -> Tokenizer:
    if kind in {"byte-level", "sentencepiece"}:
        return Tokenizer(make_tokenizer(VOCAB, sentencepiece=kind == "sentencepiece"), frozenset())
    words = {word: i for i, word in enumerate(["</s>", "▁a", "▁", "b", "é", "▁▁c", "d"])}
    backend = Backend(models.WordLevel(words, unk_token=next(iter(words))))
    backend.decoder = decoders.Metaspace()
    special = {"eos_token": "</s>"}
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **special), frozenset())


def _stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = tokenizer.decoder()
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "metaspace"])
@settings(max_examples=200)
@given(data=st.data())
def test_parts_joined_are_the_whole_text(kind: str, data: st.DataObject) -> None:
    # Ids beyond the vocabulary are what padded embeddings can produce.
    tokenizer = _tokenizer(kind)
    ids = data.draw(st.lists(st.integers(0, 8 if kind == "metaspace" else VOCAB + 8), max_size=40))
    assert "".join(_stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@settings(max_examples=100)
@given(text=st.text(max_size=20))
def test_real_text_never_shows_half_a_character(kind: str, text: str) -> None:
    tokenizer = _tokenizer(kind)
    ids = tokenizer.encode(text)
    parts = _stream(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_emoji_comes_in_one_piece(kind: str) -> None:
    tokenizer = _tokenizer(kind)
    ids = tokenizer.encode(f"the {CAT} sings")
    parts = _stream(tokenizer, ids)
    assert "".join(parts).strip() == f"the {CAT} sings"
    assert sum(CAT in part for part in parts) == 1
    assert sum(part == "" for part in parts) >= 3


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_unfinished_character_is_flushed_as_a_replacement(kind: str) -> None:
    tokenizer = _tokenizer(kind)
    whole = tokenizer.encode(CAT)
    decoder = tokenizer.decoder()
    shown = "".join(decoder.push(token_id) for token_id in whole[:-1])
    assert "\ufffd" not in shown
    assert "\ufffd" in decoder.flush()
    assert decoder.flush() == ""


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_tokens_alone_keep_their_spaces_and_their_parts_of_a_character(kind: str) -> None:
    tokenizer = _tokenizer(kind)
    text = f"the cat{CAT} sings, the cat é"
    tokens = [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text)]
    assert b"".join(tokens).decode().strip() == text
    assert not all(map(bytes.isascii, tokens))


def test_words_keep_the_spaces_between_them() -> None:
    tokenizer = _tokenizer("sentencepiece")
    parts = _stream(tokenizer, tokenizer.encode("the cat the cat"))
    assert "".join(parts) == "the cat the cat"
    assert any(part.startswith(" ") or part.endswith(" ") for part in parts)


@settings(max_examples=100)
@example(ids=[98, 98, 160, 98, 98])
@given(ids=st.lists(st.integers(4, VOCAB - 1), max_size=20))
def test_tokenizer_without_a_known_inside_loses_no_text(ids: list[int]) -> None:
    tokenizer = _tokenizer("byte-level")
    decoder = decoder_for(None, tokenizer.decode)
    text = tokenizer.decode(ids)
    joined = "".join([*(decoder.push(token_id) for token_id in ids), decoder.flush()])
    assert joined.replace("\ufffd", "") == text.replace("\ufffd", "")


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_work_per_token_does_not_grow(kind: str) -> None:
    loaded = make_tokenizer(VOCAB, sentencepiece=kind == "sentencepiece")
    tokenizer = Tokenizer(loaded, frozenset())
    decoded = 0

    def counting(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return tokenizer.decode(ids)

    ids = tokenizer.encode("the cat listens to the rain 🐈 " * 60)
    decoder = decoder_for(loaded.backend_tokenizer, counting)  # type: ignore[arg-type]
    joined = "".join([*(decoder.push(token_id) for token_id in ids), decoder.flush()])
    assert joined == tokenizer.decode(ids)
    assert decoded <= 4 * len(ids)


def test_chat_follows_the_models_template(checkpoint: Checkpoint) -> None:
    tokenizer = Tokenizer.load(read_manifest(checkpoint("llama", layers=3)))
    assert tokenizer.has_chat_template
    ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert tokenizer.token_bytes(ids[0]) == b"<s>"
    assert tokenizer.decode(ids) == "user: hello\nassistant: "
    assert tokenizer.eos_ids == {2}


def test_eos_ids_come_from_every_source(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("llama", layers=3), tmp_path / "eos")
    for name, ids in (("generation_config.json", [5, 6]), ("config.json", 7)):
        content = json.loads((directory / name).read_text()) | {"eos_token_id": ids}
        (directory / name).write_text(json.dumps(content))
    manifest = read_manifest(directory)
    assert manifest.eos_ids == (5, 6, 7)
    assert Tokenizer.load(manifest).eos_ids == {2, 5, 6, 7}
    turn = Tokenizer.load(manifest).id_of("<|turn|>")
    for around, ends in (
        ("{{ m.content }}<|turn|> ", {turn}),
        ("{{ m.content }}<|turn|></s>", {turn}),
        ("<think></think>{{ m.content }}<|turn|>", {turn}),
        ("part:{{ m.content }}<|turn|>", set()),
        ("{{ m.content }}<|turn|>user:", set()),
        ("{{ m.content }}", set()),
    ):
        (directory / "chat_template.jinja").write_text(
            f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{around}{{% else %}}"
            "{{ m.content }} {% endif %}{% endfor %}"
        )
        assert Tokenizer.load(manifest).eos_ids == {2, 5, 6, 7} | ends, around


def _without_template(directory: Path) -> Path:
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    file = directory / "tokenizer_config.json"
    content = json.loads(file.read_text())
    content.pop("chat_template", None)
    file.write_text(json.dumps(content))
    return directory


def test_model_without_a_template_gets_a_plain_transcript(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = shutil.copytree(checkpoint("llama", layers=3), tmp_path / "plain")
    tokenizer = Tokenizer.load(read_manifest(_without_template(directory)))
    assert not tokenizer.has_chat_template
    ids = tokenizer.encode_chat(
        [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    )
    assert tokenizer.decode(ids) == "system: be kind\n\nuser: hello\n\nassistant:"


def test_a_template_of_images_and_text_is_given_texts_as_its_parts(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% for part in m.content %}"
        "{% if part.type == 'text' %} {{ part.text }}{% endif %}{% endfor %}|{% endfor %}"
    )
    directory = _without_template(shutil.copytree(checkpoint("llama", layers=3), tmp_path / "seer"))
    beside = directory / "chat_template.json"
    beside.write_text(json.dumps({"chat_template": template}))
    tokenizer = Tokenizer.load(read_manifest(directory))
    ids = tokenizer.encode_chat(
        [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    )
    assert tokenizer.decode(ids) == "system: be kind|user: hello|"
    beside.write_text("{")
    with pytest.raises(BadCheckpoint, match=r"chat_template\.json cannot be read"):
        Tokenizer.load(read_manifest(directory))


def test_template_that_refuses_is_a_bad_request(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = _without_template(shutil.copytree(checkpoint("llama", layers=3), tmp_path / "no"))
    (directory / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    tokenizer = Tokenizer.load(read_manifest(directory))
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert caught.value.param == "messages"


_LONG = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
_DOUBLED = (
    "{% set n = namespace(x='xx') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
)
_HOSTILE = {
    "loops": (_LONG, "takes more than 0.3 s, and was ended"),
    "grows": (_DOUBLED, "takes more than 64 MiB, and was ended"),
    "is large at once": ("{{ 'x' * 10**11 }}", "takes more than 64 MiB"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses these messages"),
    "divides by nothing": ("{{ 1 // 0 }}", "refuses these messages"),
}


@pytest.mark.parametrize("what", _HOSTILE)
def test_a_chat_template_is_held_within_bounds(what: str) -> None:
    template, said = _HOSTILE[what]
    before = resource.getrlimit(resource.RLIMIT_DATA)
    backend = copy.deepcopy(make_tokenizer(VOCAB, sentencepiece=False))  # that is everybody's
    backend.chat_template = template
    tokenizer = Tokenizer(backend, frozenset(), Bounds(cpu_s=0.3, memory_bytes=64 << 20))
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(BadRequest, match=said):
        tokenizer.encode_chat(chat)
    assert not tokenizer.takes_tools()
    backend.chat_template = "{{ messages[0].content }}"
    assert tokenizer.decode(tokenizer.encode_chat(chat)) == "hi"
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.parametrize(
    "message", [{"role": "user"}, {"content": "x"}, {"role": "user", "content": 3}]
)
def test_message_without_its_fields_is_a_bad_request(message: dict[str, str]) -> None:
    with pytest.raises(BadRequest) as caught:
        _tokenizer("byte-level").encode_chat([{"role": "user", "content": "hi"}, message])
    assert caught.value.param == "messages[1]"


def test_directory_without_a_tokenizer(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("llama", layers=3), tmp_path / "mute")
    for file in directory.glob("tokenizer*"):
        file.unlink()
    manifest = read_manifest(directory)
    with pytest.raises(BadCheckpoint, match="No tokenizer"):
        Tokenizer.load(manifest)
    for name, fix in (("tokenizer.model", "sentencepiece"), ("tekken.json", "GGUF")):
        (directory / name).write_bytes(b"odd")
        with pytest.raises(BadCheckpoint, match="No tokenizer") as caught:
            Tokenizer.load(manifest)
        assert fix in caught.value.fix


@pytest.mark.parametrize("part", ["model", "pre_tokenizer"])
def test_tokenizer_with_a_part_of_an_unknown_kind(
    part: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = shutil.copytree(checkpoint("llama", layers=3), tmp_path / "strange")
    content = json.loads((directory / "tokenizer.json").read_text())
    content[part] = {"type": "Strange"}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(BadCheckpoint, match="No tokenizer"):
        Tokenizer.load(read_manifest(directory))


def _normalizing(*steps: Any) -> Backend:
    shared = make_tokenizer(VOCAB, sentencepiece=False).backend_tokenizer
    backend = Backend.from_str(shared.to_str())
    backend.normalizer = normalizers.Sequence(list(steps))
    return backend


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "composing"])
@settings(max_examples=200)
@given(text=st.text(max_size=60) | st.text("ab\u0301\u1100\u1161\u11a8 \n", max_size=60))
def test_a_text_never_has_fewer_tokens_than_its_bytes_say(kind: str, text: str) -> None:
    if kind == "composing":
        backend = _normalizing(normalizers.NFC())
    else:
        backend = make_tokenizer(VOCAB, sentencepiece=kind == "sentencepiece").backend_tokenizer
    longest = longest_token_bytes(backend)
    assert longest is not None
    shown = "".join(sign for sign in text if sign not in WHITE_SPACE)
    assert len(backend.encode(text)) * longest >= len(shown.encode())


def test_nothing_is_said_of_tokenizers_that_drop_text_or_fuse_what_they_do_not_know() -> None:
    unknown = {"unk_token": "?"}
    words = Backend(models.WordLevel({"?": 0, "a": 1}, **unknown))
    gaps = Backend(models.BPE({"?": 0, "a": 1}, [], fuse_unk=True, **unknown))
    dropping = [
        normalizers.Strip(),
        normalizers.StripAccents(),
        normalizers.NFKC(),
        normalizers.Replace(Regex("x+"), ""),
        normalizers.Replace("x", ""),
    ]
    for backend in (words, gaps, *map(_normalizing, dropping)):
        assert longest_token_bytes(backend) is None
    assert longest_token_bytes(None) is None


_DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
_BETWEEN = {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "a" * 999}
_OF_ONE = b"\0\0\0\0" + b"a" * 999 + b"\0"
_MAPPED = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(_OF_ONE).decode()}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _with_part(directory: Path, part: str, steps: list[dict[str, Any]]) -> Manifest:
    kind = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
    content = json.loads((directory / "tokenizer.json").read_text())
    content[part] = {"type": "Sequence", kind[part]: steps}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return read_manifest(directory)


@pytest.mark.parametrize(
    ("part", "steps"),
    [
        ("normalizer", [_DOUBLING] * 40),
        ("normalizer", [{"type": "Sequence", "normalizers": [_DOUBLING] * 20}] * 2),
        ("normalizer", [_BETWEEN] * 3),
        ("normalizer", [_MAPPED] * 3),
        ("normalizer", [{"type": "Prepend", "prepend": "a" * 999}] * 3),
        ("pre_tokenizer", [_BYTES] * 40),
        ("decoder", [_DOUBLING] * 40),
    ],
)
def test_a_tokenizer_that_makes_texts_without_end_is_refused_before_it_reads_any(
    part: str, steps: list[dict[str, Any]], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = shutil.copytree(checkpoint("llama", layers=3), tmp_path / "growing")
    with pytest.raises(BadCheckpoint, match="tokenizer makes up to"):
        Tokenizer.load(_with_part(directory, part, steps))


def test_a_text_that_its_tokenizer_would_make_too_long_is_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = shutil.copytree(checkpoint("llama", layers=3), tmp_path / "growing")
    tokenizer = Tokenizer.load(_with_part(directory, "normalizer", [_DOUBLING] * 18))
    assert len(tokenizer.encode("ba")) > 1 << 18
    with pytest.raises(ContextTooLong, match=f"may make {300 << 19} bytes of the prompt"):
        tokenizer.encode("b" * 300)


def test_what_the_usual_tokenizers_make_of_a_text_is_little() -> None:
    for is_sentencepiece in (False, True):
        backend = make_tokenizer(VOCAB, sentencepiece=is_sentencepiece).backend_tokenizer
        assert most_growth(backend) <= 12
    assert most_growth(None) == 1


def test_a_text_at_which_a_pattern_goes_back_and_forth_is_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    split = {
        "type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    directory = shutil.copytree(checkpoint("llama", layers=3), tmp_path / "backtracking")
    tokenizer = Tokenizer.load(_with_part(directory, "pre_tokenizer", [split, _BYTES]))
    tokenizer.encode("aaab")
    with pytest.raises(BadRequest, match=r"cannot read this text: .*retry-limit"):
        tokenizer.encode("a" * 60)


def test_white_space_counts_for_nothing_where_a_text_is_measured() -> None:
    tokenizer = _tokenizer("byte-level")
    tokenizer.encode("a" + " " * 3 + "b", most=100)
    with pytest.raises(
        ContextTooLong, match="tokens; this model's maximum context length is 100 t"
    ):
        tokenizer.encode(" \u3000\n" * 20_000, most=100)  # measured in tokens, not in bytes
    with pytest.raises(ContextTooLong, match="bytes"):
        tokenizer.encode("q\u3000" * 20_000, most=100)
