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
from collections.abc import Collection, Mapping, Sequence
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

_VERSION = 3
"""Counts up when the same file would give another tokenizer."""

_SPACE = "▁"
_CONTROL, _OF_ITS_OWN = 3, 4
"""How a file numbers words that texts are never cut in, of which the first are special."""
_AS_GPT2 = frozenset(
    {
        "gpt-2", "phi-2", "mellum", "exaone4", "gigachat", "a.x-4.0", "trillion", "granite-docling",
        "olmo", "mpt",
    }
)  # fmt: skip
_DIGIT_BY_DIGIT = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b", "mellum2", "exaone"}
)
_COMPOSED = frozenset({"qwen2", "qwen35", "olmo", "mpt", "stablelm2"})
_WORDS_FIRST = frozenset(
    {
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
        "jina-v5-nano", "tekken", "glm4", "minicpm5",
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
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
"""Ends of words such as "don't"."""
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_KIMI = (
    rf"\p{{Han}}+|{_BEFORE}{_UPPER}*{_LOWER}+{_SHORTENED}?"
    rf"|{_BEFORE}{_UPPER}+{_LOWER}*{_SHORTENED}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EXAONE = (
    _SHORTENED + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
"""Digits in threes from the last."""
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters that are small or large, as the Unicode of DeepSeek's first tokenizers had them."""
_EAST = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CUT_BY = {
    "afmoe": (_THREES, _ASIAN, _DEEPSEEK[-1]),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST, r"\p{N}"),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _EAST,
        r"\p{N}",
    ),
    "deepseek-v3": _DEEPSEEK,
    "exaone-moe": (_EXAONE,),
    "joyai-llm": _DEEPSEEK,
    "kimi-k2": (_KIMI,),
    "minicpm5": (
        r"\p{N}{1,3}",
        _SHORTENED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "hunyuan-dense": _DEEPSEEK,
    "seed-coder": (
        _SHORTENED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
"""Splits that transformers does not know: by each of these, one after the other
(https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp)."""

_ALIKE = (
    dict.fromkeys(("hunyuan", "solar-open", "stablelm2"), "qwen2")
    | {"glm4": "llama-bpe"}
    | dict.fromkeys(_CUT_BY, "llama-bpe")
)
"""Splits that transformers knows by another name, or that are set in the place of that."""
_BARE = frozenset({"glm4", "minicpm5"})
"""Of those with words first, the ones whose texts begin with no token."""

_SHOWN = frozenset(
    {
        "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
        "<tool_response|>", '<|"|>',
    }
)  # fmt: skip
"""Special tokens of Gemma 4 that its files do not say are, for llama.cpp to show them:
https://github.com/ggml-org/llama.cpp/blob/master/conversion/gemma.py"""

_TAKES_SPACE = frozenset({"phi3", "phimoe"})
"""Architectures whose special tokens take white space behind them along, where their tokenizer is
SentencePiece's: no file says it, and all of Phi 3's do so."""
_TAKES_NONE = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""But for these."""

_TEMPLATE = "tokenizer.chat_template"
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
        name: _word(backend, metadata.get(f"tokenizer.ggml.{key}"))
        for name, key in _SPECIAL.items()
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_chat_template(metadata),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in tokens.items() if token is not None},
    )


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The one, or several by name, as those of Hermes and Command R, which have one for tools."""
    template = metadata.get(_TEMPLATE)
    named = {
        key.removeprefix(f"{_TEMPLATE}."): said
        for key, said in metadata.items()
        if key.startswith(f"{_TEMPLATE}.") and isinstance(said, str)
    }
    if not isinstance(template, str):
        return named or None
    return {"default": template, **named} if named else template


def _place(file: Path, cache_dir: Path) -> Path:
    status = file.stat()
    key = [os.path.realpath(file), status.st_size, status.st_mtime_ns, status.st_ino]
    key += [_VERSION, transformers.__version__, tokenizers.__version__]
    return cache_dir / f"tokenizer-{_hash(json.dumps(key))[:32]}.json"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _built(file: Path, metadata: Any) -> Any:
    from transformers.integrations.gguf import gguf_tokenizer_mapping as made_by

    kind, split = metadata["tokenizer.ggml.model"], str(metadata.get("tokenizer.ggml.pre", ""))
    if kind not in ("gpt2", "llama", "gemma4"):
        raise _refused(file, f"it is of the kind {str(kind)[:40]!r}")
    known = made_by.GGUF_PRE_TOKENIZER_SPLITS.keys() | _AS_GPT2 | _DIGIT_BY_DIGIT | _ALIKE.keys()
    if kind == "gpt2" and split not in known:
        raise _refused(file, f"how it splits text, {str(split)[:40]!r}, is not known")
    try:
        architecture, described, _ = made_by.get_gguf_tokenizer(str(file))
        described["pre_tokenizer_type"] = _ALIKE.get(split, split)
        backend, _ = made_by.convert_gguf_tokenizer(architecture, described)
        if kind == "gpt2":
            backend = _with_words(backend, described["tokens"], described.get("token_type") or ())
    except Exception as error:  # whatever foreign code raises over foreign data
        raise _refused(file, f"{type(error).__name__}: {str(error)[:200].rstrip('.')}") from error
    backend = _as_said(backend, len(described["tokens"]), _SHOWN if kind == "gemma4" else ())
    if kind == "gpt2":
        _set_splits(backend, split)
    else:
        backend = _taking_space(backend) if architecture in _TAKES_SPACE else backend
        before = metadata.get("tokenizer.ggml.add_space_prefix", kind == "llama")
        _set_spaces(backend, before=before)
    _set_ends(file, backend, metadata, begins=kind != "gpt2" or split in _WORDS_FIRST - _BARE)
    return backend


def _with_words(backend: Any, tokens: Sequence[str], kinds: Sequence[int]) -> Any:
    """With the words that no text is cut in and that bytes do not spell, as those of DeepSeek's
    turns are, and runs of spaces: transformers has them as bytes, to which no merges lead."""
    alphabet = frozenset(pre_tokenizers.ByteLevel.alphabet())
    missed = {
        number: {"id": number, "content": word, "special": kind == _CONTROL}
        for number, (word, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _OF_ITS_OWN) and not alphabet.issuperset(word)
    }
    if not missed:
        return backend
    said = json.loads(backend.to_str())
    spelt = {word: number for number, word in enumerate(tokens) if number not in missed}
    vocab = said["model"]["vocab"]
    for word in [word for word, number in vocab.items() if number in missed]:
        del vocab[word]
        vocab |= {word: spelt[word]} if word in spelt else {}
    vocab |= {each["content"]: number for number, each in missed.items()}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    said["added_tokens"] += [plain | each for each in missed.values()]
    said["added_tokens"].sort(key=lambda each: each["id"])
    return Tokenizer.from_str(json.dumps(said))


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


def _taking_space(backend: Any) -> Any:
    said = json.loads(backend.to_str())
    for each in said["added_tokens"]:
        each["rstrip"] = each["special"] and each["content"] not in _TAKES_NONE
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
        token = _word(backend, token_id)
        if token is None:
            raise _refused(file, f"its {name} token {str(token_id)[:20]} is none of its words")
        special.append((token, token_id))
        template.insert(0 if name == "bos" else len(template), token)
    backend.post_processor = processors.TemplateProcessing(
        single=template, pair=[*template, "$B"], special_tokens=special
    )


def _word(backend: Any, token_id: object) -> str | None:
    """The one of that number; None where there is none, as where a file says -1 for it."""
    if type(token_id) is not int or not 0 <= token_id < 1 << 32:
        return None
    token: str | None = backend.id_to_token(token_id)
    return token


def _refused(file: Path, why: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"The tokenizer of {file} cannot be used: {why}.",
        fix="Use another GGUF file of the model, or its original checkpoint.",
    )
