"""The header of a GGUF file: its metadata, which tensors it holds, and where their bytes lie.

Nothing in it is believed before it is checked, and no tensor is read. The `gguf` package's own
reader makes an object of every word of a vocabulary and believes every count, so it is not used
here; the sizes of blocks are its. Knows nothing of models, layers or torch.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from mesh.errors import BadCheckpoint
from mesh.models.header import COPY_AGAIN, DTYPE_BITS, TensorEntry, check_overlap

SUFFIX = ".gguf"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 256 << 20
"""A vocabulary of a quarter million words and its merges take a tenth of it."""
_MAX_WORDS = 4_000_000
_MAX_KEPT = 4096
"""Elements of an array of numbers that is kept: there may be one number for each layer."""
_MAX_NAME_BYTES = 256
_MAX_PAIRS = 4096
"""Of metadata; files have some dozens. Each is an object here: 18 million fit into a header."""
_MAX_TENSORS = 1 << 16
"""Of a file; those of the largest mixtures, one for each expert, are fewer."""
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32

_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

BLOCK_TYPES = frozenset(
    {
        "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
        "IQ4_XS", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0",
        "TQ2_0", "MXFP4",
    }
)  # fmt: skip
"""Types of tensors in blocks that stand for numbers, as the `gguf` package spells them."""


@dataclass(frozen=True, slots=True)
class Long:
    """Stands for an array that is not kept: so many elements."""

    count: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """One file. `metadata` has numbers, texts, lists of numbers, and `Long` for everything else.

    `tensors` have the names and types of GGUF, and shapes as torch has them, rows first. The header
    ends, and the tensors begin, at byte `end`. `floats` says where lists of fp32 numbers begin.
    """

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    end: int
    floats: Mapping[str, int]


class _CutShort(Exception):
    """What is there of the file ends within its header."""


def read_gguf_header(file: Path) -> GgufHeader:
    """Read it. Raises BadCheckpoint, naming the file and what is wrong with it."""
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as m:
            return _Cursor(file, m, len(m)).header()
    except (OSError, ValueError) as error:  # an empty file is a ValueError
        raise BadCheckpoint(f"{file} cannot be read: {error}.", fix=COPY_AGAIN) from error


def header_of_beginning(file: Path, beginning: bytes, size: int) -> GgufHeader | None:
    """Of a file of `size` bytes that begins so; None where the header is longer than that.

    Raises BadCheckpoint, naming the file, which need not be there.
    """
    try:
        return _Cursor(file, beginning, size).header()
    except _CutShort:
        return None


@cache
def _types() -> Mapping[int, tuple[str, int, int]]:
    """By number: name, elements of a block and bytes of a block, of the types that are read."""
    from gguf.constants import GGML_QUANT_SIZES

    return {
        int(kind): (kind.name, *sizes)
        for kind, sizes in GGML_QUANT_SIZES.items()
        if kind.name in DTYPE_BITS or kind.name in BLOCK_TYPES
    }


@dataclass(slots=True)
class _Cursor:
    """A place in a file that nobody vouches for; `area` is the beginning of its `size` bytes."""

    file: Path
    area: mmap.mmap | bytes
    size: int
    place: int = 0
    limit: int = field(init=False)
    key: str = ""
    """Of the metadata that is being read."""
    floats: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.limit = min(self.size, _MAX_HEADER_BYTES)

    def header(self) -> GgufHeader:
        if self.take(4) != _MAGIC:
            self.refuse("it does not begin as a GGUF file does")
        version = self.number("I")
        if version not in _VERSIONS:
            swapped = version.to_bytes(4, "little")[:2] == b"\0\0"
            self.refuse(
                "it was written for big-endian machines" if swapped else f"its version is {version}"
            )
        tensor_count, pair_count = self.number("Q"), self.number("Q")
        if tensor_count > _MAX_TENSORS or pair_count > _MAX_PAIRS:
            self.refuse(
                f"it claims {tensor_count} tensors and {pair_count} settings; {_MAX_TENSORS} and"
                f" {_MAX_PAIRS} are the most"
            )
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self.key = self.text(_MAX_NAME_BYTES)
            if key in metadata:
                self.refuse(f"it says {key} twice")
            metadata[key] = self.value(self.number("I"))
        infos = [self.tensor() for _ in range(tensor_count)]
        end = self.end(metadata)
        entries = self.entries(infos, end)
        return GgufHeader(self.file, metadata, entries, min(end, self.size), self.floats)

    def take(self, count: int) -> bytes:
        end = self.place + count
        if end > self.limit:
            if end > self.size:
                self.refuse(f"it is truncated: {end} bytes are needed, it has {self.size}")
            self.refuse(f"its header is longer than {_MAX_HEADER_BYTES} bytes")
        if end > len(self.area):
            raise _CutShort
        begin, self.place = self.place, end
        return self.area[begin:end]

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def text(self, most: int = _MAX_HEADER_BYTES) -> str:
        length = self.number("Q")
        if length > most:
            self.refuse(f"it holds a text of {length} bytes; the limit is {most}")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            self.refuse(f"it holds text at byte {self.place - length} that is not UTF-8")

    def value(self, kind: int) -> Any:
        if kind in _FIXED:
            return self.number(_FIXED[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            self.refuse(f"it holds a value of the unknown type {kind}")
        return self.array(self.number("I"), self.number("Q"))

    def array(self, kind: int, count: int) -> Any:
        if kind == _STRING:
            if count > _MAX_WORDS:
                self.refuse(f"it holds an array of {count} texts; the limit is {_MAX_WORDS}")
            for _ in range(count):
                self.take(self.number("Q"))
            return Long(count)
        if kind not in _FIXED:
            self.refuse(f"it holds an array of the unknown type {kind}")
        size = struct.calcsize(_FIXED[kind])
        if count > _MAX_KEPT:
            self.skip(count * size)
            return Long(count)
        if _FIXED[kind] == "f":
            self.floats[self.key] = self.place
        return list(struct.unpack(f"<{count}{_FIXED[kind]}", self.take(count * size)))

    def skip(self, count: int) -> None:
        if self.place + count > self.limit:
            self.take(count)  # says what is wrong
        self.place += count

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset within the data."""
        name = self.text(_MAX_NAME_BYTES)
        dimensions = self.number("I")
        if not name.isprintable() or not 1 <= dimensions <= _MAX_DIMENSIONS:
            self.refuse(f"tensor {name[:64]!r} has {dimensions} dimensions")
        shape = struct.unpack(f"<{dimensions}Q", self.take(8 * dimensions))
        return name, tuple(reversed(shape)), self.number("I"), self.number("Q")

    def end(self, metadata: Mapping[str, Any]) -> int:
        """Where the header ends and the tensors begin."""
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment.bit_count() > 1:
            self.refuse(f"its alignment is {alignment!r}, and no power of two")
        return -(-self.place // alignment) * alignment

    def entries(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int
    ) -> dict[str, TensorEntry]:
        found: dict[str, TensorEntry] = {}
        for name, shape, kind, offset in infos:
            if name in found:
                self.refuse(f"it holds tensor {name} twice")
            if kind not in _types():
                self.refuse(
                    f"tensor {name} is of type {kind}, which is not read",
                    "Use a file in another quantisation, Q8_0 or Q4_K_M for example.",
                )
            dtype, elements, size = _types()[kind]
            if not all(shape) or shape[-1] % elements:
                self.refuse(f"tensor {name} of {list(shape)} is not made of blocks of {elements}")
            nbytes = math.prod(shape) // elements * size
            if start + offset + nbytes > self.size:
                self.refuse(
                    f"it is truncated: tensor {name} ends at byte {start + offset + nbytes},"
                    f" it has {self.size}"
                )
            found[name] = TensorEntry(name, self.file, dtype, shape, start + offset, nbytes)
        check_overlap(self.file, list(found.values()))
        return found

    def refuse(self, why: str, fix: str = COPY_AGAIN) -> NoReturn:
        raise BadCheckpoint(f"{self.file} cannot be used: {why}.", fix=fix)
