"""Matrices that are stored as codes with scales, or in GGUF's blocks, as blocks of ours.

Those of a mixture's experts that are stored one by one become blocks one after the other, as any
linear layer does: none lies decoded in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from mesh.models.coded.gathering import EXPERT, parts_of
from mesh.models.coded.scheme import is_decoded
from mesh.models.header import TensorEntry
from mesh.models.late_experts import GATE_UP
from mesh.shard.compiled.coded_blocks import matrix_of_codes
from mesh.shard.compiled.experts import ExpertMatrices
from mesh.shard.compiled.formats import BlockMatrix, Quant, joined, rows_of
from mesh.shard.compiled.gguf_blocks import matrix_of_blocks

_UP, _GATE_AND_UP, _DOWN = ("up_proj",), ("gate_proj", "up_proj"), ("down_proj",)


class BothMatrices(Protocol):
    """What rows go through first in the experts of a layer, and then."""

    @property
    def up(self) -> ExpertMatrices: ...

    @property
    def down(self) -> ExpertMatrices: ...


def matrix_of(entry: TensorEntry, quant: Quant) -> BlockMatrix:
    """The matrix (out, in) of a linear layer, exactly what is stored where the format has room for
    it. Raises BadCheckpoint when the files cannot be read or decoded."""
    if entry.coding is not None and entry.coding.kind == "rows":
        return joined([matrix_of_blocks(part, quant) for part in entry.coding.parts.values()])
    return (matrix_of_codes if entry.coding else matrix_of_blocks)(entry, quant)


def stored_experts(
    part: BothMatrices, names: Mapping[str, TensorEntry]
) -> dict[int, tuple[TensorEntry, ...]]:
    """By the ids of its `up` and `down`, what each of them is made of, expert after expert; empty
    unless `names` are just these, none of them plain."""
    return _one_by_one(part, names) or _in_stacks(part, names)


def _in_stacks(
    part: BothMatrices, names: Mapping[str, TensorEntry]
) -> dict[int, tuple[TensorEntry, ...]]:
    """Where a file has one tensor for all of them, as modules have."""
    made = {}
    for stack in (part.up, part.down):
        found = [entry for name, entry in names.items() if name.endswith(f".experts.{stack.name}")]
        count, rows, columns = stack.shape
        if [each.shape for each in found] != [(count, rows, columns)] or len(names) != 2:
            return {}
        parts = _parts(found[0])
        if not parts or not all(is_decoded(each.dtype) and each.unlike is None for each in parts):
            return {}
        made[id(stack)] = tuple(_of_expert(each, i) for i in range(count) for each in parts)
    return made


def _parts(entry: TensorEntry) -> tuple[TensorEntry, ...]:
    """What lies in blocks of it: itself, or its halves. Nothing where it is coded otherwise."""
    return parts_of(entry) if entry.coding is None or entry.coding.kind == "rows" else ()


def _of_expert(entry: TensorEntry, number: int) -> TensorEntry:
    count, *shape = entry.shape
    size = entry.nbytes // count
    offset = entry.offset + number * size
    return replace(entry, shape=tuple(shape), offset=offset, nbytes=size)


def _one_by_one(
    part: BothMatrices, names: Mapping[str, TensorEntry]
) -> dict[int, tuple[TensorEntry, ...]]:
    found = {}
    for name, entry in names.items():
        match = EXPERT.search(name)
        if match is None or not is_decoded(entry.dtype):
            return {}
        found[int(match["number"]), match["part"]] = entry
    made, first = {}, _GATE_AND_UP if part.up.name == GATE_UP else _UP
    for stack, kinds in ((part.up, first), (part.down, _DOWN)):
        count, rows, columns = stack.shape
        places = [(number, kind) for number in range(count) for kind in kinds]
        entries = tuple(found.pop(place) for place in places if place in found)
        if {each.shape for each in entries} != {(rows // len(kinds), columns)}:
            return {}
        if len(entries) != len(places):
            return {}
        made[id(stack)] = entries
    return {} if found else made


def matrix_of_experts(
    entries: Sequence[TensorEntry], quant: Quant, stack: ExpertMatrices
) -> BlockMatrix:
    """Those of `stored_experts` as one matrix, as `stack` is one: of two that belong together in
    turns. Raises BadCheckpoint."""
    whole = joined([matrix_of(each, quant) for each in entries])
    rows = stack.shape[1]
    if entries[0].shape[0] == rows and not stack.is_apart:
        return whole
    order = torch.arange(whole.shape[0]).view(-1, 2, rows // 2)
    return rows_of(whole, order.transpose(1, 2).reshape(-1))
