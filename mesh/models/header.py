"""Read the header of a safetensors file: which tensors it holds, and where their bytes lie.

Only the header is read, never a tensor, and nothing in it is believed before it is checked. This
module knows nothing of models, layers or torch. Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

from mesh.codec import Fault, Int63, convert, parse_json
from mesh.errors import BadCheckpoint

MAX_HEADER_BYTES = 25 * 1024 * 1024
_METADATA = "__metadata__"
COPY_AGAIN = "Copy or download the file again."
_MAX_NAME = 512
"""As many characters as other nodes take of a tensor's name (`mesh.transfers.documents`)."""

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8,
        "I64": 64, "I32": 32, "I16": 16, "I8": 8,
        "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    }
)  # fmt: skip


def _known(dtype: str) -> None:
    if dtype not in DTYPE_BITS:
        raise ValueError("is not known")


@dataclass(frozen=True, slots=True)
class _Stored:
    dtype: Annotated[str, _known]
    shape: tuple[Int63, ...]
    data_offsets: tuple[Int63, Int63]


Kind: TypeAlias = Literal[
    "transposed", "less_one", "rotary_rows", "value_rows", "value_columns", "decay"
]
"""Of a `Difference`."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What is between stored numbers and those that a model computes with.

    ``transposed``, each matrix where there are several; ``less_one``, of which one is taken away;
    ``rotary_rows``, whose rows within each of `heads` heads lie in pairs that a model has in
    halves; ``value_rows`` and ``value_columns``, which from the `first` on are of heads for values,
    `shared` of them to each of `heads` heads for keys: the first of each key, then the second of
    each, where a model has all of a key side by side; or ``decay``, in the order of ``value_rows``,
    of which a model has the logarithm without the sign.
    """

    kind: Kind
    heads: int = 0
    shared: int = 1
    first: int = 0

    @property
    def moves_rows(self) -> bool:
        """Whether it is in the order of rows alone, in which a bias has it, too."""
        return self.kind in ("rotary_rows", "value_rows")

    def changed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A stored tensor's shape in the model, or the other way round."""
        if self.kind != "transposed":
            return shape
        return (*shape[:-2], shape[-1], shape[-2])


@dataclass(frozen=True, slots=True)
class Coding:
    """How the numbers of one tensor of a model follow from several that are stored.

    Those are `parts`, by what they are to it: ``codes``, ``scales``, ``zeros``, and ``order``,
    which says of each column in which group it is. `rows` and `columns` share a scale, which do
    not lie side by side where it is not `in_order`; codes are integers of `bits`, or fp8 or mxfp4.
    `zero_added` is to be added to stored zero points. Of a layer that makes keys and values of a
    latent the parts are ``keys`` and ``values``, matrices of any kind; of ``rows`` they are its
    ``first`` and its ``last``, of any kind as well.
    """

    kind: Literal["fp8", "mxfp4", "integers", "awq", "gptq", "packed", "latent", "rows"]
    parts: Mapping[str, TensorEntry]
    rows: int
    columns: int
    bits: int = 8
    zero_added: int = 0
    in_order: bool = True


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor: `nbytes` bytes at `offset` of `file`, little-endian and row-major.

    `dtype` is spelled as safetensors does (``BF16``), or is one of GGUF's types of blocks.
    `sha256` is the hex digest of the bytes, empty until they were hashed. `name` and `shape` are
    those that it has in a model; `unlike` says how its numbers differ from the model's. Not
    `present` is one whose bytes a partial checkpoint lacks: the file has a hole there. One with a
    `coding` stands for several that are stored: `nbytes` are those of all, `file` and `offset`
    those of its codes.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    sha256: str = ""
    unlike: Difference | None = None
    present: bool = True
    coding: Coding | None = None


