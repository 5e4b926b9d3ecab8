"""The limits that keep the code readable, checked on every file (see CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.bench import house

ROOT = Path(__file__).parent.parent
PACKAGES = ("mesh", "tui")
FILES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
ONE_IDEA: dict[str, str] = {
    "mesh/types.py": "the vocabulary that every package shares",
    "mesh/errors.py": "every error that is raised on purpose",
    "mesh/shard/taps/session.py": "all that one job can do on one shard",
    "mesh/shard/scheduler.py": "what a device computes next",
    "mesh/client.py": "all that a daemon can be asked",
    "mesh/pipeline/hop.py": "a session on one hop, from the asker's side",
}
"""Files that one idea fills beyond the limit of lines, each with that idea."""
MAX_CONSTRUCTOR_PARAMETERS = 7
MAX_PRIVATE_LOOKS = 104
MAX_MONKEYPATCHES = 26
"""In all tests together: what is there is there, and a new test does without."""
BANNED_NAMES = {"utils", "util", "helpers", "common", "core", "manager", "base", "misc"}
PICKLES = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
HEAVY = ("torch", "transformers", "nnsight", "textual", "starlette", "mesh.node")


@cache
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
        and named(path) not in ONE_IDEA
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


def test_imports_come_first_and_those_for_types_behind_them() -> None:
    late = [
        f"{named(path)}:{statement.lineno}"
        for path in FILES
        for statement in itertools.dropwhile(_opens, tree(path).body)
        if isinstance(statement, ast.Import | ast.ImportFrom)
    ]
    assert not late


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
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _passes_on(node)
    ]
    assert not swallowing


def test_what_is_wrong_is_said_in_a_whole_sentence() -> None:
    """The fix is written behind it."""
    cut = [
        f"{named(path)}:{call.lineno}"
        for path in FILES
        for call in ast.walk(tree(path))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func)[0].isupper()
        and call.args
        and any(keyword.arg == "fix" for keyword in call.keywords)
        and (end := _last_words(call.args[0]))
        and not end.rstrip().endswith((".", "?", "!"))
    ]
    assert not cut


@pytest.mark.parametrize(
    ("passes", "handler"),
    [
        (True, "except Exception: raise"),
        (True, "except Exception as error: raise Other from error"),
        (True, "except BaseException as error: future.set_exception(error)"),
        (True, "except Exception as error: reply = str(error)"),
        (False, "except Exception: pass"),
        (False, "except: pass"),
        (False, "except Exception: logger.exception('lost')"),
        (False, "except Exception as error: logger.exception('lost', error)"),
        (False, "except Exception as error: self.log.warning('lost: %s', str(error))"),
        (False, "except (OSError, Exception) as error: logging.getLogger().error(error)"),
        (False, "except builtins.Exception: pass"),
    ],
)
def test_a_log_line_swallows_as_well(passes: bool, handler: str) -> None:
    (found,) = (n for n in ast.walk(ast.parse(f"try: x()\n{handler}")) if hasattr(n, "handlers"))
    assert _is_broad(found.handlers[0].type)
    assert _passes_on(found.handlers[0]) == passes


def _opens(statement: ast.stmt) -> bool:
    """Whether it is the module's docstring, or one of its imports."""
    return isinstance(statement, ast.Import | ast.ImportFrom) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _last_words(said: ast.expr) -> str:
    """What a text ends in; empty where that is known only when it runs."""
    last = said.values[-1] if isinstance(said, ast.JoinedStr) else said
    return str(last.value) if isinstance(last, ast.Constant) else ""


def _is_broad(caught: ast.expr | None) -> bool:
    """Catches what nobody can have foreseen."""
    if caught is None:
        return True
    if isinstance(caught, ast.Tuple):
        return any(_is_broad(one) for one in caught.elts)
    return ast.unparse(caught).rpartition(".")[2] in ("Exception", "BaseException")


def _passes_on(node: ast.AST, caught: str | None = None) -> bool:
    """Raises again, or hands the exception itself to somebody who is no logger."""
    if isinstance(node, ast.ExceptHandler):
        caught = node.name
    if isinstance(node, ast.Raise) or (isinstance(node, ast.Name) and node.id == caught):
        return True
    if isinstance(node, ast.Call) and _is_logger(node.func):
        return False
    return any(_passes_on(child, caught) for child in ast.iter_child_nodes(node))


def _is_logger(called: ast.expr) -> bool:
    """``logger.warning``, ``self._log.exception``, ``logging.getLogger().error``."""
    return isinstance(called, ast.Attribute) and "log" in ast.unparse(called.value).lower()


