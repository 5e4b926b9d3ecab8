"""Build a span or the ends of a checkpoint as small Hugging Face modules, and fill them.

A span is the base model of a cut config without embeddings and final norm; the ends are those, and
the causal model's own head code. Only their tensors are read. Files are memory-mapped: on the CPU,
a tensor wanted in the dtype it is stored in is used where it lies in the page cache, without a
copy; any other is converted into memory of its own and the mapping is dropped. Whether the family
may be cut at all is decided in `load` and `families`, not here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from mesh.errors import BadCheckpoint
from mesh.models.anatomy import Anatomy, base_of
from mesh.models.coded.scheme import is_decoded
from mesh.models.empty import empty_model
from mesh.models.end_names import is_head, is_inputs
from mesh.models.ends import Ends
from mesh.models.families import Family, narrow_config
from mesh.models.filling import Placement, compute_buffers, fill, without_empty_biases
from mesh.models.gguf.embedding import stored_embedding
from mesh.models.header import TensorEntry
from mesh.models.late_experts import Late, late_experts, stacks_of
from mesh.models.manifest import Manifest
from mesh.models.pages import Pages
from mesh.models.progress import Progress
from mesh.models.row_form import taking_rows
from mesh.models.streams import idle
from mesh.types import LayerRange


@dataclass(frozen=True, slots=True)
class LoadedSpan:
    """Some layers of a model, ready to run.

    Call `module(inputs_embeds=(1, rows, hidden), position_ids=(1, rows), past_key_values=cache,
    use_cache=True)`; its `last_hidden_state` (1, rows, hidden) is what the last of `layers` gives,
    without the final norm. `config` is the span's own: layer 0 is `layers.start`; build caches from
    it. `bytes_read` and `tensors_read` count what was taken from the checkpoint's files; `pages`
    are those in which its weights lie, as far as it is known; `sha256` has, by their names in
    `module`, the hashes of the weights whose bytes are those of the file. `deferred` has, by their
    names in `module`, the weights that it lacks yet, on the meta device; `late` those of experts.
    """

    module: Any
    config: Any
    layers: LayerRange
    bytes_read: int
    tensors_read: int
    pages: WeakSet[Pages]
    sha256: Mapping[str, str]
    deferred: Mapping[str, TensorEntry] = field(default_factory=dict)
    late: Late = field(default_factory=dict)


class _NoPositions(nn.Module):
    """Stands for a table of positions that the ends have already added."""

    def forward(self, place: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros((), device=place.device)  # of no shape, and so of any dtype


def empty_base(family: Family, placement: Placement) -> Any:
    """The base model of the whole, without weights."""
    return empty_model(family.base_class, family.bare_config(), placement)


def build_span(
    manifest: Manifest,
    family: Family,
    layers: LayerRange,
    placement: Placement,
    progress: Progress | None = None,
    *,
    defer: bool = False,
    whole: Any = None,
) -> LoadedSpan:
    """The module of these layers with its weights; BadCheckpoint when tensors are missing.

    With `defer`, linear layers in GGUF's blocks, and experts, are left without their weights.
    `whole` is the `empty_base`, for who builds several; it stays as it is.
    """
    base = empty_base(family, placement) if whole is None else whole
    anatomy = Anatomy.of(base, family)
    base = _only(base, anatomy, layers, is_shared=whole is not None)
    bare_of_ends(base, family, anatomy, layers.start)
    stored = {
        _shifted(entry.name, manifest.layer_prefix, anatomy.layers, layers.start): entry
        for entry in manifest.layer_weights(layers)
    }
    names = _used(base, stored)
    deferred = _stored_in_blocks(base, names) if defer else {}
    late = late_experts(base, names) if defer else {}
    not_now = {*deferred, *(name for entries in late.values() for name in entries)}
    now = {name: entry for name, entry in names.items() if name not in not_now}
    later = {*deferred, *stacks_of(base, late)}
    compute_buffers(base, placement.device)
    pages, sha256 = fill(base, now, placement, progress, same={}, later=later)
    narrow_config(base.config, layers)
    size = sum(entry.nbytes for entry in names.values())
    return LoadedSpan(base, base.config, layers, size, len(names), pages, sha256, deferred, late)


def bare_of_ends(base: Any, family: Family, anatomy: Anatomy, first_layer: int) -> None:
    """Make `base`, whose layers are those from `first_layer` on, take and give what goes from hop
    to hop."""
    if family.entry.adapt is not None:
        family.entry.adapt(base)
    for part in filter(None, (anatomy.norm, anatomy.first)):
        setattr(base, part, nn.Identity())
    if anatomy.positions:
        setattr(base, anatomy.positions, _NoPositions())
    setattr(base, anatomy.embedding, None)
    if not family.row_form.is_plain:
        for part in family.entry.layer_inputs:
            setattr(base, part, None)
        if streams := family.entry.streams:
            for part in (*streams.spread, *streams.gathered):
                setattr(base, part, idle(getattr(base, part)))
        taking_rows(base, family.row_form, first_layer, anatomy.layers)


def _only(whole: Any, anatomy: Anatomy, layers: LayerRange, *, is_shared: bool) -> Any:
    """The whole with these of its layers, which count from 0 then."""
    base = copy.copy(whole)
    kept = getattr(whole, anatomy.layers)[layers.start : layers.stop]
    # A copied module shares its dict of children; this one needs its own.
    base._modules = {**whole._modules, anatomy.layers: kept}  # noqa: SLF001
    base = copy.deepcopy(base) if is_shared else base
    for module in getattr(base, anatomy.layers).modules():
        for name in ("layer_idx", "layer_id", "kv_shared_layer_index"):
            if isinstance(number := getattr(module, name, None), int):
                setattr(module, name, number - layers.start)
    return base


def _stored_in_blocks(base: Any, names: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Of these the weights of linear layers that are in blocks."""
    linears = {
        f"{name}.weight": module
        for name, module in base.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
    }
    found = {
        name: entry for name, entry in names.items() if name in linears and is_decoded(entry.dtype)
    }
    for name, entry in found.items():
        expected = tuple(linears[name].weight.shape)
        if entry.shape != expected:
            raise BadCheckpoint(
                f"Weights do not fit the config: {entry.name} is {list(entry.shape)}, and should be"
                f" {list(expected)}.",
                fix="Download the file again.",
            )
    return found


