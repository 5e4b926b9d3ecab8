"""Put the tensors of a checkpoint's files into an empty module.

They are mapped and not read where device and dtype allow, and decoded one by one where a file holds
other numbers than the module computes with; buffers that no file holds are computed as transformers
computes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from transformers import PreTrainedModel

from mesh.errors import BadCheckpoint
from mesh.models.coded.numbers import decoded, layer_of_latents
from mesh.models.convert import Unread, convert_tensors
from mesh.models.gguf.decoding import decode, is_plain
from mesh.models.header import TensorEntry
from mesh.models.pages import Pages
from mesh.models.partial import require_present
from mesh.models.progress import Progress
from mesh.models.stored_dtypes import STORED_DTYPES


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and dtype that weights are wanted in."""

    dtype: torch.dtype
    device: torch.device
    attn_implementation: str = "sdpa"


def fill(
    module: Any,
    names: Mapping[str, TensorEntry],
    placement: Placement,
    progress: Progress | None = None,
    *,
    same: Mapping[str, str],
    absent: tuple[str, ...] = (),
    later: Collection[str] = (),
) -> tuple[WeakSet[Pages], dict[str, str]]:
    """Put the stored tensors into `module`; returns the files that are mapped for it, and the
    hashes of the weights whose bytes are as stored.

    `same` maps a name that may be absent to its equal; what begins with one of `absent`, or is
    one of `later`, is not expected. Raises WeightsMissing when a partial checkpoint lacks one, and
    BadCheckpoint when they do not fit.
    """
    pages: WeakSet[Pages] = WeakSet()
    progress = progress or Progress()
    progress.begin("reading", sum(entry.nbytes for entry in names.values()))
    wide = getattr(module, "_keep_in_fp32_modules_strict", None) or ()

    def wanted(name: str) -> torch.dtype:
        return torch.float32 if any(part in name for part in wide) else placement.dtype

    read = _read_tensors(names, wanted, placement.device, pages, progress)
    weights = convert_tensors(module, read)
    are_plain = all(map(is_plain, names.values()))
    sha256 = {}
    for name, tensor in weights.items():
        target = wanted(name) if tensor.is_floating_point() else tensor.dtype
        entry = names.get(name)
        if entry and read.get(name) is tensor and target == tensor.dtype and is_plain(entry):
            sha256[name] = entry.sha256
        weights[name] = tensor.to(device=placement.device, dtype=target)
        if are_plain or (entry and is_plain(entry)):  # the others were counted as they were read
            progress.add(tensor.nbytes)
    for name, other in same.items():
        if name not in weights and other in weights:
            weights[name] = weights[other]
    _assign(module, weights, lambda name: name in later or name.startswith(absent))
    module.requires_grad_(requires_grad=False)
    return pages, sha256


def _assign(module: Any, weights: dict[str, torch.Tensor], may_lack: Callable[[str], bool]) -> None:
    """Make `weights` those of `module`. Raises BadCheckpoint where they are not just those."""
    try:
        missing, unexpected = module.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:
        raise BadCheckpoint(
            f"Weights do not fit the config: {error}.", fix="Download config and weights again."
        ) from error
    missing = [name for name in missing if not may_lack(name)]
    if missing or unexpected:
        what, example = ("lack", missing[0]) if missing else ("hold the unknown", unexpected[0])
        raise BadCheckpoint(
            f"The weights {what} tensor {example} (of {len(missing) + len(unexpected)} that do not"
            " match the config).",
            fix="Download config and weights again, from the same revision.",
        )


def stored_parts(entry: TensorEntry) -> dict[str, torch.Tensor]:
    """What the codes of `entry` and what belongs to them are, mapped. Raises BadCheckpoint."""
    assert entry.coding is not None  # noqa: S101 - who asks has looked
    return {
        what: mapped_file(part.file, [part]).tensor(
            STORED_DTYPES[part.dtype], part.shape, part.offset
        )
        for what, part in entry.coding.parts.items()
    }


