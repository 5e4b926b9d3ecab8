"""What the shard tests run on: small random checkpoints, loaded once per family and layer range."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from mesh.models.load import load_span
from mesh.models.manifest import Manifest, read_manifest
from mesh.shard.runtime import KeyValueCache, Runtime, StepInput
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange
from tests.checkpoints import make_checkpoint

if TYPE_CHECKING:
    from mesh.shard.compiled.canary import CanaryCheck
    from mesh.shard.weight_check import WeightCheck

torch.set_num_threads(1)

CPU = torch.device("cpu")
HIDDEN = 64
WHOLE = LayerRange(0, 4)
_DIRECTORY = tempfile.TemporaryDirectory(prefix="hearthnet-shards-")


@cache
def checkpoint(family: str = "llama", layers: int = 4) -> Manifest:
    """The manifest of a random fp32 checkpoint. A family may say how many heads it has, how many
    have keys, how wide they are, and what its window is: ``qwen3/5x1``, ``gemma3/4x2x160x150``."""
    directory = Path(_DIRECTORY.name) / f"{family.replace('/', '-')}-{layers}"
    family, _, heads = family.partition("/")
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window")
    changes = dict(zip(names, map(int, heads.split("x")), strict=False)) if heads else {}
    return read_manifest(make_checkpoint(directory, family, layers=layers, **changes))


def runtime(
    family: str = "llama",
    layers: LayerRange = WHOLE,
    *,
    dtype: torch.dtype = torch.float32,
    batch_invariant: bool = False,
) -> TorchRuntime:
    """A fresh runtime of some layers."""
    loaded = load_span(checkpoint(family), layers, dtype=dtype, device=CPU)
    return TorchRuntime(loaded, device=CPU, dtype=dtype, batch_invariant=batch_invariant)


@contextmanager
def plain_kernels() -> Iterator[None]:
    """What is loaded meanwhile is not packed."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def of_module(module: Any) -> TorchRuntime:
    """A runtime of a Hugging Face base model made by hand."""
    layers = LayerRange(0, module.config.num_hidden_layers)
    loaded: Any = SimpleNamespace(
        module=module, config=module.config, layers=layers, pages=WeakSet(), sha256={}
    )
    return TorchRuntime(loaded, device=CPU, dtype=torch.float32)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    """(1, count, HIDDEN) of noise."""
    return torch.randn(1, count, HIDDEN, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def whole_model(family: str, hidden: torch.Tensor, layers: int = 4) -> torch.Tensor:
    """Hugging Face's own code and masks over all rows at once, without a cache."""
    loaded = load_span(
        checkpoint(family, layers), LayerRange(0, layers), dtype=torch.float32, device=CPU,
        attn_implementation="eager",
    )  # fmt: skip
    positions = torch.arange(hidden.shape[1])[None]
    output: torch.Tensor = loaded.module(
        inputs_embeds=hidden, position_ids=positions, use_cache=False
    ).last_hidden_state
    return output


def step(span: Runtime, cache: KeyValueCache, position: int, hidden: torch.Tensor) -> torch.Tensor:
    """One session's step, alone."""
    return span.forward([StepInput(cache, position, hidden)])[0]


def in_stretches(spans: Sequence[Runtime], hidden: torch.Tensor) -> torch.Tensor:
    """What `spans` behind each other make of 104 rows: a chunk, a chunk behind a past that crosses
    the window, a rejected draft, single rows."""
    caches = [span.new_cache(256) for span in spans]
    found = torch.empty_like(hidden)
    for start, stop in [(0, 50), (50, 90), (90, 98), (91, 92), (92, 93), (93, 104)]:
        part = hidden[:, start:stop]
        for span, held in zip(spans, caches, strict=True):
            part = step(span, held, start, part)
        found[:, start:stop] = part
    return found


def changed_in_a_round(checking: WeightCheck | CanaryCheck, size: int = 1 << 20) -> set[str]:
    """The weights that have changed, after all of them were looked at, `size` at a time."""
    rounds, found = checking.rounds, set()
    while checking.rounds == rounds:
        found.add(checking.step(size))
    return {name for name in found if name is not None}


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest deviation, relative to the largest value expected."""
    return float((found - expected).abs().max() / expected.abs().max())
