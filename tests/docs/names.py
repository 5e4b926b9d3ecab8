"""Finds what a page names in the code, without importing it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def names_in(path: Path) -> frozenset[str]:
    """What a module defines at its top level, and ``Class.name`` for what its classes do."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = _names(node)
        found |= names
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for inner in node.body for name in _names(inner)}
    return frozenset(found)


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


def module(dotted: str) -> Path | None:
    """The file of a module or package; None when there is none."""
    path = ROOT / dotted.replace(".", "/")
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.exists()), None)


def exists(dotted: str) -> bool:
    """Whether ``package.module``, or ``package.module.Name``, is in the code."""
    if module(dotted) is not None:
        return True
    where, _, name = dotted.rpartition(".")
    file = module(where)
    return file is not None and name in names_in(file)
