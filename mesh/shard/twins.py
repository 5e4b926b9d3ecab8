"""Whether another way to compute a family's layers is right: shown on a small random twin.

The twin has the config's layers and small widths, and is computed in fp32 with its weights as they
are: what differs then is not rounding but a misunderstanding. Chunks, single rows, a window that is
crossed, a rollback and sessions of different length are compared with transformers over all rows at
once. A verdict holds for one structure, one version of what was named and one state of this
package's code, and is kept on disk when there is a cache directory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import transformers
from torch import nn

from mesh.models.anatomy import Anatomy
from mesh.models.empty import Bounded
from mesh.models.families import Family, family_of_config
from mesh.models.proof import largest_difference, structure_of, twin_config
from mesh.models.rope import short_positions
from mesh.models.row_form import RowForm
from mesh.models.span import LoadedSpan, bare_of_ends
from mesh.models.verdicts import hash_of, settled_once
from mesh.shard.compiled.parts import NotCompilable
from mesh.shard.runtime import Runtime, StepInput
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange

logger = logging.getLogger(__name__)

POSITIONS = 64
"""Of a twin's sessions."""

_TOLERANCE, _MOST = 1e-4, 2e-3
_TIMES = 10
"""As far from all rows at once as modules are that take the same stretches: models of many layers
may make much of the last bits (Gemma 4). No further than `_MOST`, what was misread is."""
_SCHEDULE = ((0, 13), (13, 20), (20, 26), (22, 23), (23, 24), (24, 25))
"""Stretches of rows, some of them again after a rollback."""
settled: dict[str, str] = {}
"""The verdicts that this process has reached or read, by their keys; empty: none is settled."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute layers: its name, what versions it depends on, and how it is had.

    `subject` is what differs when it is wrong. `runtime_of` may raise NotCompilable.
    """

    name: str
    subject: str
    versions: str
    runtime_of: Callable[[LoadedSpan], Runtime]


def require_right(
    way: Way, family: Family, cache_dir: Path | None, positions: int | None = None
) -> None:
    """Return if `way` is right for the family's models in sessions of at most `positions` (None:
    of any length). Raises NotCompilable with the reason.

    Blocks for up to a few seconds the first time a structure is seen.
    """
    twin = twin_config(family.config, positions)
    versions = f"{transformers.__version__}-{way.versions}"
    code = hash_of(sorted(Path(__file__).parent.rglob("*.py")))
    key = f"{way.name}-{family.model_type}-{versions}-{code}-{structure_of(twin)}"
    file = cache_dir / f"{key}.json" if cache_dir else None
    if reason := settled_once(settled, key, file, lambda: _verdict(way, twin)):
        raise NotCompilable(reason)


def _verdict(way: Way, twin: Any) -> str:
    """Why it is not right, or an empty string. Raises NotCompilable without either."""
    try:
        difference, tolerance = _difference(way.runtime_of, twin), _TOLERANCE
        if tolerance < difference <= _MOST:
            tolerance = max(tolerance, _TIMES * _difference(_by_modules, twin))
    except NotCompilable as error:
        return str(error)
    # Whatever foreign code raises here means the same, this time: it is not shown to be right.
    except Exception as error:
        text = f"its twin failed with {type(error).__name__}: {str(error)[:200].rstrip('.')}"
        raise NotCompilable(text) from error
    reason = "" if difference <= tolerance else f"its {way.subject} differ by {difference:.2g}"
    logger.info(
        "proof of %s layers model_type=%s verdict=%s", way.name, twin.model_type, reason or "right"
    )
    return reason


def _by_modules(loaded: LoadedSpan) -> Runtime:
    return TorchRuntime(loaded, device=torch.device("cpu"), dtype=torch.float32)


@torch.inference_mode()
def _difference(runtime_of: Callable[[LoadedSpan], Runtime], twin: Any) -> float:
    """The largest difference, relative to the largest value."""
    loaded = _random_span(twin)
    seeded = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _SCHEDULE[-1][1], RowForm.of(loaded.module).size, generator=seeded)
    expected = loaded.module(inputs_embeds=hidden, use_cache=False).last_hidden_state
    runtime = runtime_of(loaded)
    found = torch.empty_like(expected)
    cache, behind = runtime.new_cache(POSITIONS), runtime.new_cache(POSITIONS)
    runtime.forward([StepInput(behind, 0, hidden[:, :9])])
    for start, stop in _SCHEDULE:
        steps = [StepInput(cache, start, hidden[:, start:stop])]
        if stop - start == 1:
            steps.append(StepInput(behind, 9, hidden[:, 9:10]))
        found[:, start:stop], *other = _outputs(runtime, steps)
        for row in other:
            found[:, 9:10] = row
    difference = largest_difference(found, expected)
    if 0 < (short := short_positions(twin)) < hidden.shape[1]:
        first = loaded.module(inputs_embeds=hidden[:, :short], use_cache=False).last_hidden_state
        brief = runtime.new_cache(short)
        runtime.forward([StepInput(brief, 0, hidden[:, : short - 1])])
        last = (brief, short - 1), (cache, _SCHEDULE[-1][0])
        both = [StepInput(each, at, hidden[:, at : at + 1]) for each, at in last]
        ends = torch.cat([first[:, -1:], expected[:, -1:]])
        difference = max(difference, largest_difference(torch.cat(_outputs(runtime, both)), ends))
    return difference


def _outputs(runtime: Runtime, steps: Sequence[StepInput]) -> list[torch.Tensor]:
    """Of all of them together where it computes so."""
    if runtime.batch_rows:
        return runtime.forward(steps)
    return [runtime.forward([step])[0] for step in steps]


def _random_span(twin: Any) -> LoadedSpan:
    family = family_of_config(twin)
    layers = LayerRange(0, twin.num_hidden_layers)
    config = family.slice_config(layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with Bounded():
            module = family.base_class._from_config(config, dtype=torch.float32)  # noqa: SLF001
        for parameter in module.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.1)
            else:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        stored = module.state_dict().keys()
        for name, buffer in module.named_buffers():
            if name in stored:
                buffer.add_(torch.randn_like(buffer), alpha=0.1)
    anatomy = Anatomy.of(module, family)
    bare_of_ends(module, family, anatomy, 0)
    module.eval().requires_grad_(requires_grad=False)
    return LoadedSpan(module, config, layers, 0, 0, WeakSet(), {})
