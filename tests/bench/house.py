"""The size and shape of the code: ``python -m tests.bench.house [REVISION ...]``.

Of each revision, or of the working tree, a column: lines per package, and what tells whether an
idea has one place. Nothing is imported or run; what comes out depends on the text alone.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from hashlib import sha256
from itertools import chain
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
RUN_LINES = 6
"""Lines of code of one shape, in two places, that count as a duplicate."""

Sources = Mapping[str, str]
_WORD = re.compile(r"[A-Za-z_]\w*|\d[\d_.]*|\"[^\"]*\"|'[^']*'")
_KEPT = frozenset(
    {"def", "class", "return", "if", "else", "for", "while", "in", "not", "and", "or", "await"}
    | {"async", "with", "raise", "yield", "try", "except", "finally", "self", "None", "lambda"}
)
_SEE = re.compile(r"See `[\w.]+`\.?")


def main() -> None:
    """Print one table, a column per revision."""
    revisions = sys.argv[1:] or [""]
    columns = [measured(_at(revision) if revision else _here()) for revision in revisions]
    print(f"| | {' | '.join(revision or 'here' for revision in revisions)} |")
    print("|---|" + "---|" * len(revisions))
    for name in dict.fromkeys(chain.from_iterable(columns)):
        print(f"| {name} | {' | '.join(str(column.get(name, 0)) for column in columns)} |")


def measure() -> dict[str, int]:
    """Of the working tree."""
    return measured(_here())


def measured(sources: Sources) -> dict[str, int]:
    """What is counted, by its name. `sources` are the texts of files by their path."""
    mesh = {path: text for path, text in sources.items() if path.startswith("mesh/")}
    trees = {path: ast.parse(text) for path, text in mesh.items()}
    tests = [text for path, text in sources.items() if path.startswith("tests/")]
    lines = Counter[str]()
    for path, text in mesh.items():
        if "/corpus/" not in path:
            lines[_package(path)] += text.count("\n")
    documented = [_docstrings(tree) for tree in trees.values()]
    return {
        **{f"lines of {package}": count for package, count in sorted(lines.items())},
        "lines of mesh without the corpus": lines.total(),
        "of them not blank": sum(
            bool(line.strip())
            for path, text in mesh.items()
            if "/corpus/" not in path
            for line in text.splitlines()
        ),
        "modules": len(mesh),
        "modules with one importer": sum(n == 1 for n in _importers(trees).values()),
        "class names used for several things": _shared(map(_classes, trees.values())),
        "file names used for several things": _shared({Path(path).stem} for path in mesh),
        "median lines of a function": round(median(_function_lines(trees.values()))),
        "longest function": max(_function_lines(trees.values())),
        f"duplicated runs of {RUN_LINES} lines and more": duplicates(mesh.values()),
        'literals "op"': sum(text.count('"op"') for text in mesh.values()),
        "docstrings that only point elsewhere": sum(
            bool(_SEE.fullmatch(text)) for text in chain.from_iterable(documented)
        ),
        "looks of tests at private names": sum(map(private_looks, tests)),
        "monkeypatches in tests": sum(map(monkeypatches, tests)),
    }


def duplicates(texts: Iterable[str]) -> int:
    """Runs of at least `RUN_LINES` lines that have the same shape somewhere else.

    The shape of a line is the line with its names, numbers and strings taken out; imports,
    comments, docstrings and lines of punctuation do not count.
    """
    places: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for number, text in enumerate(texts):
        shapes = _shapes(text)
        for start in range(len(shapes) - RUN_LINES + 1):
            run = "\n".join(shapes[start : start + RUN_LINES])
            places[sha256(run.encode()).digest()].append((number, start))
    repeated = {place for found in places.values() if len(found) > 1 for place in found}
    return sum((number, start - 1) not in repeated for number, start in repeated)


def private_looks(text: str) -> int:
    """Names with an underscore that a file looks up in anything but ``self`` and ``cls``."""
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr != "_exit"  # of `os`, and public in spite of its name
        and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
        for node in ast.walk(ast.parse(text))
    )


def monkeypatches(text: str) -> int:
    """How often a file replaces an attribute for a test."""
    return text.count("monkeypatch.setattr(")


def _shapes(text: str) -> list[str]:
    prose = _prose_lines(ast.parse(text))
    shapes = []
    for number, line in enumerate(text.splitlines(), 1):
        code = line.strip()
        if number in prose or code.startswith(("#", "import ", "from ", "@")):
            continue
        if sum(map(str.isalnum, code)) > 3:
            shapes.append(_WORD.sub(lambda m: m[0] if m[0] in _KEPT else "x", code))
    return shapes


def _prose_lines(tree: ast.Module) -> set[int]:
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _docstrings(tree: ast.Module) -> list[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def _classes(tree: ast.Module) -> set[str]:
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


def _shared(names: Iterable[Iterable[str]]) -> int:
    counted = Counter(chain.from_iterable(names))
    return sum(n > 1 for name, n in counted.items() if name != "__init__")


def _function_lines(trees: Iterable[ast.Module]) -> list[int]:
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _importers(trees: Mapping[str, ast.Module]) -> Counter[str]:
    modules = {path.removesuffix(".py").replace("/", ".") for path in trees}
    importers = Counter[str]()
    for path, tree in trees.items():
        del path
        imported = {
            name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        }
        importers.update(imported & modules)
    return importers


def _package(path: str) -> str:
    parts = path.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else "mesh, at its root"


def _here() -> Sources:
    files = [path for name in ("mesh", "tests") for path in (ROOT / name).rglob("*.py")]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


def _at(revision: str) -> Sources:
    command = ["git", "archive", revision, "mesh", "tests"]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {
            member.name: tar.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in tar
            if member.name.endswith(".py")
        }


if __name__ == "__main__":
    main()
