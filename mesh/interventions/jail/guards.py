"""What guarded code calls instead of reading, writing and importing: the checks themselves.

Each guard is one function that either does what Python would have done or raises PolicyViolation
with a sentence. Lives in the job's process, beside the code it guards: a fence, not a wall.
"""

from __future__ import annotations

import importlib
import string
from _string import formatter_field_name_split  # type: ignore[import-not-found]
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from nnsight.intervention.envoy import Envoy
from nnsight.tracing.tracer import Tracer
from RestrictedPython.transformer import INSPECT_ATTRIBUTES
from transformers import PreTrainedTokenizerBase

from mesh.errors import PolicyViolation
from mesh.interventions.jail import allowed
from mesh.interventions.jail.ownership import (
    Namespace,
    UserClass,
    UserModule,
    is_own,
    is_the_author_s,
)

_MISSING = object()
_SELF_MATCHING = (
    bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple,
)  # fmt: skip
"""Classes of which ``case int(x)`` captures the object itself."""
_DATA = (bool, int, float, complex, str, type(None), torch.dtype, torch.Size)
"""What opens nothing, whoever has it."""
_COMPILED = frozenset(dir(torch._C)).difference(dir(torch._C._VariableFunctions))


def refuse(what: str) -> PolicyViolation:
    """The error for something this key may not use."""
    return PolicyViolation(
        f"{what} is not available to traced code of this key.",
        fix="Do without it, or ask for your key to be marked trusted.",
    )


def type_of(*arguments: Any) -> Any:
    """``type(x)``, of which nobody gets a class of classes."""
    if len(arguments) != 1:
        raise refuse("making a class by calling `type`")
    kind = type(arguments[0])
    # The class of a class makes classes, of any names.
    return type_of if issubclass(kind, type) else kind


def refuse_metaclass(bases: tuple[Any, ...]) -> None:
    """Raise PolicyViolation for a class whose objects would be classes, made of any names."""
    classes = (base for base in bases if isinstance(base, type))
    if type_of in bases or any(issubclass(base, type) for base in classes):
        raise refuse("a class of classes")


def module_allowed(name: str) -> bool:
    """Whether `name` is on the list, itself or below one whose submodules are."""
    if name in allowed.MODULES:
        return True
    parts = name.split(".")
    if any(part.startswith("_") for part in parts):
        return False
    return any(allowed.MODULES.get(".".join(parts[:n]), False) for n in range(1, len(parts)))


def _leads_to_allowed(name: str) -> bool:
    """Whether it is a package of which modules are on the list, and nothing else is."""
    return any(each.startswith(f"{name}.") for each in allowed.MODULES)


def _check_module_attribute(module: ModuleType, name: str) -> None:
    full = module.__name__
    if not module_allowed(full):
        if _leads_to_allowed(full) and module_allowed(f"{full}.{name}"):
            return
        raise refuse(f"`{full}.{name}`" if _leads_to_allowed(full) else f"module `{full}`")
    root = full.partition(".")[0]
    only = allowed.ONLY_IN_MODULES.get(full)
    denied = allowed.DENIED_IN_MODULES.get(root, ())
    compiled = full == "torch" and name in _COMPILED and name not in allowed.TORCH_COMPILED
    # They are made of addresses, if one says so.
    is_memory = root == "torch" and name.endswith("Storage")
    if compiled or is_memory or name in denied or (only is not None and name not in only):
        raise refuse(f"`{full}.{name}`")


def _check_owner(owner: Any, name: str) -> None:
    hidden = name.startswith("_") and name != "_" and name not in allowed.DUNDERS
    if hidden and not is_own(owner, name):
        raise refuse(f"`{name}`, as any name of others' that starts with an underscore,")
    if type(owner) is UserModule:
        return
    denied = allowed.DENIED_ANYWHERE
    if isinstance(owner, ModuleType):
        _check_module_attribute(owner, name)
    else:
        denied |= allowed.DENIED_METHODS
    listed = isinstance(owner, Envoy) or is_the_author_s(owner)
    if name in INSPECT_ATTRIBUTES or (name in denied and not listed):
        raise refuse(f"`.{name}`")
    if isinstance(owner, Tracer) and name not in allowed.TRACER:
        raise refuse(f"`.{name}` of a tracer")


