"""Run a checkpoint whole and in parts over one schedule, and keep the logits of every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, DynamicCache

from mesh.models.entries import ENTRIES, FamilyEntry
from mesh.models.load import load_ends, load_span
from mesh.models.mamba import name_of_cache
from mesh.models.manifest import Manifest
from mesh.models.span_cache import SpanCache
from mesh.types import LayerRange
from tests.checkpoints import whole_class

CPU = torch.device("cpu")


def prompt_chunks(rows: Sequence[int], vocab: int = 384) -> list[torch.Tensor]:
    """Seeded prompt ids, cut into chunks of these many rows."""
    ids = torch.randint(4, vocab, (1, sum(rows)), generator=torch.Generator().manual_seed(7))
    return list(torch.split(ids, list(rows), dim=1))


@torch.no_grad()
def run_whole(
    directory: Path, chunks: Sequence[torch.Tensor], decode: int
) -> tuple[list[torch.Tensor], list[int]]:
    """Hugging Face alone: logits (1, rows, vocab) of each step, and the greedy ids it decoded."""
    config = AutoConfig.from_pretrained(directory)
    kind = whole_class(config.model_type)
    model = kind.from_pretrained(directory, dtype=torch.float32).eval()
    for part in model.modules():
        if type(part).__name__ == "NemotronHMamba2Mixer":  # bounds the steps of several rows only
            part.time_step_limit = (0.0, math.inf)
    cache = DynamicCache(config=model.config.get_text_config())
    position = 0

    def step(ids: torch.Tensor) -> torch.Tensor:
        nonlocal position
        # Not every model asks its cache where a chunk stands.
        places = torch.arange(position, position + ids.shape[1]).unsqueeze(0)
        position += ids.shape[1]
        held = {name_of_cache(model): cache}
        logits: torch.Tensor = model(ids, position_ids=places, **held).logits
        return logits

    rows = [chunk.shape[1] for chunk in chunks]
    is_adapted = ENTRIES.get(config.model_type, FamilyEntry()).adapt is not None
    # Some forget a chunk when the next comes.
    whole = torch.cat(list(chunks), 1)
    steps = [*torch.split(step(whole), rows, 1)] if is_adapted else [*map(step, chunks)]
    ids: list[int] = []
    for _ in range(decode):
        ids.append(int(steps[-1][0, -1].argmax()))
        steps.append(step(torch.tensor([[ids[-1]]])))
    return steps, ids


def aligned(module: nn.Module) -> None:
    """Copy its weights out of their file: some CPUs add one row up in another order where a weight
    begins at an odd address."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


@torch.no_grad()
def run_parts(
    manifest: Manifest,
    cuts: Sequence[int],
    chunks: Sequence[torch.Tensor],
    decode: int,
    *,
    copied: bool = False,
) -> tuple[list[torch.Tensor], list[int]]:
    """The same from spans between `cuts` and the ends, whose weights are `copied` where another
    file is to give the same bits."""
    ends = load_ends(manifest, dtype=torch.float32, device=CPU)
    spans = [
        load_span(manifest, LayerRange(start, stop), dtype=torch.float32, device=CPU)
        for start, stop in pairwise(cuts)
    ]
    for module in (ends, *(span.module for span in spans)) if copied else ():
        aligned(module)
    caches = [SpanCache(span.config) for span in spans]
    position = 0

    def step(ids: torch.Tensor) -> torch.Tensor:
        nonlocal position
        hidden = ends.embed(ids, position)
        places = torch.arange(position, position + ids.shape[1]).unsqueeze(0)
        for span, cache in zip(spans, caches, strict=True):
            hidden = span.module(
                inputs_embeds=hidden, position_ids=places, past_key_values=cache, use_cache=True
            ).last_hidden_state
        position += ids.shape[1]
        return ends.logits(hidden)

    steps = [step(chunk) for chunk in chunks]
    ids: list[int] = []
    for _ in range(decode):
        ids.append(int(steps[-1][0, -1].argmax()))
        steps.append(step(torch.tensor([[ids[-1]]])))
    return steps, ids
