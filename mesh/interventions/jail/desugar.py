"""Compiling a stranger's source so that every access goes through a guard.

RestrictedPython does the rewriting. Here is what it rejects although ordinary trace bodies use it:
augmented assignment to attributes and items, annotated assignment, `nonlocal`, `print`, `match`,
names with one underscore in front, star arguments without a frame in between; and imports, which
become calls. Knows nothing of what the guards allow.
"""

from __future__ import annotations
import __future__

import ast
import copy
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

from RestrictedPython.transformer import (
    IOPERATOR_TO_STR,
    RestrictingNodeTransformer,
    copy_locations,
)

from mesh.errors import PolicyViolation
from mesh.interventions.jail.allowed import CLASS_NAMES, DUNDERS, GUARDS, is_private
from mesh.interventions.jail.matching import Patterns


class _Transformer(RestrictingNodeTransformer):  # type: ignore[misc]
    """RestrictedPython's policy, with the ordinary constructs it lacks put in other words."""

    _in_class = False

    def gen_tmp_name(self) -> str:
        # Ends as the guards' names do, so that no author's name is the same.
        return f"{super().gen_tmp_name()}_"

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id == "print" and isinstance(node.ctx, ast.Load):
            return node
        return super().visit_Name(node)

    def visit_Call(self, node: ast.Call) -> Any:
        # A wrapper around calls with stars would hide the caller's frame, which a trace looks up.
        return self.node_contents_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        is_read = isinstance(node.ctx, ast.Load)
        # Whose they are is found out when the code runs.
        if not (is_private(node.attr) or (is_read and node.attr in DUNDERS)):
            return super().visit_Attribute(node)
        node = self.node_contents_visit(node)
        if is_read:
            return self._guard("_getattr_", node, node.value, ast.Constant(node.attr))
        node.value = self._guard("_write_", node.value, node.value)
        return node

    def check_name(self, node: Any, name: str | None, allow_magic_methods: bool = False) -> None:
        if name is None or is_private(name) or (self._in_class and name in CLASS_NAMES):
            return
        if not (allow_magic_methods and name in DUNDERS):
            super().check_name(node, name, allow_magic_methods)

    def visit_Global(self, node: ast.Global) -> Any:
        for name in node.names:
            self.check_name(node, name)
        return node

    def visit_Nonlocal(self, node: ast.Nonlocal) -> Any:
        for name in node.names:
            self.check_name(node, name)
        return node

    def visit_Import(self, node: ast.Import) -> Any:
        """One assignment per name: the statement would ask nobody for what it takes."""
        super().visit_Import(node)
        return [
            self._bind(
                node,
                alias.asname or alias.name.partition(".")[0],
                _call("_import_", ast.Constant(alias.name), ast.Constant(alias.asname is not None)),
            )
            for alias in node.names
        ]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if node.module == "__future__":
            return super().visit_ImportFrom(node)
        if node.level:
            self.error(node, "imports relative to a package are not allowed.")
        super().visit_ImportFrom(node)
        module = ast.Constant(node.module)
        return [
            self._bind(
                node,
                alias.asname or alias.name,
                _call("_import_from_", module, ast.Constant(alias.name)),
            )
            for alias in node.names
        ]

    def visit_Match(self, node: ast.Match) -> Any:
        """A chain of conditions. Its own names are gone before a body runs, whichever does."""
        patterns = Patterns(self.visit, self.gen_tmp_name, partial(self._check_pattern, node))
        subject = self.gen_tmp_name()
        tests = [patterns.condition(case.pattern, subject) for case in node.cases]
        used = [subject, *patterns.names]
        chain: list[ast.stmt] = [_forget(used)]
        for case, test in reversed(list(zip(node.cases, tests, strict=True))):
            guards = [] if case.guard is None else [self.visit(case.guard)]
            whole = ast.BoolOp(ast.And(), [test, *guards]) if guards else test
            branch = ast.If(whole, [_forget(used), *self._visited(case.body)], chain)
            copy_locations(branch.body[0], case.body[0])
            chain = [branch]
        steps: list[ast.stmt] = [
            _assign(subject, self.visit(node.subject)),
            *(_assign(name, ast.Constant(None)) for name in patterns.names),
            *chain,
        ]
        for step in steps:
            copy_locations(step, node)
        return steps

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        around, self._in_class = self._in_class, True
        visited = super().visit_ClassDef(node)
        self._in_class = around
        return visited

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        around, self._in_class = self._in_class, False
        visited = super().visit_FunctionDef(node)
        self._in_class = around
        return visited

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        """An annotation declares a field in a class; elsewhere it says nothing at run time."""
        if self._in_class:
            return self.node_contents_visit(node)
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        plain = ast.Assign(targets=[node.target], value=node.value)
        copy_locations(plain, node)
        return self.visit(plain)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        """``a.b += c`` in single steps, each guarded, in Python's order of evaluation."""
        if isinstance(node.target, ast.Name):
            return super().visit_AugAssign(node)
        owner, key, old, new = (self.gen_tmp_name() for _ in range(4))
        target = node.target
        steps: list[ast.stmt] = [_assign(owner, self.visit(target.value))]
        if isinstance(target, ast.Attribute):
            self._check_attribute(node, target.attr)
            read = _call("_getattr_", _load(owner), ast.Constant(target.attr))
            place: ast.expr = ast.Attribute(
                _call("_write_", _load(owner)), target.attr, ast.Store()
            )
            used = [owner, old, new]
        else:
            steps.append(_assign(key, self.visit(target.slice)))
            read = _call("_getitem_", _load(owner), _load(key))
            place = ast.Subscript(_call("_write_", _load(owner)), _load(key), ast.Store())
            used = [owner, key, old, new]
        operator = ast.Constant(IOPERATOR_TO_STR[type(node.op)])
        steps += [
            _assign(old, read),
            _assign(new, _call("_inplacevar_", operator, _load(old), self.visit(node.value))),
            ast.Assign(targets=[place], value=_load(new)),
            ast.Delete(targets=[ast.Name(name, ast.Del()) for name in used]),
        ]
        for step in steps:
            copy_locations(step, node)
        return steps

    def _check_attribute(self, node: ast.AST, name: str) -> None:
        if name.startswith("_") and not is_private(name):
            self.error(node, f'"{name}" is an invalid attribute name because it starts with "_".')

    def _check_pattern(self, node: ast.AST, name: str, is_attribute: bool) -> None:
        if is_attribute:
            self._check_attribute(node, name)
        else:
            self.check_name(node, name)

    def _visited(self, body: list[ast.stmt]) -> list[ast.stmt]:
        visited: list[ast.stmt] = []
        for statement in body:
            made = self.visit(statement)
            visited += made if isinstance(made, list) else [made]
        return visited

    def _bind(self, node: ast.stmt, name: str, value: ast.expr) -> ast.stmt:
        step = _assign(name, value)
        copy_locations(step, node)
        return step

    def _guard(self, guard: str, node: ast.AST, *arguments: ast.expr) -> ast.Call:
        call = _call(guard, *arguments)
        copy_locations(call, node)
        return call


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _assign(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign(targets=[ast.Name(name, ast.Store())], value=value)


def _forget(names: list[str]) -> ast.stmt:
    return ast.Delete([ast.Name(name, ast.Del()) for name in names])


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(func=_load(name), args=list(arguments), keywords=[])


def compile_guarded(
    source: str | ast.Module,
    filename: str,
    suffix: str = "",
    finish: Callable[[ast.Module], ast.Module] = lambda tree: tree,
) -> CodeType:
    """Compile for execution among the guards; line numbers stay the user's own.

    The guards' names end in `suffix`, as those of `names.guarded_builtins` do. `finish` may change
    what was found to be allowed. Raises PolicyViolation, with the line, for what is not allowed;
    SyntaxError as usual.
    """
    tree = copy.deepcopy(source) if isinstance(source, ast.Module) else ast.parse(source, filename)
    errors: list[str] = []
    guarded = _Transformer(errors).visit(tree)
    if errors:
        where, _, what = errors[0].partition(": ")
        raise PolicyViolation(
            f"{where.lower()} of the traced code: {what.rstrip('.')}.",
            fix="Write it differently, or ask for your key to be marked trusted.",
            param=where.removeprefix("Line "),
        )
    for node in ast.walk(guarded) if suffix else ():
        if isinstance(node, ast.Name) and node.id in GUARDS:  # no author's: his are checked
            node.id += suffix
    # As nnsight does: a client does not ship the names that only annotations use.
    flags = __future__.annotations.compiler_flag
    code: CodeType = compile(finish(guarded), filename, "exec", flags=flags, dont_inherit=True)
    return code
