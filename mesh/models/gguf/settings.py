"""The settings of one architecture in a GGUF file, each read once and none passed over unseen.

Knows how they are stored, and not what they mean.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from mesh.errors import BadCheckpoint, UnsupportedFamily
from mesh.models.header import TensorEntry

_MOST = 1 << 31
_LARGEST = 1e30
_MAX_NUMBERS = 4096
_NOTHING = ("vocab_size", "rope.scaling.finetuned")
"""Settings that say nothing which the tensors or others do not."""


@dataclass(slots=True)
class GgufSettings:
    """`metadata` under `architecture`, and the `tensors` beside it, by the names of GGUF."""

    file: Path
    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    _read: set[str] = field(default_factory=lambda: set(_NOTHING))

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A count. Where there is one for each layer, they have to be alike. Raises BadCheckpoint,
        also where there is neither it nor a `default`, or where it is below `least`."""
        value = self._value(name, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                self.refuse(f"its layers differ in {name}")
            value = value[0]
        if default is not None and value == default:
            return default
        if type(value) is not int or not least <= value < _MOST:
            raise self._damaged(f"{name} is {_shown(value)}, and no count")
        return value

    def counts(self, name: str, *, least: int = 1) -> list[int]:
        """A count for each layer, which may be said once for all. Raises BadCheckpoint as `whole`
        does."""
        said, layers = self._value(name, None), self.layers()
        counts = said[:layers] if isinstance(said, list) else [said] * layers
        if len(counts) != layers or not all(
            type(each) is int and least <= each < _MOST for each in counts
        ):
            raise self._damaged(f"{name} is {_shown(said)}, and no count for each layer")
        return counts

    def blocks(self) -> int:
        """How many layers the file may have; no more than there are tensors."""
        count = self.whole("block_count")
        if count > len(self.tensors):
            raise self._damaged(f"it says {count} layers, and holds {len(self.tensors)} tensors")
        return count

    def layers(self) -> int:
        """How many of those are the model's: the last may be there to guess further tokens."""
        count = self.blocks() - self.whole("nextn_predict_layers", 0, least=0)
        if count < 1:
            raise self._damaged(f"it says that {self.blocks()} layers are there for guesses alone")
        return count

    def kinds(self, name: str, said_so: str, otherwise: str) -> list[str]:
        """Of each layer one of the two, by what `name` says of it. Raises BadCheckpoint where that
        is not said of each."""
        said, layers = self._value(name, None), self.layers()
        # Some files leave out the layers that are there for guesses.
        if not isinstance(said, list) or len(said) not in (layers, self.blocks()):
            raise self._damaged(f"{name} does not say of {layers} layers what they are")
        return [said_so if each else otherwise for each in said[:layers]]

    def windows(self) -> list[str]:
        """Of each layer, whether it looks at a window, as transformers names the two kinds. Raises
        as `kinds` does."""
        return self.kinds("attention.sliding_window_pattern", "sliding_attention", "full_attention")

    def real(self, name: str, default: float | None = None) -> float:
        """A number, in the fewest decimals that fp32 keeps: what was written down as 1e-6 is 1e-6.

        Raises BadCheckpoint as `whole` does.
        """
        value = self._value(name, default)
        if type(value) not in (int, float) or not 0 <= value < _LARGEST:
            raise self._damaged(f"{name} is {_shown(value)}, and no number")
        return shortest(float(value))

    def each(self, name: str) -> list[float]:
        """Numbers, which may be infinite. Raises BadCheckpoint as `whole` does."""
        said = self._value(name, None)
        if not isinstance(said, list) or not all(type(each) is float for each in said):
            raise self._damaged(f"{name} is {_shown(said)}, and no list of numbers")
        return said

    def text(self, name: str) -> str | None:
        """A word, None where there is none."""
        value = self._value(name, "")
        if not isinstance(value, str):
            raise self._damaged(f"{name} is {_shown(value)}, and no text")
        return value or None

    def flag(self, name: str, *, default: bool) -> bool:
        """Whether it is so. Raises BadCheckpoint as `whole` does."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._damaged(f"{name} is {_shown(value)}, and neither true nor false")
        return value

    def pass_over(self, *names: str) -> None:
        """Settings that mean nothing here."""
        self._read.update(names)

    def says(self, name: str) -> bool:
        """Whether the file has this setting."""
        return f"{self.architecture}.{name}" in self.metadata

    def has(self, tensor: str) -> bool:
        """Whether the file has this tensor."""
        return tensor in self.tensors

    def rows(self, tensor: str, columns: int) -> int:
        """Of a matrix. Raises BadCheckpoint when there is none of so many columns."""
        entry = self.tensors.get(tensor)
        if entry is None or len(entry.shape) != 2 or entry.shape[1] != columns:
            raise self._damaged(f"it has no matrix {tensor} of {columns} columns")
        return entry.shape[0]

    def heads(self, width: int) -> int:
        """How many `width` is made of. Raises BadCheckpoint when it is not made of so many."""
        count = self.whole("attention.head_count")
        if width % count:
            raise self._damaged(f"it says that {count} heads are {width} wide")
        return count

    def numbers(self, tensor: str, *, below: float = _LARGEST) -> list[float]:
        """The few numbers of a tensor, all above 0, in the fewest decimals that fp32 keeps.

        Raises BadCheckpoint when they are not few, not in fp32 or not between 0 and `below`.
        """
        entry = self.tensors[tensor]
        count = entry.nbytes // 4
        if entry.dtype != "F32" or count > _MAX_NUMBERS:
            raise self._damaged(f"{tensor} is {entry.dtype} {list(entry.shape)}")
        with entry.file.open("rb") as stream:
            stream.seek(entry.offset)
            found = struct.unpack(f"<{count}f", stream.read(4 * count))
        if not all(0 < each < below for each in found):
            raise self._damaged(f"{tensor} holds numbers that are not above 0")
        return [shortest(each) for each in found]

    def require_all_read(self) -> None:
        """Raise UnsupportedFamily when the file says something of its architecture besides."""
        prefix = f"{self.architecture}."
        names = {key.removeprefix(prefix) for key in self.metadata if key.startswith(prefix)}
        if left := sorted(names - self._read):
            self.refuse(f"it says {prefix}{left[0]}, which is not understood")

    def refuse(self, why: str) -> NoReturn:
        """Raise UnsupportedFamily with the reason."""
        raise unreadable(self.file, self.architecture, why)

    def _value(self, name: str, default: Any) -> Any:
        self._read.add(name)
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise self._damaged(f"it does not say {self.architecture}.{name}")
        return value

    def _damaged(self, why: str) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self.file} cannot be used: {why}.",
            fix="Download the file again, or one that was made with a newer llama.cpp.",
        )


def unreadable(file: Path, architecture: str, why: str) -> UnsupportedFamily:
    """What to raise for a model that is not read from GGUF."""
    return UnsupportedFamily(
        f"{file} is a GGUF file of {architecture[:64]!r} that is not read: {why}.",
        fix="Use the model's original checkpoint, a directory of safetensors.",
    )


def shortest(number: float) -> float:
    """The number of fewest decimals that is this one in fp32."""
    stored = struct.pack("<f", number)
    for digits in range(6, 10):
        rounded = float(f"{number:.{digits}g}")
        if struct.pack("<f", rounded) == stored:
            return rounded
    return number


def _shown(value: object) -> str:
    return repr(value)[:60]
