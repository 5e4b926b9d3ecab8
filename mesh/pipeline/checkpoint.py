"""A checkpoint's ends and tokenizer as the pipeline uses them. Loading blocks; use a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from mesh.errors import BadRequest, ContextTooLong, NotEnoughMemory
from mesh.models.load import Ends, load_ends
from mesh.models.manifest import read_manifest
from mesh.models.progress import Progress
from mesh.models.tokenizer import Tokenizer
from mesh.pipeline.commands import AskerOptions
from mesh.pipeline.head import rows_at_once
from mesh.pipeline.model import AskerModel, TextDecoder
from mesh.processes.headroom import ram
from mesh.processes.lifecycle import Loading
from mesh.shard.device import (
    DTYPES,
    Choice,
    choose_device,
    choose_dtype,
    choose_quant,
    headroom,
)
from mesh.shard.footprint import ends_mb
from mesh.shard.linear import choose_kernels, kept_dtype
from mesh.shard.threads import kept_threads
from mesh.types import GenerationRequest, ModelId

STORED = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""How checkpoints spell a dtype, and how everything else here does."""

DEFAULT_MAX_POSITIONS = 4096
"""Where a checkpoint does not say how long its context is."""


class CheckpointEnds:
    """`mesh.pipeline.model.ModelEnds` on one device in one dtype, whatever the wire's dtype is."""

    def __init__(self, ends: Ends, device: torch.device, dtype: torch.dtype) -> None:
        self._ends = ends
        self._device = device
        self._dtype = dtype

    def embed(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """(1, rows) token ids at positions from `position` to (1, rows, hidden)."""
        return self._ends.embed(ids.to(self._device), position)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(1, rows, hidden) after the last layer to (1, rows, vocab)."""
        return self._ends.logits(hidden.to(self._device, self._dtype))


class CheckpointText:
    """`mesh.pipeline.model.Text` over a checkpoint's tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.eos_ids = tokenizer.eos_ids
        self.reasoning_marks = tokenizer.reasoning_marks()

    def prompt_ids(self, request: GenerationRequest, most: int | None) -> list[int]:
        """The token ids of a request. Raises BadRequest, ContextTooLong beyond `most`."""
        if request.messages is not None:
            return self._tokenizer.encode_chat(request.messages, most, request.begun)
        if request.prompt is not None:
            return self._tokenizer.encode(request.prompt, most)
        ids = list(request.prompt_ids or ())
        if most is not None and len(ids) > most:
            raise ContextTooLong(
                f"the prompt has {len(ids)} tokens; the model can hold {most}.",
                fix="Shorten the prompt.",
                param="prompt",
            )
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            index = next(i for i, token in enumerate(ids) if not 0 <= token < self._vocab_size)
            raise BadRequest(
                f"token {ids[index]} at index {index} is outside the vocabulary of "
                f"{self._vocab_size}.",
                fix="Send ids of this model's own tokenizer.",
                param="prompt",
            )
        return ids

    def decoder(self) -> TextDecoder:
        """A fresh decoder for one answer."""
        return self._tokenizer.decoder()

    def token_text(self, token_id: int) -> str:
        """One token on its own, for log-probabilities."""
        return self._tokenizer.token_text(token_id)

    def vocabulary(self) -> Mapping[str, int]:
        """Every token and its id."""
        return self._tokenizer.vocabulary()


def _is_routed(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config") or {}
    return any("expert" in key and value for key, value in {**config, **text}.items())


def _said(head_rows: int) -> str:
    if head_rows == 1:
        return "head: row by row, other last bits in a batch on this machine"
    return f"head: {head_rows} rows at once, the same bits in any batch"


def _require_room(model_id: ModelId, need_mb: int, device: torch.device) -> None:
    have = headroom(device, ram())
    if need_mb > have.free_mb:
        raise NotEnoughMemory(
            f"the ends of {model_id} (embedding and head) need {need_mb} MB; {have.free_mb} MB are"
            f" free of {have.total_mb} MB ({have.bound}).",
            fix="End something else on this machine, or compute in another number format"
            " (--dtype); it is tried again.",
        )


def load_asker(
    directory: Path,
    model_id: ModelId,
    options: AskerOptions,
    begins: Callable[[Loading, Progress], object] = lambda loading, progress: None,
) -> tuple[AskerModel, list[str]]:
    """The ends and the tokenizer, with the reasons of what was chosen.

    Sets torch's thread count. `begins` is told what it takes, before any of it is taken, and where
    it is counted. Raises BadCheckpoint, UnsupportedFamily, BadValue, NotEnoughMemory.
    """
    manifest = read_manifest(directory, model_id=model_id, cache_dir=options.cache_dir)
    device = choose_device(options.device)
    stored = STORED.get(manifest.dtype, manifest.dtype)
    dtype = choose_dtype(options.dtype, stored, device.value)
    need_mb = ends_mb(manifest, dtype.value.itemsize)
    _require_room(model_id, need_mb, device.value)
    progress = Progress()
    begins(Loading(model_id, need_mb, ram().free_mb), progress)
    threads = kept_threads(options.threads, device.value, options.threads_dir)
    torch.set_num_threads(threads.value)
    quant = choose_quant(options.quant, device.value).value
    if quant is None:
        loaded_as = kept_dtype(options.dtype, stored, dtype.value, device.value)
        ends = load_ends(manifest, dtype=loaded_as, device=device.value, progress=progress)
        halved = loaded_as != dtype.value
        kernels = choose_kernels(ends, dtype.value, device.value, progress, halved=halved).reason
    else:
        from mesh.shard.compiled.head import compile_head

        dtype = Choice(torch.float32, f"dtype fp32: embedding as stored, {stored}")
        loaded_as, cache = DTYPES.get(stored, torch.float32), options.cache_dir
        ends = load_ends(
            manifest, dtype=loaded_as, device=device.value, progress=progress, defer=True
        )
        kernels = compile_head(ends, manifest.weights_sha256, cache, threads.value, quant)
    computed = CheckpointEnds(ends, device.value, dtype.value)
    model = AskerModel(
        model_id=manifest.model_id,
        weights_sha256=manifest.weights_sha256,
        total_layers=manifest.total_layers,
        hidden_size=manifest.hidden_size,
        vocab_size=manifest.vocab_size,
        max_positions=manifest.max_positions or DEFAULT_MAX_POSITIONS,
        ends=computed,
        text=CheckpointText(Tokenizer.load(manifest), manifest.vocab_size),
        routed=_is_routed(manifest.config),
        head_rows=rows_at_once(computed, manifest.hidden_size),
    )
    return model, [device.reason, dtype.reason, threads.reason, kernels, _said(model.head_rows)]