def test_only_the_configuration_reads_the_environment() -> None:
    # A child gets its channel and what libraries are set up with through the environment;
    # local_node starts whole daemons, and restart one as it was started.
    allowed = {
        "mesh/config/settings.py",
        "mesh/config/variables.py",
        "mesh/processes/child.py",
        "mesh/processes/warm_parent.py",
        "mesh/processes/nursery.py",
        "mesh/cli/local_node.py",
        "mesh/cli/restart.py",
    }
    readers = {
        named(path)
        for path in FILES
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))
    }
    assert readers == allowed


NOWHERE = ["--state-dir", "/nonexistent"]


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        (["--help"], ("asyncio", "rich", "httpx")),
        (["up", "--help"], ()),
        (["status", *NOWHERE], ("pygments",)),
        (["invite", *NOWHERE], ("pygments",)),
    ],
)
def test_what_asks_a_daemon_or_explains_imports_nothing_heavy(
    arguments: list[str], more: tuple[str, ...]
) -> None:
    script = (
        "import sys\n"
        f"sys.argv = ['hearthnet', *{arguments!r}]\n"
        "from mesh.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print('HEAVY', [m for m in {HEAVY + more!r} if m in sys.modules])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert "HEAVY []" in run.stdout


def test_a_daemon_imports_nothing_that_only_its_processes_compute_or_fetch_with() -> None:
    heavy = ("torch", "transformers", "numpy", "httpx", "rich")
    script = f"import sys, mesh.node.daemon\nprint([m for m in {heavy!r} if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == "[]"


@pytest.mark.timeout(300)
def test_every_module_can_be_imported_on_its_own_order() -> None:
    """A circular import shows when a module is the first one imported; what others made stays.

    Where no modules import each other in a circle with several ways in, the order makes no
    difference.
    """
    modules = {module_of(path): imported(path) for path in FILES if path.stem != "__main__"}
    several_ways = circles(modules)
    first = [name for name in modules if {name, *reachable(modules, [name])} & several_ways]
    script = (
        "import importlib, sys\n"
        f"for name in {sorted(modules, key=lambda name: name not in first)!r}:\n"
        f"    for own in [m for m in sys.modules if m.split('.')[0] in {PACKAGES!r}]:\n"
        f"        if name in {first!r}:\n"
        "            del sys.modules[own]\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ImportError as error:\n"
        "        sys.exit(f'{name}: {error}')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]


def test_a_circle_of_imports_is_seen() -> None:
    circle = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": set[str]()}
    assert circles(circle) == {"b", "c"}
    package = {"a": {"a.b"}, "a.b": {"a", "a.c"}, "a.c": {"a"}, "d": {"a", "a.c"}}
    assert circles(package) == set()
    assert circles(package | {"a.c": {"a", "d"}}) == {*package}
    code = (
        "import a\nif TYPE_CHECKING:\n    import b\n"
        "try:\n    from c import d\nexcept E:\n    pass\n"
        "def late():\n    import f\nclass Now:\n    import g\n"
    )
    assert set(named_at_import(ast.parse(code).body)) == {"a", "c", "c.d", "g"}


def circles(modules: Mapping[str, Iterable[str]]) -> set[str]:
    """The modules in circles that begin with whichever of them is imported first.

    Whoever imports a part of a package imports the package before it: a circle of a package and its
    parts always begins there.
    """
    reached = {name: reachable(modules, modules[name]) for name in modules}
    found = set()
    for name in modules:
        circle = {other for other in reached[name] if name in reached[other]}
        package = min(circle, key=len, default="")
        if any(other != package and not other.startswith(f"{package}.") for other in circle):
            found.add(name)
    return found


def module_of(path: Path) -> str:
    return named(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imported(path: Path) -> set[str]:
    """What a module imports while it is imported: names of modules, and of their packages."""
    parts = [name.split(".") for name in named_at_import(tree(path).body)]
    parts.append(module_of(path).split(".")[:-1])
    return {".".join(name[:length]) for name in parts for length in range(1, len(name) + 1)}


def named_at_import(body: Sequence[ast.AST]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                yield from (module, *(f"{module}.{alias.name}" for alias in node.names))
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from named_at_import(node.orelse)
            case _:
                yield from named_at_import([*ast.iter_child_nodes(node)])


def reachable(edges: Mapping[str, Iterable[str]], start: Iterable[str]) -> set[str]:
    """All that is imported when these are."""
    found: set[str] = set()
    left = list(start)
    while left:
        name = left.pop()
        if name in edges and name not in found:
            found.add(name)
            left += edges[name]
    return found


def test_tests_come_through_the_door() -> None:
    texts = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")]
    assert sum(map(house.private_looks, texts)) <= MAX_PRIVATE_LOOKS
    assert sum(map(house.monkeypatches, texts)) <= MAX_MONKEYPATCHES
