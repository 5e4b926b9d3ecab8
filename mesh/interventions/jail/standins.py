"""What stands, in a payload that is read behind the fence, for what is not let in.

A module that comes by value brings all that is in it, also loggers, paths and compiled functions
that no trace looks at. Such things become objects without any effect: they can be made, filled and
passed on, and refuse to be used with a sentence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, NoReturn, Self

from mesh.errors import MeshError, PolicyViolation
from mesh.interventions.jail.guards import refuse
from mesh.interventions.jail.ownership import UserClass


class _Refusing(UserClass):
    """The class of `unavailable` classes, whose own attributes refuse as their objects' do."""

    what: str

    def __getattr__(cls, _: str) -> NoReturn:
        raise refuse(f"`{cls.what}`")


def unavailable(what: str) -> type:
    """A class in the place of the one of this name, or of a function: calling it has no effect."""

    def ignore(*_: Any, **__: Any) -> None:
        return None

    def refused(*_: Any, **__: Any) -> NoReturn:
        raise refuse(f"`{what}`")

    # What reading a payload does to objects, and what using them is.
    filling = ("__init__", "__setstate__", "__setitem__", "append", "extend", "add")
    using = ("__getattr__", "__call__", "__iter__", "__len__", "__getitem__")
    names: dict[str, Any] = {**dict.fromkeys(filling, ignore), **dict.fromkeys(using, refused)}
    names["__new__"] = lambda cls, *_, **__: object.__new__(cls)
    return _Refusing("Unavailable", (), {**names, "what": what})


class NamedOnly(_Refusing):
    """The class of what stands for something that may be named, as types are by annotations, and
    not be used."""

    violation: MeshError

    @classmethod
    def of(cls, what: str, violation: MeshError) -> NamedOnly:
        """In the place of `what`; whoever uses it gets the `violation`."""

        def refused(*_: Any, **__: Any) -> NoReturn:
            raise violation

        return cls("Unavailable", (), {"__new__": refused, "what": what, "violation": violation})

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise cls.violation

    def __getattr__(cls, _: str) -> NoReturn:
        raise cls.violation


class Nothing:
    """In the place of what nothing here looks at: where a module came from, compiled code."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class Missing:
    """There is one of these, and `dataclasses` tells it by identity."""

    def __new__(cls) -> Any:
        return dataclasses.MISSING


class DataclassParams:
    """In the place of what a data class keeps of its options: Pythons differ in which there are."""

    frozen: bool


class RefusedFunction:
    """In the place of a function that is not for traced code, by itself or by its source."""

    def __init__(self, violation: PolicyViolation) -> None:
        self._violation = violation

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise self._violation


class CompiledFunction(RefusedFunction):
    """In the place of a function that came without its source."""

    def __init__(self, *_: Any) -> None:
        super().__init__(
            PolicyViolation(
                "a function came as compiled code, as those do whose source nobody has: what `exec`"
                " or a console defined.",
                fix="Define it in a file or a notebook cell, or inside the trace.",
            )
        )


class Logger:
    """In the place of logging's: prints what those show that nobody has set up."""

    def __init__(self, name: str = "root") -> None:
        self.name = name

    def warning(self, message: object, *args: Any, **_: Any) -> None:
        """Print it."""
        print(str(message) % args if args else message)  # noqa: T201 - its author's log

    error = exception = critical = warn = warning

    def debug(self, *_: Any, **__: Any) -> None:
        """Say nothing."""

    info = log = setLevel = addHandler = debug

    def isEnabledFor(self, level: int) -> bool:
        """Whether that is printed: warnings and what is worse."""
        return level >= _WARNING


_WARNING = 30


class ProgressBar:
    """In the place of tqdm's: goes through what it is given. A job's log is no terminal."""

    def __init__(self, iterable: Iterable[Any] = (), *_: Any, **__: Any) -> None:
        self.iterable = iterable
        self.n: float = 0

    def __iter__(self) -> Iterator[Any]:
        for each in self.iterable:
            yield each
            self.n += 1

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]  # as the iterable has one

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, n: float = 1) -> None:
        """Count on."""
        self.n += n

    def _show_nothing(self, *_: Any, **__: Any) -> None:
        pass

    set_description = set_postfix = set_postfix_str = set_description_str = _show_nothing
    close = clear = refresh = reset = _show_nothing

    @staticmethod
    def write(line: object, *_: Any, **__: Any) -> None:
        """Print between bars, of which there are none."""
        print(line)  # noqa: T201 - what a job prints is its author's log


def _counting(*bounds: int, **_: Any) -> ProgressBar:
    return ProgressBar(range(*bounds))


def progress_modules() -> dict[str, ModuleType]:
    """What stands for tqdm, by the names of its modules."""
    modules = {name: ModuleType(name) for name in _TQDM}
    for module in modules.values():
        bars = dict.fromkeys(("tqdm", "tqdm_asyncio", "tqdm_notebook"), ProgressBar)
        vars(module).update(bars, trange=_counting, tnrange=_counting)
    vars(modules["tqdm"]).update({n.rpartition(".")[2]: m for n, m in modules.items() if "." in n})
    return modules


_TQDM = ("tqdm", "tqdm.std", "tqdm.auto", "tqdm.asyncio", "tqdm.notebook")
