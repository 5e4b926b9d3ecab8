"""Put the tensors of a checkpoint's files into an empty module.

They are mapped and not read where device and dtype allow; buffers that no file holds are computed
as transformers computes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch

from mesh.errors import BadCheckpoint
from mesh.models.convert import convert_tensors
from mesh.models.header import TensorEntry
from mesh.models.pages import Pages
from mesh.models.partial import require_present
from mesh.models.progress import Progress


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and dtype that weights are wanted in."""

    dtype: torch.dtype
    device: torch.device
    attn_implementation: str = "sdpa"


STORED_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
"""By their names in safetensors files."""


def fill(
    module: Any,
    names: Mapping[str, TensorEntry],
    placement: Placement,
    progress: Progress | None = None,
    *,
    same: Mapping[str, str],
    absent: str | None = None,
) -> tuple[WeakSet[Pages], dict[str, str]]:
    """Put the stored tensors into `module`; returns the files that are mapped for it, and the
    hashes of the weights whose bytes are as stored.

    `same` maps a name that may be absent to its equal; what begins with `absent` is not expected.
    Raises WeightsMissing when a partial checkpoint lacks one, and BadCheckpoint when they do not
    fit.
    """
    _compute_buffers(module, placement.device)
    pages: WeakSet[Pages] = WeakSet()
    mapped = _map_tensors(names, pages)
    weights = convert_tensors(module, mapped)
    sha256 = {}
    progress = progress or Progress()
    progress.begin("reading", sum(tensor.nbytes for tensor in weights.values()))
    wide = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    for name, tensor in weights.items():
        dtype = torch.float32 if any(part in name for part in wide) else placement.dtype
        target = dtype if tensor.is_floating_point() else tensor.dtype
        if mapped.get(name) is tensor and target == tensor.dtype:
            sha256[name] = names[name].sha256
        weights[name] = tensor.to(device=placement.device, dtype=target)
        progress.add(tensor.nbytes)
    for name, other in same.items():
        if name not in weights and other in weights:
            weights[name] = weights[other]
    try:
        missing, unexpected = module.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:
        raise BadCheckpoint(
            f"Weights do not fit the config: {error}.", fix="Download config and weights again."
        ) from error
    missing = [name for name in missing if absent is None or not name.startswith(absent)]
    if missing or unexpected:
        what, example = ("lack", missing[0]) if missing else ("hold the unknown", unexpected[0])
        raise BadCheckpoint(
            f"The weights {what} tensor {example} (of {len(missing) + len(unexpected)} that do not"
            " match the config).",
            fix="Download config and weights again, from the same revision.",
        )
    module.requires_grad_(requires_grad=False)
    return pages, sha256


def _map_tensors(
    names: Mapping[str, TensorEntry], pages: WeakSet[Pages]
) -> dict[str, torch.Tensor]:
    require_present(names.values())
    by_file: dict[Any, list[tuple[str, TensorEntry]]] = defaultdict(list)
    for name, entry in names.items():
        by_file[entry.file].append((name, entry))
    mapped: dict[str, torch.Tensor] = {}
    for file, entries in by_file.items():
        try:
            area = Pages.of_file(file)
        except (OSError, ValueError) as error:
            raise BadCheckpoint(
                f"{file} cannot be read: {error}.", fix="Copy or download the file again."
            ) from error
        pages.add(area)
        for name, entry in entries:
            if entry.offset + entry.nbytes > len(area):
                raise BadCheckpoint(
                    f"{file} ends before its tensor {entry.name}.",
                    fix="Copy or download the file again.",
                )
            mapped[name] = area.tensor(STORED_DTYPES[entry.dtype], entry.shape, entry.offset)
    return mapped


def _compute_buffers(module: Any, device: torch.device) -> None:
    """Give every buffer that is not stored (rotary frequencies, embedding scales) its value."""
    for owner in list(module.modules()):
        names: Iterable[str] = owner._non_persistent_buffers_set  # noqa: SLF001 - no accessor
        empty = [name for name in names if owner._buffers[name] is not None]  # noqa: SLF001
        for name in empty:
            owner._buffers[name] = torch.empty_like(owner._buffers[name], device=device)  # noqa: SLF001
        if empty:
            module._init_weights(owner)  # noqa: SLF001 - as transformers does