def build_ends(
    manifest: Manifest,
    family: Family,
    placement: Placement,
    progress: Progress | None = None,
    *,
    defer: bool = False,
) -> Ends:
    """Embedding, norm and head with their weights; BadCheckpoint when tensors are missing.

    With `defer`, an embedding in GGUF's blocks stays in them, and such a head has no weight.
    """
    causal = empty_model(family.causal_class, family.ends_config(), placement)
    _, base = base_of(causal)
    anatomy = Anatomy.of(base, family)
    setattr(base, anatomy.layers, nn.ModuleList())
    filled = _fill_ends(causal, manifest, anatomy, placement, progress, defer=defer)
    size = sum(entry.nbytes for entry in filled.names.values())
    return Ends(causal, anatomy, family, size, filled.deferred_head)


def build_skeleton(manifest: Manifest, family: Family, placement: Placement) -> Any:
    """The whole causal model, the ends with their weights, every layer on the meta device.

    Its weights may be changed: those that are only equal are not one.
    """
    causal = empty_model(family.causal_class, copy.deepcopy(family.config), placement)
    anatomy = Anatomy.of(base_of(causal)[1], family)
    _fill_ends(causal, manifest, anatomy, placement, apart=True)
    return causal


def _fill_ends(
    causal: Any,
    manifest: Manifest,
    anatomy: Anatomy,
    placement: Placement,
    progress: Progress | None = None,
    *,
    defer: bool = False,
    apart: bool = False,
) -> _FilledEnds:
    """Read the ends into `causal`, whose layers (if any) stay as they are; what was read.

    A head that equals the embedding lies in its memory; with `apart` only where the config has it
    so.
    """
    base_name, base = base_of(causal)
    prefix = f"{base_name}."
    names = _used(causal, _named_ends(manifest, prefix))
    embedding = f"{prefix}{anatomy.embedding}.weight"
    head = next(n for n, m in causal.named_modules() if m is causal.get_output_embeddings())
    head = f"{head}.weight"
    tied = bool(getattr(causal.config, "tie_word_embeddings", True))
    both = names.get(head), names.get(embedding)
    if both[0] and both[1] and both[0].sha256 == both[1].sha256 and (tied or not apart):
        del names[head]
        tied = True
    later, deferred_head = set[str](), None
    if placement.device.type == "cpu" and not apart:  # rows that no token asks for are not decoded
        later |= _leave_inputs_in_blocks(causal, names, placement.dtype)
    if defer:
        source = names.get(head) or (names.get(embedding) if tied else None)
        expected = tuple(causal.get_output_embeddings().weight.shape)
        if source is not None and is_decoded(source.dtype) and source.shape == expected:
            deferred_head = source
            later.add(head)
        module = base.get_submodule(anatomy.embedding)
        stored = stored_embedding(module, names.get(embedding), placement.dtype)
        if stored is not None:
            setattr(base, anatomy.embedding, stored)
            later.add(embedding)
    same = {head: embedding} if tied and head not in later else {}
    now = {name: entry for name, entry in names.items() if name not in later}
    absent = (f"{prefix}{anatomy.layers}.",)
    compute_buffers(causal, placement.device)
    fill(causal, now, placement, progress, same=same, absent=absent, later=later)
    return _FilledEnds(names, deferred_head)


