"""What Python generates in classes, and what comes with a request without a source: made anew here.

The author's class says by its fields what there was: a data class, a named tuple, an enumeration.
Nothing of theirs is text that is evaluated but the names of fields, which are checked.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import wraps
from keyword import iskeyword
from typing import Any, NoReturn

from mesh.interventions.jail.guards import refuse
from mesh.interventions.jail.ownership import UserFunctionClass, is_the_author_s
from mesh.interventions.jail.standins import CompiledFunction

_OPTIONS = {
    "init": True, "repr": True, "eq": True, "order": False, "unsafe_hash": False, "frozen": False,
}  # fmt: skip
_FIELDS = "__dataclass_fields__"
_AFTER = "__post_init__"


def with_generated(made: type, names: Mapping[str, Any]) -> dict[str, Any]:
    """What is to be in the class `made` of the author's own, `names` being what came for it.

    Raises PolicyViolation, TypeError and ValueError for fields that no such class can have.
    """
    if issubclass(made, Enum):
        return {key: value for key, value in names.items() if key not in vars(made)}
    if issubclass(made, tuple) and "_fields" in names:
        defaults = names.get("_field_defaults", {}).values()
        like: Any = namedtuple(made.__name__, names["_fields"], defaults=defaults)  # type: ignore[misc]
        own = {k: v for k, v in vars(like).items() if k not in ("__doc__", "__module__")}
        return {**names, **own}
    if _FIELDS in names:
        return {**names, **_methods(made, names)}
    if isinstance(made, UserFunctionClass):
        return {key: value for key, value in names.items() if key != "_backward_cls"}
    return dict(names)


def require_field_name(name: Any) -> str:
    """`name`, which a data class's field has. Raises PolicyViolation for one that guarded code
    could not write."""
    if (
        type(name) is not str
        or name.startswith("__")
        or not name.isidentifier()
        or iskeyword(name)
        or unicodedata.normalize("NFKC", name) != name
    ):
        raise refuse(f"a field called `{name}`")
    return name


def _field_name(field: Any) -> str:
    return require_field_name(field.name)


def _methods(made: type, names: Mapping[str, Any]) -> dict[str, Any]:
    """Those methods of a data class that came as compiled code."""
    missing = {name for name, value in names.items() if type(value) is CompiledFunction}
    fields = [each for each in names[_FIELDS].values() if _kind(each) is not _CLASS_VARIABLE]
    options = names.get("__dataclass_params__")
    given: Any = {name: bool(getattr(options, name, value)) for name, value in _OPTIONS.items()}
    like = dataclasses.make_dataclass(
        "Like",
        [(_field_name(each), _type_of(each), _anew(each)) for each in fields],
        namespace={_AFTER: None} if _AFTER in names or hasattr(made, _AFTER) else {},
        **given,
    )
    found = {**vars(like), "__setattr__": _frozen, "__delattr__": _frozen}
    return {name: _of_own(made, found[name]) for name in missing & found.keys()}


_CLASS_VARIABLE = dataclasses._FIELD_CLASSVAR  # type: ignore[attr-defined]
_ONLY_FOR_INIT = dataclasses._FIELD_INITVAR  # type: ignore[attr-defined]


def _kind(field: Any) -> Any:
    return field._field_type


def _type_of(field: Any) -> Any:
    return dataclasses.InitVar[Any] if _kind(field) is _ONLY_FOR_INIT else Any


def _anew(field: Any) -> Any:
    kept = ("default", "default_factory", "init", "repr", "hash", "compare", "kw_only")
    return dataclasses.field(**{name: getattr(field, name) for name in kept})


def _frozen(_instance: Any, name: str, *_value: Any) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot assign to or delete field {name!r}")


def _of_own(made: type, method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` for objects of that class; in others it would read and write unguarded."""

    @wraps(method)
    def checked(instance: Any, *args: Any, **kwargs: Any) -> Any:
        if made not in type(instance).__mro__:
            raise refuse(f"`{made.__name__}.{method.__name__}` of a {type(instance).__name__}")
        return method(instance, *args, **kwargs)

    return checked


def dataclass_state(instance: Any) -> list[Any]:
    """`__getstate__` of a frozen data class with slots, of the author's own."""
    return [getattr(instance, name) for name in _field_names(instance)]


def set_dataclass_state(instance: Any, state: Sequence[Any]) -> None:
    """`__setstate__` of a frozen data class with slots, of the author's own."""
    for name, value in zip(_field_names(instance), state, strict=True):
        object.__setattr__(instance, name, value)


def _field_names(instance: Any) -> list[str]:
    if not is_the_author_s(instance):
        raise refuse(f"the state of a {type(instance).__name__}")
    return [_field_name(field) for field in dataclasses.fields(instance)]
