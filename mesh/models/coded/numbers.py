"""The numbers that codes and their scales stand for, and the codes as integers.

Functions of tensors: `parts` are those of a `Coding`, by the same names, as they are stored. Rows
are taken some at a time, so that beside the result there is little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mesh.errors import BadCheckpoint
from mesh.models.header import Coding, TensorEntry

_NUMBERS_AT_ONCE = 1 << 20
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns each half byte of a word is, from the lowest."""


@dataclass(frozen=True, slots=True)
class Levels:
    """A matrix (out, in) of integers: ``(codes - zeros) * scales``, of each group of a row.

    `codes` (out, in) uint8; `zeros` (out, groups) int16; `scales` (out, groups) fp32. `columns` in
    a row are one group, unless `order` (in,) says which group each column is in.
    """

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    columns: int
    order: torch.Tensor | None

    def dense(self, rows: slice) -> torch.Tensor:
        """(rows, in) fp32."""
        zeros, scales = (self._spread(part[rows]) for part in (self.zeros.float(), self.scales))
        return (self.codes[rows].float() - zeros).mul_(scales)

    def _spread(self, groups: torch.Tensor) -> torch.Tensor:
        if self.order is not None:
            return groups[:, self.order]
        return groups.repeat_interleave(self.columns, dim=1)[:, : self.codes.shape[1]]


def decoded(
    entry: TensorEntry, parts: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """The tensor that `entry` stands for, in `dtype`; memory of its own. Raises BadCheckpoint."""
    coding = entry.coding
    assert coding is not None  # noqa: S101 - who asks has looked
    numbers = torch.empty(entry.shape, dtype=dtype)
    if coding.kind == "mxfp4":
        return _from_mxfp4(numbers, parts)
    if coding.kind == "fp8":
        return _from_fp8(numbers, coding, parts)
    levels = levels_of(coding, parts)
    for rows in pieces(*entry.shape):
        numbers[rows] = levels.dense(rows)
    return numbers


def layer_of_latents(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The weight (heads * (key + value width), rank) of a layer that makes keys and values of a
    latent, of its matrices (heads * rank, key width) and (heads * value width, rank)."""
    rank = values.shape[1]
    heads = keys.shape[0] // rank
    both = keys.view(heads, rank, -1).transpose(1, 2), values.view(heads, -1, rank)
    return torch.cat(both, 1).flatten(0, 1)


def pieces(rows: int, columns: int) -> list[slice]:
    """All rows, in parts of a size that little memory has room for."""
    at_once = max(1, _NUMBERS_AT_ONCE // max(1, columns))
    return [slice(first, min(first + at_once, rows)) for first in range(0, rows, at_once)]


def fp8_rows(coding: Coding, parts: Mapping[str, torch.Tensor], rows: slice) -> torch.Tensor:
    """(rows, in) fp32 of a matrix in fp8."""
    codes, scales = parts["codes"][rows], _grid(parts["scales"])
    of_rows = torch.arange(rows.start, rows.stop) // coding.rows
    across = scales[of_rows].repeat_interleave(coding.columns, dim=1)
    # A table is several times as fast as torch's own conversion.
    table = torch.arange(256, dtype=torch.uint8).view(codes.dtype).float()
    numbers = table.index_select(0, codes.view(torch.uint8).int().flatten()).view(codes.shape)
    return numbers.mul_(across[:, : codes.shape[1]])


def _from_fp8(
    numbers: torch.Tensor, coding: Coding, parts: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    if numbers.dim() == 2:
        for rows in pieces(*numbers.shape):
            numbers[rows] = fp8_rows(coding, parts, rows)
        return numbers
    codes, scales = parts["codes"], parts["scales"]
    shared = scales.numel() == 1
    for expert, part in enumerate(numbers):
        own = {"codes": codes[expert], "scales": scales if shared else scales[expert]}
        _from_fp8(part, coding, own)
    return numbers


def _grid(scales: torch.Tensor) -> torch.Tensor:
    """(down, across) fp32."""
    wide = scales.float()
    return wide.reshape(-1, 1) if wide.dim() < 2 else wide.reshape(wide.shape[-2:])


def _from_mxfp4(numbers: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes, scales = parts["codes"], parts["scales"]
    for expert, part in enumerate(numbers):  # one at a time: it takes several times its result
        one = slice(expert, expert + 1)
        part[:] = convert_moe_packed_tensors(codes[one], scales[one], dtype=numbers.dtype)[0]
    return numbers


def levels_of(coding: Coding, parts: Mapping[str, torch.Tensor]) -> Levels:
    """The integers of a matrix that is stored as such. Raises BadCheckpoint."""
    bits, codes, scales = coding.bits, parts["codes"], parts["scales"]
    middle, zeros = 1 << (bits - 1), parts.get("zeros")
    if coding.kind == "integers":
        codes = (codes.to(torch.int16) + middle).to(torch.uint8)
        zeros = None if zeros is None else _grid(zeros).to(torch.int16) + middle
    elif coding.kind == "packed":
        codes = _across(codes, bits)
        zeros = None if zeros is None else _down(zeros, bits)[: len(codes)].to(torch.int16)
    else:
        assert zeros is not None  # noqa: S101 - gathered with them
        within = _AWQ_ORDER if coding.kind == "awq" else None
        codes = (_across(codes, bits, within) if within else _down(codes, bits)).t()
        zeros = _across(zeros, bits, within).t().to(torch.int16) + coding.zero_added
        scales = scales.t()
    scales = _grid(scales.contiguous()).expand(len(codes), -1)
    if zeros is None:
        zeros = torch.full(scales.shape, middle, dtype=torch.int16)
    order = _order(coding, parts, scales.shape[1])
    return Levels(codes.contiguous(), zeros.expand(scales.shape), scales, coding.columns, order)


def _order(coding: Coding, parts: Mapping[str, torch.Tensor], groups: int) -> torch.Tensor | None:
    """The group of each column; None where they lie one behind the other."""
    order = parts.get("order")
    if order is None:
        return None
    places = order.long()
    if torch.equal(places, torch.arange(len(places)) // coding.columns):
        return None
    if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < groups:
        stored = coding.parts["order"]
        raise BadCheckpoint(
            f"{stored.file}: tensor {stored.name} has columns in groups that there are not.",
            fix="Download the checkpoint again.",
        )
    return places


def _across(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """(rows, columns) uint8 of (rows, words) int32, of which each is several columns, the lowest
    bits first or as `order` says."""
    rows, count = words.shape
    codes = words.flatten().view(torch.uint8).view(rows, 4 * count)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    if order is None:
        return codes
    within = torch.empty_like(codes).view(len(codes), -1, len(order))
    within[..., list(order)] = codes.view(len(codes), -1, len(order))
    return within.flatten(1)


def _down(words: torch.Tensor, bits: int) -> torch.Tensor:
    """(rows, columns) uint8 of (words, columns) int32, of which each is several rows."""
    return _across(words.t(), bits).t()
