"""The patterns of `match` in other words: they look at attributes, and every look goes by a guard.

A pattern becomes a condition; its names are bound when all of it has matched, as Python does. Knows
syntax only; what the conditions call is in `guards`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

Subject = Callable[[], ast.expr]
"""Makes the expression of what a pattern is compared with; every use in a tree needs its own."""


class Patterns:
    """Turns the patterns of one statement into conditions. `names` are its temporary ones.

    `visit` guards an expression of the author's, `new_name` makes a name that no author can write,
    `check` refuses names (of captures) and attributes that must not be named.
    """

    def __init__(
        self,
        visit: Callable[[ast.expr], ast.expr],
        new_name: Callable[[], str],
        check: Callable[[str, bool], None],
    ) -> None:
        self.names: list[str] = []
        self._visit = visit
        self._new_name = new_name
        self._check = check

    def condition(self, pattern: ast.pattern, subject: str) -> ast.expr:
        """True when `pattern` matches what the name `subject` holds, and its names are bound."""
        tests, captures = self._of(pattern, lambda: _load(subject))
        return _all([*tests, *(_bound(name, value) for name, value in captures)])

    def _of(
        self, pattern: ast.pattern, subject: Subject
    ) -> tuple[list[ast.expr], list[tuple[str, Subject]]]:
        """(conditions, what is captured when they hold)"""
        match pattern:
            case ast.MatchValue(value=value):
                return [ast.Compare(subject(), [ast.Eq()], [self._visit(value)])], []
            case ast.MatchSingleton(value=constant):
                return [ast.Compare(subject(), [ast.Is()], [ast.Constant(constant)])], []
            case ast.MatchAs(pattern=inner, name=name):
                tests, captures = ([], []) if inner is None else self._of(inner, subject)
                return tests, [*captures, *self._captured(name, subject)]
            case ast.MatchOr(patterns=alternatives):
                return self._either(alternatives, subject)
        found, parts = self._inner(pattern, subject)
        return self._parts(found, parts)

    def _inner(self, pattern: ast.pattern, subject: Subject) -> tuple[ast.expr, list[ast.pattern]]:
        """What gives the inner values of a pattern that has some, and the patterns they match."""
        match pattern:
            case ast.MatchSequence(patterns=parts):
                return self._sequence(parts, subject)
            case ast.MatchMapping(keys=keys, patterns=parts, rest=rest):
                wanted = ast.Tuple([self._visit(key) for key in keys], ast.Load())
                found = _call("_match_mapping_", subject(), wanted, ast.Constant(rest is not None))
                return found, [*parts, *([ast.MatchAs(name=rest)] if rest else [])]
            case ast.MatchClass(cls=kind, patterns=parts, kwd_attrs=names, kwd_patterns=more):
                for name in names:
                    self._check(name, True)
                attributes = ast.Tuple([ast.Constant(name) for name in names], ast.Load())
                count = ast.Constant(len(parts))
                found = _call("_match_class_", subject(), self._visit(kind), count, attributes)
                return found, [*parts, *more]
        raise SyntaxError(f"{type(pattern).__name__} is no pattern of a case")

    def _captured(self, name: str | None, subject: Subject) -> list[tuple[str, Subject]]:
        if name is None:
            return []
        self._check(name, False)
        return [(name, subject)]

    @staticmethod
    def _sequence(
        parts: Sequence[ast.pattern], subject: Subject
    ) -> tuple[ast.expr, list[ast.pattern]]:
        stars = [place for place, part in enumerate(parts) if isinstance(part, ast.MatchStar)]
        before, after = len(parts), None
        if stars:
            before, after = stars[0], len(parts) - stars[0] - 1
        found = _call("_match_sequence_", subject(), ast.Constant(before), ast.Constant(after))
        return found, [
            ast.MatchAs(name=part.name) if isinstance(part, ast.MatchStar) else part
            for part in parts
        ]

    def _parts(
        self, found: ast.expr, patterns: Sequence[ast.pattern]
    ) -> tuple[list[ast.expr], list[tuple[str, Subject]]]:
        """`found` gives None, or a list with something for each pattern."""
        name = self._temporary()
        tests: list[ast.expr] = [
            ast.Compare(_named(name, found), [ast.IsNot()], [ast.Constant(None)])
        ]
        captures: list[tuple[str, Subject]] = []
        for place, pattern in enumerate(patterns):
            more, caught = self._of(pattern, _item(name, place))
            tests += more
            captures += caught
        return tests, captures

    def _either(
        self, alternatives: Sequence[ast.pattern], subject: Subject
    ) -> tuple[list[ast.expr], list[tuple[str, Subject]]]:
        """All alternatives capture the same names, each from a place of its own."""
        places: dict[str, str] = {}
        tests = []
        for alternative in alternatives:
            conditions, captures = self._of(alternative, subject)
            for name, value in captures:
                if name not in places:
                    places[name] = self._temporary()
                conditions.append(_bound(places[name], value))
            tests.append(_all(conditions))
        return (
            [ast.BoolOp(ast.Or(), tests)],
            [(name, _name(place)) for name, place in places.items()],
        )

    def _temporary(self) -> str:
        name = self._new_name()
        self.names.append(name)
        return name


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _name(name: str) -> Subject:
    return lambda: _load(name)


def _item(name: str, place: int) -> Subject:
    return lambda: ast.Subscript(_load(name), ast.Constant(place), ast.Load())


def _named(name: str, value: ast.expr) -> ast.expr:
    return ast.NamedExpr(ast.Name(name, ast.Store()), value)


def _bound(name: str, value: Subject) -> ast.expr:
    """True, and the name is bound: a list of one thing is never false."""
    return ast.List([_named(name, value())], ast.Load())


def _all(conditions: list[ast.expr]) -> ast.expr:
    if len(conditions) > 1:
        return ast.BoolOp(ast.And(), conditions)
    return conditions[0] if conditions else ast.Constant(True)


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(_load(name), list(arguments), [])
