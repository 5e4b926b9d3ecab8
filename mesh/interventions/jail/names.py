"""The names that guarded code finds without an import: the allowed builtins, and the guards that
its rewriting calls.

Builtins that are not for everybody are there as well, and refuse to be called with a sentence.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from typing import Any

from RestrictedPython.Guards import (
    guarded_iter_unpack_sequence,
    guarded_unpack_sequence,
)

from mesh.interventions.jail import allowed
from mesh.interventions.jail.guards import (
    guarded_getattr,
    guarded_hasattr,
    guarded_import,
    guarded_import_from,
    guarded_write,
    match_class,
    match_mapping,
    match_sequence,
    refuse,
    refuse_metaclass,
    type_of,
)
from mesh.interventions.jail.ownership import CLASS_OF
from mesh.interventions.jail.standins import RefusedFunction

_IN_PLACE = {
    "+=": operator.iadd, "-=": operator.isub, "*=": operator.imul, "/=": operator.itruediv,
    "%=": operator.imod, "**=": operator.ipow, "<<=": operator.ilshift, ">>=": operator.irshift,
    "|=": operator.ior, "^=": operator.ixor, "&=": operator.iand, "//=": operator.ifloordiv,
    "@=": operator.imatmul,
}  # fmt: skip


class _Metaclass:
    """What makes the classes of guarded code: `UserClass`, unless their bases want their own."""

    def __prepare__(self, name: str, bases: tuple[type, ...]) -> Any:
        return _fitting(bases).__prepare__(name, bases)

    def __call__(self, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        refuse_metaclass(bases)
        return _fitting(bases)(name, bases, namespace)


def _fitting(bases: tuple[type, ...]) -> type:
    wanted = next((type(base) for base in bases if type(base) is not type), type)
    return CLASS_OF.get(wanted, wanted)


def _in_place(op: str, old: Any, new: Any) -> Any:
    operation: Callable[[Any, Any], Any] = _IN_PLACE[op]
    return operation(old, new)


def _set_attribute(owner: Any, name: str, value: Any) -> None:
    setattr(guarded_write(owner), name, value)


def _delete_attribute(owner: Any, name: str) -> None:
    delattr(guarded_write(owner), name)


def guarded_builtins(suffix: str = "") -> dict[str, Any]:
    """The builtins of guarded code: the allowed ones, and the guards its rewriting calls.

    With a `suffix` that nobody knows, no variable that comes along can take a guard's place.
    """
    guards = {name + suffix: guard for name, guard in _GUARDS.items()}
    exceptions = {n: v for n, v in vars(builtins).items() if isinstance(v, type)
                  and issubclass(v, BaseException)}  # fmt: skip
    return {
        **_REFUSED,
        **exceptions,
        **{name: getattr(builtins, name) for name in allowed.BUILTINS},
        # A class takes its module from here; `dataclass` wants one that exists.
        "__name__": "builtins",
        # Statements go by `_import_`; this is what compiled code fetches its own parts with, at
        # their first use, as numpy's ``mean`` does. No author can name it.
        "__import__": builtins.__import__,
        "type": type_of,
        "getattr": guarded_getattr,
        "hasattr": guarded_hasattr,
        "setattr": _set_attribute,
        "delattr": _delete_attribute,
        "format": builtins.format,
        **guards,
    }


_GUARDS: dict[str, Any] = {
    "__metaclass__": _Metaclass(),
    "_getattr_": guarded_getattr,
    "_getitem_": operator.getitem,
    "_getiter_": iter,
    "_write_": guarded_write,
    "_inplacevar_": _in_place,
    "_import_": guarded_import,
    "_import_from_": guarded_import_from,
    "_unpack_sequence_": guarded_unpack_sequence,
    "_iter_unpack_sequence_": guarded_iter_unpack_sequence,
    "_match_sequence_": match_sequence,
    "_match_mapping_": match_mapping,
    "_match_class_": match_class,
}
_REFUSED = {
    name: RefusedFunction(refuse(f"`{name}`"))
    for name, value in vars(builtins).items()
    if callable(value) and not name.startswith("_")
}
