"""A checkpoint's tokenizer as transformers reads it out of its files, with the chat template that
stands beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from mesh.errors import BadCheckpoint
from mesh.models.gguf.vocabulary import gguf_tokenizer
from mesh.models.manifest import Manifest

_OF_THE_WHOLE = "chat_template.json"
"""Where models for images and text have it, whose tokenizers may have none."""


def load_tokenizer(manifest: Manifest) -> Any:
    """The tokenizer of transformers; BadCheckpoint when there is none to use."""
    if manifest.gguf is not None:
        return gguf_tokenizer(manifest.gguf, manifest.cache_dir)
    directory = manifest.directory
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a plain one is all that `tokenizers` raises
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise BadCheckpoint(
            f"No tokenizer could be loaded from {directory}: {reason}.", fix=_fix(directory)
        ) from error
    if not tokenizer.chat_template and (file := directory / _OF_THE_WHOLE).is_file():
        tokenizer.chat_template = _template_of(file)
    return tokenizer


def _template_of(file: Path) -> str:
    try:
        said = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BadCheckpoint(
            f"{file} cannot be read: {error}.",
            fix="Download the file again, from the same revision as the weights.",
        ) from error
    template = said.get("chat_template") if isinstance(said, dict) else None
    return template if isinstance(template, str) else ""


def _fix(directory: Path) -> str:
    if not (directory / "tokenizer.json").exists():
        if (directory / "tekken.json").exists():
            return (
                "Use a copy of the model that has tokenizer.json, or its GGUF file: tekken.json"
                " alone is not read here."
            )
        if (directory / "tokenizer.model").exists():
            return (
                "Put the model's tokenizer.json beside its tokenizer.model, or install"
                " sentencepiece where hearthnet runs (pip install sentencepiece)."
            )
    return "Download tokenizer.json and tokenizer_config.json of the checkpoint."
