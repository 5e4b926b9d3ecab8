"""The tokenizer that a GGUF file holds, as a fast tokenizer of transformers.

transformers builds it; what it leaves as it finds it in its classes is set here as the file says:
the space that is put before a text, the tokens that are put around it, how merges are used. A file
that names a way to split text which transformers does not know is refused: every text would be
other tokens. Building takes seconds for a large vocabulary, so the result is kept on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mesh.errors import BadCheckpoint
from mesh.models.gguf.container import read_gguf_header
from mesh.models.hashing import read_cached, write_json_atomically

_VERSION = 1
"""Counts up when the same file would give another tokenizer."""

_SPACE = "▁"
_AS_GPT2 = frozenset({"gpt-2", "phi-2", "mellum", "exaone4"})
_DIGIT_BY_DIGIT = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_COMPOSED = frozenset({"qwen2", "qwen35"})
_WORDS_FIRST = frozenset(
    {
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
        "jina-v5-nano", "tekken", "glm4",
    }
)  # fmt: skip
"""A word of the vocabulary is taken whole, whatever its merges; texts begin with a token."""

_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _PUNCTUATION + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI = (
    rf"\p{{Han}}+|{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}|{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EXAONE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
"""Digits in threes from the last."""
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_CUT_BY = {
    "afmoe": (_THREES, _ASIAN, _DEEPSEEK[-1]),
    "deepseek-v3": _DEEPSEEK,
    "exaone-moe": (_EXAONE,),
    "kimi-k2": (_KIMI,),
    "hunyuan-dense": _DEEPSEEK,
    "seed-coder": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
"""Splits that transformers does not know: by each of these, one after the other
(https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp)."""

_ALIKE = {"glm4": "llama-bpe", "hunyuan": "qwen2"} | dict.fromkeys(_CUT_BY, "llama-bpe")
"""Splits that transformers knows by another name, or that are set in the place of that."""
_BARE = frozenset({"glm4"})
"""Of those with words first, the ones whose texts begin with no token."""

_SHOWN = frozenset(
    {
        "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
        "<tool_response|>", '<|"|>',
    }
)  # fmt: skip
"""Special tokens of Gemma 4 that its files do not say are, for llama.cpp to show them:
https://github.com/ggml-org/llama.cpp/blob/master/conversion/gemma.py"""

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tokenizer as `tokenizers` writes it, and the hash of that."""

    sha256: str
    tokenizer: str


def gguf_tokenizer(file: Path, cache_dir: Path | None) -> PreTrainedTokenizerFast:
    """The tokenizer of `file`, with its chat template. Raises BadCheckpoint with the reason."""
    metadata = read_gguf_header(file).metadata
    if "tokenizer.ggml.model" not in metadata:
        raise _refused(file, "it holds no tokenizer")
    place = None if cache_dir is None else _place(file, cache_dir)
    kept = None if place is None else read_cached(place, _Kept)
    if kept is not None and kept.sha256 == _hash(kept.tokenizer):
        backend = Tokenizer.from_str(kept.tokenizer)
    else:
        backend = _built(file, metadata)
        if place is not None:
            text = backend.to_str()
            write_json_atomically(place, {"sha256": _hash(text), "tokenizer": text})
    tokens = {
        name: backend.id_to_token(token)
        for name, key in _SPECIAL.items()
        if type(token := metadata.get(f"tokenizer.ggml.{key}")) is int
    }
    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in tokens.items() if token is not None},
    )


def _place(file: Path, cache_dir: Path) -> Path:
    status = file.stat()
    key = [os.path.realpath(file), status.st_size, status.st_mtime_ns, status.st_ino]
    key += [_VERSION, transformers.__version__, tokenizers.__version__]
    return cache_dir / f"tokenizer-{_hash(json.dumps(key))[:32]}.json"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _built(file: Path, metadata: Any) -> Any:
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as made_by
    except ImportError as error:
        raise _refused(
            file, f"transformers {transformers.__version__} is too old for it"
        ) from error
    kind, split = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise _refused(file, f"it is of the kind {str(kind)[:40]!r}")
    known = made_by.GGUF_PRE_TOKENIZER_SPLITS.keys() | _AS_GPT2 | _DIGIT_BY_DIGIT | _ALIKE.keys()
    if kind == "gpt2" and split not in known:
        raise _refused(file, f"how it splits text, {str(split)[:40]!r}, is not known")
    try:
        architecture, described, _ = made_by.get_gguf_tokenizer(str(file))
        described["pre_tokenizer_type"] = _ALIKE.get(split, split)
        backend, _ = made_by.convert_gguf_tokenizer(architecture, described)
    except Exception as error:  # whatever foreign code raises over foreign data
        raise _refused(file, f"{type(error).__name__}: {str(error)[:200].rstrip('.')}") from error
    backend = _as_said(backend, len(described["tokens"]), _SHOWN if kind == "gemma4" else ())
    if kind == "gpt2":
        _set_splits(backend, split)
    else:
        before = metadata.get("tokenizer.ggml.add_space_prefix", kind == "llama")
        _set_spaces(backend, before=before)
    _set_ends(file, backend, metadata, begins=kind != "gpt2" or split in _WORDS_FIRST - _BARE)
    return backend


def _as_said(backend: Any, count: int, special: Collection[str]) -> Any:
    """Without the special tokens that its class has and the file has not: a model that has no
    embedding for one cannot be given it. With those that are `special` besides."""
    if backend.get_vocab_size(with_added_tokens=True) <= count and not special:
        return backend
    said = json.loads(backend.to_str())
    said["added_tokens"] = [each for each in said["added_tokens"] if each["id"] < count]
    for each in said["added_tokens"]:
        each["special"] |= each["content"] in special
    model = said["model"]
    model["vocab"] = {word: number for word, number in model["vocab"].items() if number < count}
    if model.get("unk_token") not in model["vocab"]:
        model["unk_token"] = None
    return Tokenizer.from_str(json.dumps(said))


def _set_spaces(backend: Any, *, before: bool) -> None:
    """As SentencePiece does: one is put before every text, or none."""
    replaced = normalizers.Replace(" ", _SPACE)
    first = [normalizers.Prepend(_SPACE)] if before else []
    backend.normalizer = normalizers.Sequence([*first, replaced])
    backend.pre_tokenizer = None
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if before else steps)


def _set_splits(backend: Any, split: str) -> None:
    if split in _AS_GPT2 or split in _DIGIT_BY_DIGIT:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if split in _DIGIT_BY_DIGIT else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    if split in _CUT_BY:
        cuts = [pre_tokenizers.Split(Regex(each), "isolated") for each in _CUT_BY[split]]
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, in_bytes])
    if split in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.model.ignore_merges = split in _WORDS_FIRST


def _set_ends(file: Path, backend: Any, metadata: Any, *, begins: bool) -> None:
    """The tokens around every text."""
    around = {"bos": begins, "eos": False}
    template, special = ["$A"], []
    for name, default in around.items():
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if not metadata.get(f"tokenizer.ggml.add_{name}_token", default) or token_id is None:
            continue
        token = backend.id_to_token(token_id) if type(token_id) is int else None
        if token is None:
            raise _refused(file, f"its {name} token {str(token_id)[:20]} is none of its words")
        special.append((token, token_id))
        template.insert(0 if name == "bos" else len(template), token)
    backend.post_processor = processors.TemplateProcessing(
        single=template, pair=[*template, "$B"], special_tokens=special
    )


def _refused(file: Path, why: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"The tokenizer of {file} cannot be used: {why}.",
        fix="Use another GGUF file of the model, or its original checkpoint.",
    )
