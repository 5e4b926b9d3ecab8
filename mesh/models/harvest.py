"""What a harvest writes down: which modules of which run, and what their files are called.

Plain data and names. Knows no torch, no disk and no links.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Self

from mesh.errors import BadRequest

MAX_MODULES = 256
"""Files that one session writes at the same time."""
MAX_BATCHES = 10**6

_RUN = re.compile(r"[0-9a-f]{16}")
_PREFIX = re.compile(r"(\w{1,64}\.){1,8}")
_PATTERN = re.compile(r"[\w.*?\[\]!-]{1,256}")
_MAX_ROWS = 1 << 31


@dataclass(frozen=True, slots=True)
class HarvestBatch:
    """One batch of prompts of a run: `rows` tokens in all, written by every hop for its layers.

    `pattern` is matched against module paths that begin with `layer_prefix`; a ``*`` does not reach
    over a dot.
    """

    run: str
    batch: int
    rows: int
    layer_prefix: str
    pattern: str

    def to_fields(self) -> dict[str, Any]:
        """For `from_fields`."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of `to_fields`. Raises BadRequest for anything that could not be a batch."""
        run, prefix = str(fields.get("run")), str(fields.get("layer_prefix"))
        pattern, batch, rows = str(fields.get("pattern")), fields.get("batch"), fields.get("rows")
        texts = _RUN.fullmatch(run) and _PREFIX.fullmatch(prefix) and _PATTERN.fullmatch(pattern)
        if not texts or type(batch) is not int or type(rows) is not int:
            raise _bad("is garbled")
        if not 0 <= batch < MAX_BATCHES or not 0 < rows < _MAX_ROWS:
            raise _bad("has no rows, or too many")
        return cls(run, batch, rows, prefix, pattern)

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


def _bad(why: str) -> BadRequest:
    return BadRequest(
        f"The batch of a harvest {why}.",
        fix="Give a pattern of module paths such as model.layers.*.mlp.",
        param="module",
    )
