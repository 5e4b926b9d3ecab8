"""What the examples share: opening a model here or on the mesh, and finding its parts.

Set NDIF_HOST to the API of any node of yours (http://127.0.0.1:8420), and NDIF_API_KEY to a key of
it where it wants one. With --local the same code runs on this machine alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from nnsight.modeling import huggingface
from nnsight.modeling.transformers import TransformersModel

TASK = "text-generation"


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that every example has."""
    made = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    made.add_argument("--model", default="builtin", help="a hub id, a directory, or builtin")
    made.add_argument("--local", action="store_true", help="run here, without the mesh")
    made.add_argument("--json", action="store_true", help="print numbers for a script")
    return made


def prompts_parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of the examples that compare two prompts."""
    made = parser(description)
    made.add_argument("--clean", default="Once there was a girl. Her name was Anna, and")
    made.add_argument("--corrupted", default="Once there was a boy. His name was Ben, and")
    made.add_argument("--answers", nargs=2, default=["she", "he"], metavar=("CLEAN", "CORRUPTED"))
    return made


def show(rows: torch.Tensor, texts: list[str]) -> None:
    """A table: (layers, positions) numbers over the tokens' texts."""
    for number, row in enumerate(rows):
        print(f"layer {number:3}  " + " ".join(f"{value:5.2f}" for value in row))
    print("           " + " ".join(f"{text.strip()[:5]:>5}" for text in texts))


def open_model(name: str, *, local: bool) -> TransformersModel:
    """The model: with its weights when `local`, else its outline from config and tokenizer."""
    directory = name
    if name == "builtin":
        from mesh.models.builtin import checkpoint_dir

        directory = str(checkpoint_dir())
    if Path(directory).is_dir():
        # nnsight asks the hub for a model's full name; a directory's is what the node calls it.
        huggingface._ID_CACHE[directory] = name if name == "builtin" else Path(directory).name
    if local:
        return TransformersModel(directory, task=TASK, dispatch=True, dtype=torch.float32)
    return TransformersModel(directory, task=TASK)


def parts(model: TransformersModel) -> tuple[Any, Any, Any]:
    """The decoder layers, the final norm and the output head, as the family calls them."""
    if hasattr(model, "transformer"):  # GPT-2
        return model.transformer.h, model.transformer.ln_f, model.lm_head
    text = getattr(model.model, "language_model", model.model)  # of a model for images as well
    return text.layers, text.norm, model.lm_head


def token(model: TransformersModel, word: str) -> int:
    """The id of a word that is one token, with the space before it."""
    ids = model.tokenizer(" " + word, add_special_tokens=False).input_ids
    if len(ids) != 1:
        raise SystemExit(f"{word!r} is {len(ids)} tokens; choose one that is a single token.")
    return int(ids[0])


def words(model: TransformersModel, prompt: str) -> list[str]:
    """The prompt's tokens as texts."""
    return [model.tokenizer.decode([each]) for each in model.tokenizer(prompt).input_ids]
