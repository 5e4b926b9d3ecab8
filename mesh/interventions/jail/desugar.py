"""Compiling a stranger's source so that every access goes through a guard.

RestrictedPython does the rewriting. Here is what it rejects although ordinary trace bodies use it:
augmented assignment to attributes and items, annotated assignment, `nonlocal`, `print`, star
arguments without a frame in between. Knows nothing of what the guards allow.
"""

from __future__ import annotations
import __future__

import ast
import copy
from types import CodeType
from typing import Any

from RestrictedPython.transformer import (
    IOPERATOR_TO_STR,
    RestrictingNodeTransformer,
    copy_locations,
)

from mesh.errors import PolicyViolation
from mesh.interventions.jail.allowed import DUNDERS


class _Transformer(RestrictingNodeTransformer):  # type: ignore[misc]
    """RestrictedPython's policy, with the ordinary constructs it lacks put in other words."""

    _in_class = False

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id == "print" and isinstance(node.ctx, ast.Load):
            return node
        return super().visit_Name(node)

    def visit_Call(self, node: ast.Call) -> Any:
        # A wrapper around calls with stars would hide the caller's frame, which a trace looks up.
        return self.node_contents_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if node.attr not in DUNDERS or not isinstance(node.ctx, ast.Load):
            return super().visit_Attribute(node)
        node = self.node_contents_visit(node)
        return self._guard("_getattr_", node, node.value, ast.Constant(node.attr))

    def check_name(self, node: Any, name: str | None, allow_magic_methods: bool = False) -> None:
        if not (allow_magic_methods and name in DUNDERS):
            super().check_name(node, name, allow_magic_methods)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> Any:
        for name in node.names:
            self.check_name(node, name)
        return node

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
        if name.startswith("_"):
            self.error(node, f'"{name}" is an invalid attribute name because it starts with "_".')

    def _guard(self, guard: str, node: ast.AST, *arguments: ast.expr) -> ast.Call:
        call = _call(guard, *arguments)
        copy_locations(call, node)
        return call


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _assign(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign(targets=[ast.Name(name, ast.Store())], value=value)


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(func=_load(name), args=list(arguments), keywords=[])


def compile_guarded(source: str | ast.Module, filename: str) -> CodeType:
    """Compile for execution among the guards; line numbers stay the user's own.

    Raises PolicyViolation, with the line, for what is not allowed; SyntaxError as usual.
    """
    tree = copy.deepcopy(source) if isinstance(source, ast.Module) else ast.parse(source, filename)
    errors: list[str] = []
    guarded = _Transformer(errors).visit(tree)
    if errors:
        where, _, what = errors[0].partition(": ")
        raise PolicyViolation(
            f"{where.lower()} of the traced code: {what}",
            fix="Write it differently, or ask for your key to be marked trusted.",
            param=where.removeprefix("Line "),
        )
    # As nnsight does: a client does not ship the names that only annotations use.
    flags = __future__.annotations.compiler_flag
    code: CodeType = compile(guarded, filename, "exec", flags=flags, dont_inherit=True)
    return code
