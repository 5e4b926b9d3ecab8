"""Whose a class, a module or an attribute is: the author's of the guarded code, or somebody else's.

A name with one underscore in front is its owner's own affair. Whoever wrote a class or a module may
use it there; of everything else it is the inside. Refuses nothing itself.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from torch.autograd.function import FunctionMeta

from mesh.errors import PolicyViolation
from mesh.interventions.jail import allowed

_SUPER_OF = vars(super)["__self_class__"].__get__
_SUPER_AFTER = vars(super)["__thisclass__"].__get__


ADDRESSING = frozenset(("__array_interface__", "__array_struct__", "__cuda_array_interface__"))
"""By these, an object says where in memory its numbers are."""
_TELLING = ADDRESSING | {
    "__class__", "__reduce__", "__reduce_ex__", "__getattr__", "__getattribute__", "__mro__",
}  # fmt: skip
"""By these, libraries take the memory, the class or the parts of an object from what it says."""


def require_harmless(names: Iterable[str]) -> None:
    """Raise PolicyViolation for a name by which an object would say of itself what is not so."""
    for name in names:
        if type(name) is not str or name in _TELLING:
            raise PolicyViolation(
                f"an attribute called `{name}` is not available to traced code of this key.",
                fix="Do without it, or ask for your key to be marked trusted.",
            )


def _no_address(owner: object) -> NoReturn:
    if any("__getattr__" in vars(kind) for kind in type(owner).__mro__):  # it is asked next
        raise PolicyViolation(
            f"a {type(owner).__name__} as an array is not available to traced code of this key.",
            fix="Do without it, or ask for your key to be marked trusted.",
        )
    raise AttributeError(f"{type(owner).__name__} says of no memory that it is its own")


_NO_ADDRESS = property(_no_address)


class UserClass(type):
    """The class of classes that guarded code defines; their instances are the user's own."""

    def __init__(cls, name: str, bases: tuple[type, ...], inside: dict[str, Any], **given: Any):
        """Have its objects say of no memory that it is theirs, whatever gets into them."""
        super().__init__(name, bases, inside, **given)
        others = (vars(kind) for kind in cls.__mro__ if not isinstance(kind, UserClass))
        for each in ADDRESSING.difference(*others):
            setattr(cls, each, _NO_ADDRESS)


class UserAbstractClass(UserClass, ABCMeta):
    """The same for classes with abstract methods."""


class UserObject(metaclass=UserClass):
    """A base of such a class that has none."""


class UserFunctionClass(UserClass, FunctionMeta):
    """The same for operations that say what their gradients are; what their methods get first, to
    keep things in from one to the other, is the author's as well."""

    def __init__(cls, name: str, bases: tuple[type, ...], inside: dict[str, Any], **given: Any):
        """See `FunctionMeta`."""
        super().__init__(name, bases, inside, **given)
        made: Any = cls._backward_cls
        kept = {"_forward_cls": cls, "_autograd_function_id": made._autograd_function_id}
        cls._backward_cls = UserClass(made.__name__, made.__bases__, kept)


CLASS_OF = {type: UserClass, ABCMeta: UserAbstractClass, FunctionMeta: UserFunctionClass}
"""By what Python would make them with, the class of classes of the author's own."""


class Namespace(SimpleNamespace, metaclass=UserClass):
    """In the place of Python's, whose attributes may have any name."""

    def __init__(self, /, *given: Any, **names: Any) -> None:
        names = dict(*given, **names)
        require_harmless(names)
        super().__init__(**names)

    def __reduce__(self) -> tuple[Any, ...]:
        return SimpleNamespace, (), dict(vars(self))

    def __repr__(self) -> str:
        return repr(SimpleNamespace(**vars(self)))


class UserModule(ModuleType):
    """A module of the job's author that came along by value."""


def is_own(owner: Any, name: str) -> bool:
    """Whether an attribute with one underscore in front is the author's, not somebody's inside."""
    if not allowed.is_private(name) or name == "_backward_cls":  # which torch puts there
        return False
    if type(owner) is UserModule:
        return name in vars(owner)
    line = _classes(owner)
    if tuple in line and name in allowed.NAMED_TUPLE:
        return True
    provider = next((kind for kind in line if name in vars(kind)), None)
    # No class's, it is the object's: and what others' classes put there is their inside as well.
    return isinstance(provider, UserClass) if provider is not None else _is_plain(line)


def _classes(owner: Any) -> tuple[type, ...]:
    """Where an attribute of `owner` is looked for. Not by `isinstance`: objects may lie."""
    kind = type(owner)
    if kind is super:
        line: tuple[type, ...] = _SUPER_OF(owner).__mro__
        return line[line.index(_SUPER_AFTER(owner)) + 1 :]
    return (owner if issubclass(kind, type) else kind).__mro__


def is_the_author_s(owner: Any) -> bool:
    """Whether it is an object of his class (or a class) that holds nothing but what he gives it."""
    return _is_plain(_classes(owner))


def _is_plain(line: tuple[type, ...]) -> bool:
    return isinstance(line[0], UserClass) and all(
        isinstance(kind, UserClass) or kind.__module__.startswith(allowed.PLAIN_BASES)
        for kind in line
    )