def _decode_codes(
    entry: TensorEntry, dtype: torch.dtype, device: torch.device, progress: Progress
) -> torch.Tensor:
    assert entry.coding is not None  # noqa: S101 - who asks has looked
    if entry.coding.kind in ("latent", "rows"):
        stored = entry.coding.parts
        parts = {what: decode(mapped_file(p.file, [p]), p, dtype) for what, p in stored.items()}
        are_rows = entry.coding.kind == "rows"
        numbers = torch.cat([*parts.values()], -2) if are_rows else layer_of_latents(**parts)
    else:
        numbers = decoded(entry, stored_parts(entry), dtype)
    progress.add(entry.nbytes)
    return numbers.to(device)


def without_empty_biases(
    names: Mapping[str, TensorEntry], expected: Collection[str]
) -> dict[str, TensorEntry]:
    """`names` without biases of zeros that the model has none of: GPTQ's writers give one to every
    layer. Raises BadCheckpoint."""
    return {
        name: entry
        for name, entry in names.items()
        if name in expected or not _is_empty_bias(entry, names.get(f"{name[:-4]}weight"))
    }


def _is_empty_bias(entry: TensorEntry, weight: TensorEntry | None) -> bool:
    is_of_gptq = weight is not None and weight.coding is not None and weight.coding.kind == "gptq"
    if not (is_of_gptq and entry.name.endswith(".bias") and entry.present):
        return False
    area = mapped_file(entry.file, [entry])
    return not area.tensor(STORED_DTYPES[entry.dtype], entry.shape, entry.offset).any()


def mapped_file(file: Path, entries: Iterable[TensorEntry]) -> Pages:
    """The file with these tensors. Raises BadCheckpoint when it cannot be read or is too short."""
    try:
        area = Pages.of_file(file)
    except (OSError, ValueError) as error:
        raise BadCheckpoint(
            f"{file} cannot be read: {error}.", fix="Copy or download the file again."
        ) from error
    for entry in entries:
        if entry.offset + entry.nbytes > len(area):
            raise BadCheckpoint(
                f"{file} ends before its tensor {entry.name}.",
                fix="Copy or download the file again.",
            )
    return area


def _read_tensors(
    names: Mapping[str, TensorEntry],
    wanted: Callable[[str], torch.dtype],
    device: torch.device,
    pages: WeakSet[Pages],
    progress: Progress,
) -> dict[str, torch.Tensor | Unread]:
    """Codes are left unread until they are wanted: of many that become one tensor, such as those
    of experts, no more than that is there twice."""
    require_present(names.values())
    by_file: dict[Path, list[tuple[str, TensorEntry]]] = defaultdict(list)
    read: dict[str, torch.Tensor | Unread] = {}
    for name, entry in names.items():
        if entry.coding is None:
            by_file[entry.file].append((name, entry))
        else:
            read[name] = partial(_decode_codes, entry, wanted(name), device, progress)
    for file, entries in by_file.items():
        area = mapped_file(file, (entry for _, entry in entries))
        pages.add(area)
        for name, entry in entries:
            if is_plain(entry):
                read[name] = area.tensor(STORED_DTYPES[entry.dtype], entry.shape, entry.offset)
            else:
                read[name] = decode(area, entry, wanted(name))
                progress.add(entry.nbytes)
                area.forget()
    return read


def compute_buffers(module: Any, device: torch.device) -> None:
    """Give every buffer that is not stored (rotary frequencies, embedding scales) its value, before
    its weights are put in, some of which that spoils."""
    base = {}  # of each module the innermost model that it is in, as transformers asks that one
    for model in module.modules():
        if isinstance(model, PreTrainedModel):
            base.update(dict.fromkeys(model.modules(), model))
    for owner in list(module.modules()):
        names: Iterable[str] = owner._non_persistent_buffers_set  # noqa: SLF001 - no accessor
        empty = [name for name in names if owner._buffers[name] is not None]  # noqa: SLF001
        for name in empty:
            owner._buffers[name] = torch.empty_like(owner._buffers[name], device=device)  # noqa: SLF001
        if empty:
            base[owner]._init_weights(owner)  # noqa: SLF001 - as transformers does
    for model in dict.fromkeys(base.values()):  # some layers' are computed for all of them
        model._init_weights(model)  # noqa: SLF001
