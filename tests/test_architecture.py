"""The limits that keep the code readable, checked on every file (see CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("mesh", "tui")
FILES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_CONSTRUCTOR_PARAMETERS = 7
BANNED_NAMES = {"utils", "util", "helpers", "common", "core", "manager", "base", "misc"}
PICKLES = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
HEAVY = ("torch", "transformers", "nnsight", "textual", "starlette")


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 50


def test_files_are_short() -> None:
    long = {
        named(path): count
        for path in FILES
        if (count := path.read_text(encoding="utf-8").count("\n")) > MAX_FILE_LINES
    }
    assert not long


def test_functions_are_short() -> None:
    long = {
        f"{named(path)}:{function.name}": length
        for path in FILES
        for function in functions(path)
        if (length := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long


def test_constructors_are_narrow() -> None:
    wide = {
        f"{named(path)}:{function.lineno}": count
        for path in FILES
        for function in functions(path)
        if function.name == "__init__"
        and (count := len(function.args.args) + len(function.args.kwonlyargs) - 1)
        > MAX_CONSTRUCTOR_PARAMETERS
    }
    assert not wide


def test_no_module_is_named_after_nothing() -> None:
    assert not [named(path) for path in FILES if BANNED_NAMES & {path.stem, path.parent.name}]


def test_every_module_says_what_it_is() -> None:
    silent = [
        named(path)
        for path in FILES
        if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(tree(path))
    ]
    assert not silent


def test_pickle_stays_inside_interventions() -> None:
    users = [
        named(path)
        for path in FILES
        if not named(path).startswith("mesh/interventions/")
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.Import) and PICKLES & {a.name.split(".")[0] for a in node.names})
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLES)
    ]
    assert not users


def test_nothing_broad_is_caught_and_swallowed() -> None:
    swallowing = [
        f"{named(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException"))
        and not _passes_on(node)
    ]
    assert not swallowing


def _passes_on(handler: ast.ExceptHandler) -> bool:
    """Raises again, or hands the exception itself to somebody (an exit code, a future, a reply)."""
    for node in ast.walk(handler):
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, ast.Name) and node.id == handler.name and handler.name:
            return True
    return False


def test_only_the_configuration_reads_the_environment() -> None:
    # supervise hands a child its channel through the environment; local_node starts whole daemons;
    # the built-in model's trainer is a script of its own.
    allowed = {"mesh/config.py", "mesh/supervise.py", "mesh/cli/local_node.py"}
    readers = {
        named(path)
        for path in FILES
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))
    }
    assert readers - allowed <= {
        name for name in readers if name.startswith("mesh/models/builtin/")
    }


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["status", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        f"sys.argv = ['hearthnet', *{arguments!r}]\n"
        "from mesh.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert "HEAVY []" in run.stdout


@pytest.mark.timeout(300)
def test_every_module_can_be_imported_on_its_own_order() -> None:
    """A circular import shows when a module is the first one imported; what others made stays."""
    names = [
        named(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for path in FILES
        if path.stem != "__main__"
    ]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        f"    for own in [m for m in sys.modules if m.split('.')[0] in {PACKAGES!r}]:\n"
        "        del sys.modules[own]\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ImportError as error:\n"
        "        sys.exit(f'{name}: {error}')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
