"""How a checkpoint makes one vector of a text, where it was trained to: its pooling.

Checkpoints of sentence-transformers list in modules.json what is done one after the other: the
transformer, a pooling with a config of its own, a normalisation
(https://sbert.net/docs/sentence_transformer/usage/custom_models.html). GGUF files have a number for
it (https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h, `llama_pooling_type`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mesh import codec
from mesh.models.manifest import Manifest

MODULES = "modules.json"
POOLING_CONFIG = "1_Pooling/config.json"
_TOKENIZER = "tokenizer_config.json"

Kind = Literal["", "last", "mean"]

_OF_GGUF: dict[int, Kind] = {1: "mean", 3: "last"}
_OF_MODE: dict[str, Kind] = {"mean": "mean", "lasttoken": "last"}
_MODE, _FLAG = "pooling_mode", "pooling_mode_"
_OF_FLAG = {"mean_tokens": "mean"}
"""Modes that are called otherwise where each has a flag of its own."""
_MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Pooling:
    """`kind` is ``last``, the final hidden state of the last token, ``mean``, of all of them, or ''
    for a model that makes none: `why_not` then says so, as the end of a sentence. `adds_end`: a
    token that ends the text is to stand behind it, also where the tokenizer puts none there."""

    kind: Kind
    why_not: str = ""
    adds_end: bool = False


NO_POOLING = Pooling("", "its checkpoint does not say how one vector is made of a text")


@dataclass(frozen=True, slots=True)
class _Module:
    type: str
    path: str = ""


def read_pooling(manifest: Manifest) -> Pooling:
    """That of a checkpoint here. Blocks."""
    if manifest.gguf is not None:
        return _of_gguf(manifest.pooling_type)
    modules = manifest.directory / MODULES
    if not modules.is_file():
        return NO_POOLING
    try:
        pooling = _of_modules(
            codec.convert(_json(modules), tuple[_Module, ...]),
            manifest.directory / POOLING_CONFIG,
        )
        return replace(pooling, adds_end=_adds_end(manifest.directory / _TOKENIZER))
    except (OSError, ValueError) as error:
        return Pooling("", f"its {MODULES} or {POOLING_CONFIG} cannot be read: {error}")


def _of_gguf(said: int) -> Pooling:
    if said == 0:
        return NO_POOLING
    kind = _OF_GGUF.get(said)
    return Pooling(kind) if kind else Pooling("", f"its pooling_type {said} is not known here")


def _of_modules(modules: tuple[_Module, ...], config: Path) -> Pooling:
    steps = [each.type.rpartition(".")[2] for each in modules]
    unknown = [each for each in steps if each not in ("Transformer", "Pooling", "Normalize")]
    if unknown or steps[:2] != ["Transformer", "Pooling"]:
        which = unknown[0] if unknown else " and ".join(steps[:2])
        return Pooling("", f"its {MODULES} has a step that is not known here: {which[:60]}")
    if modules[1].path != config.parent.name:
        return Pooling("", f"its {MODULES} has the pooling's config elsewhere than usual")
    modes = _modes(codec.convert(_json(config), dict[str, Any]))
    kind = _OF_MODE.get(modes[0]) if len(modes) == 1 else None
    shown = ", ".join(modes)[:60] or "none"
    return Pooling(kind) if kind else Pooling("", f"its pooling is not known here: {shown}")


def _modes(config: dict[str, Any]) -> list[str]:
    if isinstance(said := config.get(_MODE), str):
        return [said]
    on = [key.removeprefix(_FLAG) for key, is_on in config.items() if is_on is True]
    return [_OF_FLAG.get(key, key) for key in on if _FLAG + key in config]


def _adds_end(file: Path) -> bool:
    """transformers 5 heeds only tokenizer.json, where older models (E5-Mistral) have nothing of
    it."""
    said = codec.convert(_json(file), dict[str, Any]) if file.is_file() else {}
    return said.get("add_eos_token") is True


def _json(file: Path) -> Any:
    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{file.name} is larger than {_MOST_BYTES} bytes")
    return codec.parse_json(file.read_bytes())
