"""Whether the graphs of a family compute what its modules do: shown on a small random twin.

The twin has the config's layers and small widths, and its graphs hold its weights as they
are: what differs then is not rounding but a misunderstanding. Chunks, single rows, a window that is
crossed, a rollback and sessions of different length are compared with transformers over all rows at
once. A verdict holds for one structure under one version of transformers and onnxruntime, and is
kept on disk when there is a cache directory.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

import onnxruntime
import torch
import transformers
from torch import nn

from mesh.errors import DeviceFailed
from mesh.models.families import Family, family_of_config
from mesh.models.hashing import read_cached, write_json_atomically
from mesh.models.load import twin_config
from mesh.models.span import Anatomy, LoadedSpan
from mesh.shard.compiled import engine, graph, parts
from mesh.shard.compiled.parts import NotCompilable
from mesh.shard.compiled.runtime import CompiledRuntime
from mesh.shard.compiled.store import dense_span
from mesh.shard.runtime import StepInput
from mesh.shard.views import layer_view
from mesh.types import LayerRange

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-4
_POSITIONS = 64
_SCHEDULE = ((0, 13), (13, 20), (20, 26), (22, 23), (23, 24), (24, 25))
"""Stretches of rows, some of them again after a rollback."""
_CHECKED_ROWS = 4
_ROUNDING = 0.1
_settled: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class _Proof:
    """What is kept of a comparison; an empty `reason` means that the graphs are right."""

    key: str
    reason: str


def require_compilable(family: Family, cache_dir: Path | None) -> None:
    """Return if graphs are right for the family's models. Raises NotCompilable with the reason.

    Blocks for up to a few seconds the first time a structure is seen.
    """
    twin = twin_config(family.config)
    structure = json.dumps(twin.to_dict(), sort_keys=True, default=str)
    digest = hashlib.sha256(structure.encode()).hexdigest()[:16]
    versions = f"{transformers.__version__}-{onnxruntime.__version__}"
    key = f"{family.model_type}-{versions}-{_own_code()}-{digest}"
    file = cache_dir / f"compiled-{key}.json" if cache_dir else None
    if key not in _settled:
        known = read_cached(file, _Proof) if file else None
        _settled[key] = known.reason if known else _verdict(twin)
        if file and not known:
            write_json_atomically(file, {"key": key, "reason": _settled[key]})
    if _settled[key]:
        raise NotCompilable(_settled[key])


@cache
def _own_code() -> str:
    """What changes with the graphs, so that no verdict outlives the code that it was given for."""
    code = hashlib.sha256()
    for module in (graph, parts, engine):
        code.update(Path(str(module.__file__)).read_bytes())
    return code.hexdigest()[:8]


def _verdict(twin: Any) -> str:
    """Why it cannot be compiled, or an empty string. Raises NotCompilable without either."""
    try:
        difference = _difference(twin)
    except NotCompilable as error:
        return str(error)
    # Whatever foreign code raises here means the same, this time: it is not shown to be right.
    except Exception as error:
        text = f"its twin failed with {type(error).__name__}: {str(error)[:200].rstrip('.')}"
        raise NotCompilable(text) from error
    reason = "" if difference <= _TOLERANCE else f"its graphs differ by {difference:.2g}"
    logger.info("proof of graphs model_type=%s verdict=%s", twin.model_type, reason or "right")
    return reason


@torch.inference_mode()
def _difference(twin: Any) -> float:
    """The largest difference, relative to the largest value."""
    loaded = _random_span(twin)
    hidden = torch.randn(1, _SCHEDULE[-1][1], loaded.config.hidden_size)
    expected = loaded.module(inputs_embeds=hidden, use_cache=False).last_hidden_state
    runtime = CompiledRuntime(dense_span(loaded), threads=1, positions=_POSITIONS)
    found = torch.empty_like(expected)
    cache, behind = runtime.new_cache(_POSITIONS), runtime.new_cache(_POSITIONS)
    runtime.forward([StepInput(behind, 0, hidden[:, :9])])
    for start, stop in _SCHEDULE:
        steps = [StepInput(cache, start, hidden[:, start:stop])]
        if stop - start == 1:
            steps.append(StepInput(behind, 9, hidden[:, 9:10]))
        found[:, start:stop], *other = runtime.forward(steps)
        for row in other:
            found[:, 9:10] = row
    largest = float((found - expected).abs().max() / expected.abs().max())
    return largest if largest == largest else float("inf")  # noqa: PLR0124 - NaN


def _random_span(twin: Any) -> LoadedSpan:
    family = family_of_config(twin)
    layers = LayerRange(0, twin.num_hidden_layers)
    config = family.slice_config(layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = family.base_class._from_config(config, dtype=torch.float32)  # noqa: SLF001
        for parameter in module.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.1)
            else:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    anatomy = Anatomy.of(module, family)
    setattr(module, anatomy.norm, nn.Identity())
    if anatomy.positions:  # the ends have added them
        module.get_submodule(anatomy.positions).weight.data.zero_()
    module.eval().requires_grad_(requires_grad=False)
    return LoadedSpan(module, config, layers, 0, 0, WeakSet(), {})


@torch.inference_mode()
def check_kernels(runtime: CompiledRuntime) -> str:
    """Compare the first layer, as this CPU computes it, with what its weights stand for.

    Also whether a row has the same bits alone, in a chunk and beside another session: what came of
    that, for people. Raises DeviceFailed when the layer is further off than rounding a row to 8 bit
    explains.
    """
    first = LayerRange(runtime.layers.start, runtime.layers.start + 1)
    seeded = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _CHECKED_ROWS, runtime.hidden_size, generator=seeded)
    view = layer_view(runtime.loaded.module, 0, 1)
    expected = view(inputs_embeds=hidden, use_cache=False).last_hidden_state
    whole, cut, other = (runtime.new_cache(_CHECKED_ROWS) for _ in range(3))
    (found,) = runtime.forward([StepInput(whole, 0, hidden)], first)
    runtime.forward([StepInput(cut, 0, hidden[:, :-1])], first)
    last = StepInput(cut, _CHECKED_ROWS - 1, hidden[:, -1:])
    (alone,) = runtime.forward([last], first)
    steps = [last, StepInput(other, 0, hidden[:, :1])] if runtime.batched else [last]
    beside = runtime.forward(steps, first)[0]
    # Relative to what the layer adds: the residual stream would hide it.
    error = float((found - expected).norm() / (expected - hidden).norm())
    if not error <= _ROUNDING:
        raise DeviceFailed(
            f"Layer {first.start} in few bits is off by {error:.0%} on this CPU.",
            fix="Serve it unquantised (--quant none), and report the CPU and this line.",
        )
    if torch.equal(alone, found[:, -1:]) and torch.equal(beside, alone):
        return "rows: the same bits in any chunk and batch"
    return "rows: other last bits in other chunks or batches on this CPU"