def _check_value(owner: Any, name: str, value: Any) -> None:
    """What nnsight's own objects hand out is on a list, or a part of the model, or plain data."""
    if isinstance(owner, Envoy):
        listed = name in allowed.ENVOY or isinstance(value, Envoy | torch.Tensor)
        plain = listed or type(value) in _DATA or _is_added(owner, name, value)
    elif type(owner).__module__.startswith("nnsight."):
        plain = name in allowed.NNSIGHT or not callable(value) or _is_of_nnsight(value)
    else:
        plain = True
    if not plain:
        raise refuse(f"`.{name}` of a {type(owner).__name__}")
    own = type(value) is UserModule
    if isinstance(value, ModuleType) and not own:
        found = value.__name__
        if not module_allowed(found) and not _leads_to_allowed(found):
            raise refuse(f"module `{found}`")


def _is_added(model: Any, name: str, value: Any) -> bool:
    """Whether an author's class of models has it, or he gave this object of it one of his own."""
    line = type(model).__mro__
    provider = next((kind for kind in line if name in vars(kind)), None)
    if provider is not None:
        return isinstance(provider, UserClass)
    return isinstance(line[0], UserClass) and is_the_author_s(value)


def _is_of_nnsight(value: Any) -> bool:
    return type(value).__module__.startswith("nnsight.")


def guarded_getattr(owner: Any, name: str, default: Any = _MISSING) -> Any:
    """``owner.name`` as far as it is allowed."""
    if type(name) is not str:
        raise TypeError("attribute name must be string")
    _check_owner(owner, name)
    if name in ("format", "format_map"):
        if isinstance(owner, str):
            return _formatter(owner, name)
        if isinstance(owner, type) and issubclass(owner, str):
            raise refuse(f"`str.{name}` (as opposed to `text.{name}`)")
    value = getattr(owner, name) if default is _MISSING else getattr(owner, name, default)
    _check_value(owner, name, value)
    return Namespace if value is SimpleNamespace else value


class _Formatter(string.Formatter):
    """`str.format` whose fields go through the guard."""

    def get_field(
        self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, int | str]:
        first, rest = formatter_field_name_split(field_name)
        value = self.get_value(first, args, kwargs)
        for is_attribute, key in rest:
            value = guarded_getattr(value, key) if is_attribute else value[key]
        return value, first


def _formatter(text: str, name: str) -> Callable[..., str]:
    if name == "format_map":
        return lambda mapping: _Formatter().vformat(text, (), mapping)
    return lambda *args, **kwargs: _Formatter().vformat(text, args, kwargs)


def guarded_hasattr(owner: Any, name: str) -> bool:
    """Whether guarded code could read it."""
    try:
        guarded_getattr(owner, name)
    except (AttributeError, PolicyViolation):
        return False
    return True


class _Writable:
    """Takes assignments for an object whose attributes may be written in part."""

    __slots__ = ("_names", "_owner")

    def __init__(self, owner: Any, names: frozenset[str] | None) -> None:
        object.__setattr__(self, "_owner", owner)
        object.__setattr__(self, "_names", names)

    def _check(self, name: str) -> None:
        names = object.__getattribute__(self, "_names")
        owner = object.__getattribute__(self, "_owner")
        hidden = name.startswith("_") and not (names is None and is_own(owner, name))
        forbidden = hidden or name in INSPECT_ATTRIBUTES
        if forbidden or (names is not None and name not in names):
            raise refuse(f"assigning to `.{name}` here")

    def __setattr__(self, name: str, value: Any) -> None:
        owner = object.__getattribute__(self, "_owner")
        if not _is_attaching(owner, name, value):
            object.__getattribute__(self, "_check")(name)
        setattr(owner, name, value)

    def __delattr__(self, name: str) -> None:
        object.__getattribute__(self, "_check")(name)
        delattr(object.__getattribute__(self, "_owner"), name)

    def __setitem__(self, key: Any, value: Any) -> None:
        object.__getattribute__(self, "_owner")[key] = value

    def __delitem__(self, key: Any) -> None:
        del object.__getattribute__(self, "_owner")[key]


