"""Which class of transformers is in which file, remembered from one start to the next.

At import transformers reads each of its 2,000 modelling files, twice, to learn that: a second of
processor time on a slow machine. What it found is kept in the cache directory, for exactly this
installation, and used the next time. Whatever is wrong with the file, it is found anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from mesh.codec import MAX_FILE_BYTES
from mesh.models.hashing import read_cached, write_json_atomically

_READER = "transformers.utils.import_utils"
_FUNCTION = "define_import_structure"

Names = dict[frozenset[str], dict[str, set[str]]]
"""Backends that have to be there -> file -> names."""


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    names: list[tuple[frozenset[str], dict[str, set[str]]]]


@contextmanager
def remembered(cache_dir: Path) -> Iterator[None]:
    """Meanwhile transformers, when imported, is given what is kept in the cache directory."""
    hook = _OnImport(cache_dir)
    sys.meta_path.insert(0, hook)
    try:
        yield
    finally:
        sys.meta_path.remove(hook)


class _OnImport(MetaPathFinder, Loader):
    """Imports the module that reads the files as ever, then puts a memory before its function."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._real: Loader | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == _READER else None
        if spec is not None:
            self._real, spec.loader = spec.loader, self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        if self._real is not None:  # it was found before it is run
            self._real.exec_module(module)
        find = getattr(module, _FUNCTION, None)
        if find is not None and module.__file__ is not None:
            models = Path(module.__file__).parents[1] / "models"
            setattr(module, _FUNCTION, _Memory(find, models, self._directory))


class _Memory:
    """In the place of the function that reads the files: the same answers."""

    def __init__(self, find: Callable[..., Names], models: Path, directory: Path) -> None:
        self._find = find
        self._models = models
        self._directory = directory
        self._names: Names | None = None

    def __call__(self, module_path: str | Path, *given: Any, **named: Any) -> Names:
        path = Path(module_path)
        if (path.parent if path.name == "__init__.py" else path) != self._models:
            return self._find(module_path, *given, **named)
        prefix = named.get("prefix", given[0] if given else None)
        if self._names is None:
            self._names = self._read_or_found()
        before = "" if prefix is None else f"{prefix}."
        return {
            backends: {f"{before}{file}": {*names} for file, names in files.items()}
            for backends, files in self._names.items()
        }

    def _file(self) -> Path:
        """Another installation has another version, place or time."""
        this = f"{version('transformers')} {self._models} {self._models.stat().st_mtime_ns}"
        return self._directory / "transformers" / f"{sha256(this.encode()).hexdigest()[:32]}.json"

    def _read_or_found(self) -> Names:
        file = self._file()
        if (kept := read_cached(file, _Kept, MAX_FILE_BYTES)) is not None:
            return dict(kept.names)
        names = self._find(str(self._models))
        write_json_atomically(file, msgspec.to_builtins(_Kept(list(names.items()))))
        return names