def _leave_inputs_in_blocks(
    causal: Any, names: Mapping[str, TensorEntry], dtype: torch.dtype
) -> set[str]:
    """Have tables of what layers are given decode their rows as they are asked, where they are in
    GGUF's blocks; the names of their weights."""
    left = set()
    for name in filter(is_inputs, names):
        path, _, part = name.removesuffix(".weight").rpartition(".")
        parent = causal.get_submodule(path)
        stored = stored_embedding(getattr(parent, part), names[name], dtype)
        if stored is not None:
            setattr(parent, part, stored)
            left.add(name)
    return left


class _FilledEnds(NamedTuple):
    """What was read, and what is left to read of the head."""

    names: dict[str, TensorEntry]
    deferred_head: TensorEntry | None


def _shifted(name: str, prefix: str, layers: str, start: int) -> str:
    index, _, rest = name.removeprefix(prefix).partition(".")
    return f"{layers}.{int(index) - start}.{rest}"


def _named_ends(manifest: Manifest, prefix: str) -> dict[str, TensorEntry]:
    """The stored ends by the names they have in a causal model whose base is called `prefix`."""
    base = manifest.base_prefix
    outer = base.rstrip(".").rpartition(".")[0]
    names = {}
    for entry in manifest.ends_weights():
        if entry.name.startswith(base) and not is_head(entry.name):
            names[prefix + entry.name.removeprefix(base)] = entry
        else:
            names[entry.name.removeprefix(f"{outer}.")] = entry
    return names


def _used(module: Any, names: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """`names` without what checkpoints store and nothing needs: masks, frequencies."""
    ignorable = module._keys_to_ignore_on_load_unexpected or ()  # noqa: SLF001
    ignored = [r"rotary_emb\.inv_freq$", *ignorable]
    expected = module.state_dict().keys()
    return {
        name: entry
        for name, entry in without_empty_biases(names, expected).items()
        # Of a span, layers may be named by their numbers in the whole.
        if name in expected
        or not any(re.search(pattern, each) for pattern in ignored for each in (name, entry.name))
    }
