"""What a steered request is compared with: the whole model on one machine, with forward hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from mesh.types import Edit, Site

torch.set_num_threads(1)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vector_file(hidden: int = 64, seed: int = 0) -> bytes:
    return safetensors.torch.save({"vector": noise(hidden, seed=seed)})


def low_rank_file(hidden: int = 64, rank: int = 3, seed: int = 0) -> bytes:
    a, b = noise(hidden, rank, seed=seed), noise(rank, hidden, seed=seed + 1)
    return safetensors.torch.save({"a": a, "b": b / hidden})


def edit(layer: int, part: str = "", side: str = "output", *, strength: float = 1.0,
         data: bytes | None = None) -> Edit:  # fmt: skip
    return Edit(Site(layer, part, side), strength, vector_file() if data is None else data)


def changed(hidden: torch.Tensor, wanted: Edit) -> torch.Tensor:
    """The documented arithmetic."""
    tensors = safetensors.torch.load(wanted.data)
    if "vector" in tensors:
        return hidden + wanted.strength * tensors["vector"]
    return hidden + wanted.strength * ((hidden @ tensors["a"]) @ tensors["b"])


@contextmanager
def steered(model: Any, edits: Sequence[Edit]) -> Iterator[None]:
    """Ordinary Hugging Face hooks that do the same to a local model."""
    layers = model.model.layers if hasattr(model, "model") else model.transformer.h
    handles = []
    for wanted in edits:
        layer = layers[wanted.site.layer]
        module = layer.get_submodule(wanted.site.part)

        def after(_m: Any, _a: Any, output: Any, wanted: Edit = wanted) -> Any:
            if isinstance(output, tuple):
                return (changed(output[0], wanted), *output[1:])
            return changed(output, wanted)

        def before(_m: Any, args: Any, kwargs: Any, wanted: Edit = wanted) -> Any:
            if args:
                return (changed(args[0], wanted), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": changed(kwargs["hidden_states"], wanted)}

        if wanted.site.side == "input":
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        else:
            handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def load(directory: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def greedy_ids(model: Any, prompt: Sequence[int], count: int, edits: Sequence[Edit]) -> list[int]:
    with torch.no_grad(), steered(model, edits):
        out = model.generate(
            torch.tensor([list(prompt)]), attention_mask=torch.ones(1, len(prompt)).long(),
            max_new_tokens=count, do_sample=False, pad_token_id=0,
        )  # fmt: skip
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids
