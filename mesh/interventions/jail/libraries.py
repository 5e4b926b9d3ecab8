"""What libraries do unguarded with what they are given: read any attribute, evaluate any text.

Code behind the fence may call them, so they find guards before the builtins of the same names.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import importlib
import sys
import typing
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NoReturn

from torch import nn
from transformers import BatchEncoding, GenerationConfig, PreTrainedConfig
from transformers.utils import ModelOutput

from mesh.interventions.jail.generated import require_field_name
from mesh.interventions.jail.guards import refuse, refuse_metaclass
from mesh.interventions.jail.ownership import (
    ADDRESSING,
    UserObject,
    is_the_author_s,
    require_harmless,
)

# Whatever sympy is given as text, also by a symbol's name, it evaluates as Python with these.
_EVALUATING = ("sympy.parsing.sympy_parser", "sympy.utilities.lambdify")
# They read and write attributes of whatever object, by names that they are given.
_NAMING = tuple(
    f"torch.nn.utils.{name}" for name in ("parametrize", "prune", "spectral_norm", "weight_norm")
)
_FIELDS = "__dataclass_fields__"
_COMPARED = frozenset(("__lt__", "__le__", "__gt__", "__ge__"))
_WRITTEN = frozenset(functools.WRAPPER_ASSIGNMENTS) | _COMPARED
_READ = _WRITTEN | {"__annotations__", "__isabstractmethod__", "__partialmethod__", "__get__"}
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)

# Whose attributes have whatever names they are given, without an assignment in the code.
_OPEN = (BatchEncoding, GenerationConfig, ModelOutput, PreTrainedConfig, nn.Module)

_eval = eval
_make_dataclass = dataclasses.make_dataclass
_process_class = vars(dataclasses)["_process_class"]
_get_field = vars(dataclasses)["_get_field"]
_is_dunder = vars(enum)["_is_dunder"]


def guarded_libraries() -> list[tuple[Any, dict[str, Any]]]:
    """What is to be in which module or class while code runs that is fenced in."""
    addresses = property(_refuse_addresses, _refuse_addresses)
    text = {"eval": _refuse_text, "exec": _refuse_text}
    return [
        *((importlib.import_module(name), text) for name in _EVALUATING),
        *_annotations(),
        *((importlib.import_module(name), _NAMED) for name in _NAMING),
        (functools, {"getattr": _read, "setattr": _write}),
        (
            dataclasses,
            {
                "make_dataclass": _made_dataclass,
                "_process_class": _processed_class,
                "_get_field": _field_of,
            },
        ),
        (enum, {"_is_dunder": _is_harmless_dunder}),
        *((kind, dict.fromkeys(ADDRESSING, addresses)) for kind in _OPEN),
    ]


def _refuse_addresses(owner: Any, *_: Any) -> NoReturn:
    raise refuse(f"a {type(owner).__name__} as an array")


def _refuse_text(*_: Any) -> NoReturn:
    raise refuse("evaluating text with sympy")


def _eval_annotation(code: Any, names: dict[str, Any], local: Any = None) -> Any:
    """For annotations that are text: those of libraries only."""
    _require_of_a_library(names)
    return _eval(code, names, local)


def _annotations() -> list[tuple[Any, dict[str, Any]]]:
    """What evaluates annotations that are text."""
    if sys.version_info >= (3, 14):
        import annotationlib

        evaluate = annotationlib.ForwardRef.evaluate

        def of_a_library(reference: Any, *, globals: Any = None, **more: Any) -> Any:
            # What is a name alone is looked up without `eval`, among the builtins as well.
            _require_of_a_library(globals or {})
            return evaluate(reference, globals=globals, **more)

        def eval_keywords(code: Any, globals: Any = None, locals: Any = None) -> Any:
            return _eval_annotation(code, globals or {}, locals)

        reference = (annotationlib.ForwardRef, {"evaluate": of_a_library})
        return [reference, (annotationlib, {"eval": eval_keywords})]
    return [(typing, {"eval": _eval_annotation})]


def _require_of_a_library(names: dict[str, Any]) -> None:
    real = (builtins, vars(builtins))
    if names is vars(builtins) or not any(names.get("__builtins__") is each for each in real):
        raise refuse("evaluating text that annotates")


def _read(owner: Any, name: str, *default: Any) -> Any:
    """For `wraps` and the like, which are told what to copy, and from what."""
    if name == "__dict__":
        # What a module or a part of the model holds would be without its guards in a copy.
        whole = issubclass(type(owner), _FUNCTIONS) or is_the_author_s(owner)
        return getattr(owner, name, *default) if whole and not isinstance(owner, type) else {}
    if name not in _READ:
        raise refuse(f"copying `{name}`")
    return getattr(owner, name, *default)


def _write(owner: Any, name: str, value: Any) -> None:
    if name not in _WRITTEN:
        raise refuse(f"copying `{name}`")
    setattr(owner, name, value)


def _read_named(owner: Any, name: str, *default: Any) -> Any:
    _require_plain(name)
    return getattr(owner, name, *default)


def _write_named(owner: Any, name: str, value: Any) -> None:
    _require_plain(name)
    setattr(owner, name, value)


def _require_plain(name: str) -> None:
    if type(name) is not str or name.startswith("__"):
        raise refuse(f"an attribute called `{name}`")


_NAMED = {"getattr": _read_named, "setattr": _write_named}


def _made_dataclass(
    name: str, fields: Any, *, bases: Any = (), namespace: Any = None, **options: Any
) -> type:
    bases, inside = tuple(bases) or (UserObject,), dict(namespace or {})
    refuse_metaclass(bases)
    require_harmless(inside)
    return _make_dataclass(name, fields, bases=bases, namespace=inside, **options)


def _processed_class(made: type, *options: Any) -> type:
    """The names of fields become text that is executed: also those that came with a base."""
    of_whom = vars(sys.modules.get(made.__module__, builtins))
    if of_whom.get(made.__name__) is made:  # a library's own, and finished
        raise refuse(f"changing `{made.__name__}`")
    for kind in made.__mro__:
        fields = vars(kind).get(_FIELDS, {})
        if type(fields) is not dict:
            raise refuse("such fields of a data class")
        for field in fields.values():
            if type(field) is not dataclasses.Field:
                raise refuse("such a field of a data class")
            require_field_name(field.name)
    processed: type = _process_class(made, *options)
    return processed


def _field_of(made: type, name: str, *more: Any) -> Any:
    require_field_name(name)
    return _get_field(made, name, *more)


def _is_harmless_dunder(name: str) -> Any:
    # An enumeration's own way to be written down is in this library's classes as well.
    require_harmless({name} - {"__reduce__", "__reduce_ex__"})
    return _is_dunder(name)