def _is_attaching(owner: Any, name: str, value: Any) -> bool:
    """Whether a module is given to one of the model's as its child, or in the place of one."""
    if not isinstance(owner, Envoy) or not issubclass(type(value), torch.nn.Module):
        return False
    is_free = name not in vars(owner) or isinstance(vars(owner)[name], Envoy)
    return is_free and not name.startswith("_") and not hasattr(type(owner), name)


_TENSOR_WRITABLE = frozenset(("grad", "requires_grad", "data"))
_TOKENIZER_WRITABLE = frozenset(("padding_side", "truncation_side", "pad_token", "pad_token_id"))


def guarded_write(owner: Any) -> Any:
    """What ``owner.x = y`` and ``owner[x] = y`` are carried out on."""
    if type(owner) in (dict, list):
        return owner
    if isinstance(type(owner), UserClass) or isinstance(owner, UserClass):
        return _Writable(owner, None)
    if isinstance(owner, ModuleType | type | FunctionType | Tracer):
        raise refuse(f"changing `{getattr(owner, '__name__', type(owner).__name__)}`")
    if isinstance(owner, torch.Tensor):
        return _Writable(owner, _TENSOR_WRITABLE)
    if isinstance(owner, PreTrainedTokenizerBase):
        return _Writable(owner, _TOKENIZER_WRITABLE)
    return _Writable(owner, allowed.ENVOY_WRITABLE)


def guarded_import(name: str, leaf: bool) -> ModuleType:
    """``import name``; the module itself where it is renamed (`leaf`), else the one it is in."""
    module = _imported(name)
    return module if leaf else importlib.import_module(name.partition(".")[0])


def guarded_import_from(module: str, name: str) -> Any:
    """``from module import name``"""
    found = _imported(module)
    try:
        return guarded_getattr(found, name)
    except AttributeError:
        if module_allowed(f"{module}.{name}"):
            return _imported(f"{module}.{name}")
        raise ImportError(f"cannot import name {name!r} from {module!r}") from None


def _imported(name: str) -> ModuleType:
    if not module_allowed(name):
        raise refuse(f"module `{name}`")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        root = name.partition(".")[0]
        if error.name != root or root not in allowed.EXTRAS:
            raise
        raise PolicyViolation(
            f"module `{root}` is not installed on this node.",
            fix=f"Whoever runs the node installs it with: pip install 'hearthnet[{root}]'",
        ) from None


def match_sequence(subject: Any, before: int, after: int | None) -> list[Any] | None:
    """The items of a sequence of `before` items or, with `after`, of at least as many as both.

    Then what is between the two is one item, a list.
    """
    if not isinstance(subject, Sequence) or isinstance(subject, str | bytes | bytearray):
        return None
    items = [subject[place] for place in range(len(subject))]
    if after is None:
        return items if len(items) == before else None
    if len(items) < before + after:
        return None
    stop = len(items) - after
    return [*items[:before], items[before:stop], *items[stop:]]


def match_mapping(subject: Any, keys: tuple[Any, ...], with_rest: bool) -> list[Any] | None:
    """The values of `keys`, all of which it has; with `with_rest`, a dict of all others behind."""
    if not isinstance(subject, Mapping):
        return None
    values = [subject.get(key, _MISSING) for key in keys]
    if any(value is _MISSING for value in values):
        return None
    rest = {key: subject[key] for key in subject if key not in keys} if with_rest else None
    return values if rest is None else [*values, rest]


def match_class(subject: Any, kind: Any, count: int, names: tuple[str, ...]) -> list[Any] | None:
    """The first `count` attributes that the class matches by place, and those of `names`.

    Each is read as guarded code reads it. Raises PolicyViolation, TypeError.
    """
    if not isinstance(kind, type):
        raise TypeError("called match pattern must be a class")
    if not isinstance(subject, kind):
        return None
    places = getattr(kind, "__match_args__", ())
    values: list[Any] = []
    if count and not places and issubclass(kind, _SELF_MATCHING):
        values, count = [subject], count - 1
    if count > len(places):
        raise TypeError(f"{kind.__name__}() accepts fewer than {count} positional sub-patterns")
    try:
        values += [guarded_getattr(subject, name) for name in (*places[:count], *names)]
    except AttributeError:
        return None
    return values
