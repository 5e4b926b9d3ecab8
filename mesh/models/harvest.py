"""The order of a harvest to a hop: the modules of a run, and the names of their files.

Plain data and names. Knows no torch, no disk and no links.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Self

from msgspec import Meta

from mesh import codec
from mesh.codec import Fault
from mesh.errors import BadRequest

MAX_MODULES = 256
"""Files that one session writes at the same time."""
MAX_BATCHES = 10**6

_MAX_ROWS = 1 << 31


@dataclass(frozen=True, slots=True)
class HarvestBatch:
    """One batch of prompts of a run: `rows` tokens in all, written by every hop for its layers.

    `pattern` is matched against module paths that begin with `layer_prefix`; a ``*`` does not reach
    over a dot.
    """

    run: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    batch: Annotated[int, Meta(ge=0, lt=MAX_BATCHES)]
    rows: Annotated[int, Meta(ge=1, lt=_MAX_ROWS)]
    layer_prefix: Annotated[str, Meta(pattern=r"\A(\w{1,64}\.){1,8}\Z")]
    pattern: Annotated[str, Meta(pattern=r"\A[\w.*?\[\]!-]{1,256}\Z")]

    def to_fields(self) -> dict[str, Any]:
        """For `from_fields`."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of `to_fields`. Raises BadRequest for anything that could not be a batch."""
        try:
            return codec.convert(dict(fields), cls)
        except Fault as fault:
            raise BadRequest(
                f"The batch of a harvest is garbled: {fault.field} {fault.why}.",
                fix="Give a pattern of module paths such as model.layers.*.mlp.",
                param="module",
            ) from fault

    def module(self, layer: int, part: str) -> str | None:
        """The path of a module of a layer ('': the layer itself) if the pattern covers it."""
        path = f"{self.layer_prefix}{layer}" + (f".{part}" if part else "")
        return path if matches(path, self.pattern) else None

    def fits_any(self, tensors: Iterable[str]) -> bool:
        """Whether the pattern covers a module of a checkpoint with tensors of these names."""
        for name in tensors:
            layer, _, rest = name.removeprefix(self.layer_prefix).partition(".")
            if name.startswith(self.layer_prefix) and layer.isdecimal():
                names = rest.split(".")[:-1]
                parts = (".".join(names[:count]) for count in range(len(names) + 1))
                if any(self.module(int(layer), part) for part in parts):
                    return True
        return False

    def stem(self, module: str) -> str:
        """How the name of a module's file begins."""
        return f"{self.batch:06d}.{module}."


def matches(path: str, pattern: str) -> bool:
    """Whether a module path fits a glob, name by name."""
    names, globs = path.split("."), pattern.split(".")
    return len(names) == len(globs) and all(map(fnmatchcase, names, globs))
