"""Functions that come with a request as text, made what they were where they were written.

nnsight ships a function by its source and compiles that alone, outside of the class it stood in and
without its decorators. The class that a bare `super()` means is put back; what a decorator had
hidden did not come along at all, and calling such a function says so.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from cloudpickle.cloudpickle import subimport  # type: ignore[import-untyped]
from nnsight.intervention import serialization

from mesh.errors import BadRequest
from mesh.interventions.jail.standins import NamedOnly
from mesh.interventions.jail.storages import REPLACED

_CLASS = "__class__"
_REFUSAL = "__refusal__"
_fill = serialization._fill
_decorated: WeakKeyDictionary[FunctionType, _Decorated] = WeakKeyDictionary()
bare: dict[str, tuple[str, ...]] = {}
"""The functions that came so far and may do something else without the decorators that they had."""

_MODEL_FILE = "nnsight/modeling/transformers.py"
_MODEL_CALLS = frozenset(("generate", "pipe"))
_MAKES_CONTEXTS = frozenset(("contextmanager", "asynccontextmanager"))
_CHANGES_NOTHING = frozenset((
    "property", "setter", "getter", "deleter", "staticmethod", "classmethod",  # come as they are
    "abstractmethod", "final", "override", "overload", "wraps", "no_grad", "inference_mode",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Decorated:
    """A function as its author wrote it, with decorators, which are of these `kinds`."""

    name: str
    decorators: tuple[str, ...]
    kinds: frozenset[str]
    needed: frozenset[str]
    lacks_defaults: bool


def complete_functions(
    load: Callable[..., Any] = serialization._load_function,
    compiled: Callable[[str, str, str], CodeType] | None = None,
) -> None:
    """From here on, functions that this process unpickles are completed; safe to repeat.

    `load` makes one of what came, by `compiled`; both are nnsight's own unless they are given.
    """
    vars(serialization)["compile"] = compiled or _compile
    serialization._load_function = noting_decorators(load)
    serialization._fill = refusing_incomplete(_fill)


def bind_super(tree: ast.Module) -> ast.Module:
    """Have a bare ``super()`` in a method that stands alone name its class, which the client's
    nnsight sends among the names that the function sees; returns `tree`, changed."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args]
            if arguments:
                binder = _Super(arguments[0].arg)
                node.body = [binder.visit(statement) for statement in node.body]
    return tree


def is_nnsight_s(name: str, file: str) -> bool:
    """Whether a function that came, from that file at the client, is what nnsight runs itself for
    ``model.generate`` and ``model.pipe``."""
    return name in _MODEL_CALLS and file.replace("\\", "/").endswith(_MODEL_FILE)


def noting_decorators(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load`, nnsight's loader of functions, for `refusing_incomplete` to know what to expect."""

    def noting(*args: Any) -> Any:
        function = load(*args)
        source, name, defaults, kwdefaults, _, file = args[:6]
        own = is_nnsight_s(name, file)
        if type(function) is FunctionType and source.startswith("@") and not own:
            node = ast.parse(source).body[0]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = len(defaults or ()) + len(kwdefaults or ())
                written = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
                _decorated[function] = _Decorated(
                    name,
                    tuple(f"@{ast.unparse(each)}" for each in node.decorator_list),
                    frozenset(map(_kind, node.decorator_list)),
                    frozenset(serialization._function_referenced_names(source)),
                    given < len(written),
                )
        return function

    return noting


def refusing_incomplete(fill: Callable[..., None]) -> Callable[..., None]:
    """`fill`, which gives a function the names that it sees, for those whose decorator had an own
    function in their place: nnsight sends the names and defaults of that one."""

    def filling(function: Any, names: dict[str, Any]) -> None:
        fill(function, names)
        noted = _decorated.pop(function, None) if type(function) is FunctionType else None
        if noted is None:
            return
        lacks = sorted(noted.needed - {*names, *vars(builtins), noted.name, _CLASS})
        if noted.lacks_defaults:
            lacks.insert(0, "its defaults")
        refusal = _refusal(noted, lacks)
        if refusal is not None:
            function.__globals__[_REFUSAL] = refusal
            function.__code__ = _refuse.__code__
        elif not noted.kinds <= _CHANGES_NOTHING:
            bare[noted.name] = noted.decorators

    return filling


def _refusal(noted: _Decorated, lacks: list[str]) -> BadRequest | None:
    """What calling a function raises that `lacks` something; None where it can run."""
    decorators = ", ".join(noted.decorators)
    if noted.kinds & _MAKES_CONTEXTS:
        return BadRequest(
            f"`{noted.name}` came without {decorators}: nnsight ships a function without its"
            " decorators, and it makes no context then.",
            fix="Define it inside the trace, or as a class with `__enter__` and `__exit__`.",
        )
    if lacks:
        return BadRequest(
            f"`{noted.name}` came without {', '.join(lacks)}: of a function below {decorators}"
            " nnsight ships what the decorator has of these.",
            fix="Do in its body what the decorator does, as with `with torch.no_grad():`, and"
            " take the decorator off.",
        )
    return None


def _kind(decorator: ast.expr) -> str:
    """What a decorator is called, without where it is from and what it is given."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called).rpartition(".")[2]


def _refuse(*_: Any, **__: Any) -> None:
    raise __refusal__  # type: ignore[name-defined]  # noqa: F821 - among the function's names


def _compile(source: str, filename: str, mode: str) -> CodeType:
    code: CodeType = compile(bind_super(ast.parse(source, filename)), filename, mode)
    return code


class CompleteUnpickler(serialization.CustomCloudUnpickler):  # type: ignore[misc]
    """nnsight's unpickler, for payloads that also name what this node does not have."""

    def find_class(self, module: str, name: str) -> Any:
        """A global by name; for what is not here, a stand-in that says so when it is used."""
        if (module, name) in REPLACED:
            return REPLACED[module, name]
        try:
            found = super().find_class(module, name)
        except (ImportError, AttributeError) as error:
            return _missing(f"{module}.{name}", error)
        return _module if found is subimport else found


def _module(name: str) -> Any:
    try:
        return subimport(name)
    except ImportError as error:
        return _missing(name, error)


def _missing(what: str, error: Exception) -> NamedOnly:
    return NamedOnly.of(what, not_here(what, f": {error}", " Or have it installed there."))


def not_here(what: str, why: str = "", *more: str) -> BadRequest:
    """The error for something of a module that this node does not have."""
    root = what.partition(".")[0]
    return BadRequest(
        f"`{what}`, which the trace uses, is not on this node{why}.",
        fix=f"Have `{root}` come along where it is plain Python, by nnsight.register({root}) before"
        f" the trace; else do without it inside of that.{''.join(more)}",
    )


class _Super(ast.NodeTransformer):
    """Names class and object in calls of `super` that belong to one function."""

    def __init__(self, first: str) -> None:
        self._first = first

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        is_bare = not node.args and not node.keywords
        if is_bare and isinstance(node.func, ast.Name) and node.func.id == "super":
            names = (ast.Name(each, ast.Load()) for each in (_CLASS, self._first))
            node.args = [ast.copy_location(name, node) for name in names]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node