def made_of(name: str, shape: tuple[int, ...], dtype: str, coding: Coding) -> TensorEntry:
    """The tensor `name` of a model that is not stored and follows from what is, as `coding` says,
    whose first part tells where it lies."""
    parts = [*coding.parts.values()]
    digest = ""
    if all(each.sha256 for each in parts):
        digest = hashlib.sha256("".join(each.sha256 for each in parts).encode()).hexdigest()
    return TensorEntry(
        name, parts[0].file, dtype, shape, parts[0].offset, sum(each.nbytes for each in parts),
        digest, present=all(each.present for each in parts), coding=coding,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """What is in a checkpoint of either kind. `config` is what config.json says, or would say;
    `tensors` have the names that they have in the model.

    `heads` says of each GGUF file where its header ends; the first is the one with the metadata,
    `pooling_type` what that says by this name, 0 for nothing.
    """

    heads: Mapping[Path, int]
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    eos_ids: tuple[int, ...]
    pooling_type: int = 0


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one file by name.

    Raises BadCheckpoint, naming the file and the numbers, when the file is missing or truncated or
    its header is malformed: too large, ranges outside the file or overlapping, sizes that do not
    follow from dtype and shape.
    """
    fields, body, size = _fields(file)
    entries = {
        name: _entry(file, name, value, body=body, size=size)
        for name, value in fields.items()
        if name != _METADATA
    }
    check_overlap(file, list(entries.values()))
    return entries


def read_metadata(file: Path) -> dict[str, str]:
    """What the header says beside its tensors. Raises BadCheckpoint as `read_header` does."""
    fields, _, _ = _fields(file)
    try:
        return convert(fields.get(_METADATA, {}), dict[str, str])
    except Fault as fault:
        raise BadCheckpoint(
            f"{file} has metadata that is not text: {fault.why}.", fix=COPY_AGAIN
        ) from fault


def _fields(file: Path) -> tuple[dict[str, Any], int, int]:
    """The header as it is, where the tensors begin, and how long the file is."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little") if size >= 8 else -1
            _check_length(file, length, size)
            raw = stream.read(length)
    except OSError as error:
        raise BadCheckpoint(
            f"Weights file {file} cannot be read: {error.strerror}.", fix=COPY_AGAIN
        ) from error
    return _parse(file, raw), 8 + length, size


def _check_length(file: Path, length: int, size: int) -> None:
    if length < 0:
        raise BadCheckpoint(
            f"{file} is {size} bytes long, too short for a safetensors file.", fix=COPY_AGAIN
        )
    if length > MAX_HEADER_BYTES:
        raise BadCheckpoint(
            f"{file} claims a header of {length} bytes; the limit is {MAX_HEADER_BYTES}.",
            fix="It is not a safetensors file, or it is damaged. " + COPY_AGAIN,
        )
    if 8 + length > size:
        raise BadCheckpoint(
            f"{file} is truncated: its header needs {8 + length} bytes, the file has {size}.",
            fix=COPY_AGAIN,
        )


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        return convert(parse_json(raw), dict[str, Any])
    except Fault as fault:
        raise BadCheckpoint(
            f"The header of {file} is not a JSON object: {fault.why}.", fix=COPY_AGAIN
        ) from fault


def _entry(file: Path, name: str, value: Any, *, body: int, size: int) -> TensorEntry:
    if len(name) > _MAX_NAME:
        raise BadCheckpoint(
            f"{file} has a tensor whose name has {len(name)} characters.", fix=COPY_AGAIN
        )
    try:
        stored = convert(value, _Stored)
    except Fault as fault:
        raise BadCheckpoint(
            f"{file} describes tensor {name} in a way that is not understood: {str(value)[:200]}.",
            fix="The file is damaged, or needs a newer hearthnet. " + COPY_AGAIN,
        ) from fault
    dtype, shape, (begin, end) = stored.dtype, stored.shape, stored.data_offsets
    nbytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if end - begin != nbytes:
        raise BadCheckpoint(
            f"{file} gives tensor {name} {end - begin} bytes;"
            f" {dtype} {list(shape)} needs {nbytes}.",
            fix=COPY_AGAIN,
        )
    if body + end > size:
        raise BadCheckpoint(
            f"{file} is truncated: tensor {name} ends at byte {body + end}, the file has {size}.",
            fix=COPY_AGAIN,
        )
    return TensorEntry(name, file, dtype, shape, body + begin, nbytes)


def check_overlap(file: Path, entries: list[TensorEntry]) -> None:
    """Raise BadCheckpoint when two tensors of a file share bytes."""
    ordered = sorted(entries, key=lambda entry: (entry.offset, entry.nbytes))
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise BadCheckpoint(
                f"{file} stores tensors {before.name} and {after.name} over one another: one ends"
                f" at byte {before.offset + before.nbytes}, the other begins at {after.offset}.",
                fix=COPY_AGAIN,
            )
