"""The inner fence for keys that are not trusted: their code compiles among guards, or not at all.

It gives the readable error; the process is the wall. Raised once inside a job's process, before
anything of the payload is looked at, and never lowered. Knows how nnsight compiles code, at all of
the places where it does; not what the job computes.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import pickle
import re
import secrets
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import PurePosixPath, PureWindowsPath
from types import CodeType, FrameType, ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from cloudpickle.cloudpickle import (  # type: ignore[import-untyped]
    _class_setstate,
    _make_skeleton_class,
)
from nnsight.intervention import interleaver, serialization, source
from nnsight.modeling.transformers import TransformersModel
from nnsight.schema import request
from nnsight.tracing.tracer import Tracer
from nnsight.tracing.util import Scope
from transformers import BatchEncoding, GenerationConfig, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.utils import ModelOutput

from mesh.errors import PolicyViolation
from mesh.interventions.jail import allowed
from mesh.interventions.jail.desugar import compile_guarded
from mesh.interventions.jail.generated import (
    dataclass_state,
    set_dataclass_state,
    with_generated,
)
from mesh.interventions.jail.guards import (
    guarded_import_from,
    module_allowed,
    refuse,
    refuse_metaclass,
)
from mesh.interventions.jail.libraries import guarded_libraries
from mesh.interventions.jail.names import guarded_builtins
from mesh.interventions.jail.ownership import (
    CLASS_OF,
    Namespace,
    UserFunctionClass,
    UserModule,
    require_harmless,
)
from mesh.interventions.jail.shipped import (
    bind_super,
    complete_functions,
    is_nnsight_s,
    not_here,
    refusing_incomplete,
)
from mesh.interventions.jail.standins import (
    CompiledFunction,
    DataclassParams,
    Logger,
    Missing,
    NamedOnly,
    Nothing,
    RefusedFunction,
    progress_modules,
    unavailable,
)
from mesh.interventions.jail.storages import REPLACED

_BUILTINS = guarded_builtins()
_LOAD = serialization._load_function
_suffix = ""
# These come by their source: ours is taken instead.
_SHIPPED_BY_NNSIGHT: dict[str, Any] = {
    name: getattr(TransformersModel, name).__wrapped__ for name in ("generate", "pipe")
}

# What a payload only names, and others use as well.
_NOT_FILLED = (
    type, ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
)  # fmt: skip
_DATA = (BatchEncoding, ModelOutput, Cache, CacheLayerMixin, GenerationConfig, PreTrainedConfig)


def raise_fence() -> None:
    """From here on, whatever nnsight compiles in this process is guarded.

    Call in the job's process, for a key that is not trusted. Then unpickle the payload with
    `FencedUnpickler` (``RequestModel.deserialize(..., unpickler=FencedUnpickler)``) and run it as
    usual: blocks, nested blocks, edits and shipped functions are all covered.
    """
    global _suffix  # noqa: PLW0603 - of this process, whose only job is this one
    _suffix = secrets.token_hex(8)
    _BUILTINS.clear()
    _BUILTINS.update(guarded_builtins(_suffix))
    for module in (request, interleaver):
        # Found before the builtin of the same name.
        vars(module)["compile"] = _compile
    for owner, names in guarded_libraries():
        for name, guard in names.items():
            setattr(owner, name, guard)
    sys.modules.update(progress_modules())
    complete_functions(_fenced_loader(_LOAD), _compile_function)
    vars(source)["compile_source"] = _not_of_the_author_s(source.compile_source)
    Tracer.compile = _compile_block
    Scope.__init__ = _guarding(Scope.__init__)


def _compile(text: str | ast.Module, filename: str, mode: str) -> CodeType:
    return compile_guarded(text, filename, _suffix)


def _compile_function(text: str, filename: str, mode: str) -> CodeType:
    return compile_guarded(text, filename, _suffix, bind_super)


def _compile_block(tracer: Tracer, module: ast.Module, frame: FrameType) -> CodeType:
    code = compile_guarded(module, frame.f_code.co_filename, _suffix)
    return code.replace(co_name=frame.f_code.co_name)


def _not_of_the_author_s(compile_source: Callable[..., Any]) -> Callable[..., Any]:
    """For `.source`, which compiles a function anew, without the guards it was compiled with."""

    def checked(function: types.FunctionType) -> Any:
        if function.__globals__.get("__builtins__") is _BUILTINS:
            raise refuse("`.source` of code of one's own")
        return compile_source(function)

    return checked


def _guarding(initialise: Callable[..., None]) -> Callable[..., None]:
    def guarded(scope: Scope, *args: Any, **kwargs: Any) -> None:
        initialise(scope, *args, **kwargs)
        # Where the interpreter looks for the builtins of what is executed in this scope.
        dict.__setitem__(scope, "__builtins__", _BUILTINS)

    return guarded


def _fenced_loader(
    load: Callable[..., types.FunctionType],
) -> Callable[..., types.FunctionType | RefusedFunction]:
    def fenced(*args: Any) -> types.FunctionType | RefusedFunction:
        name = str(args[1])
        if is_nnsight_s(name, str(args[5])):
            own: types.FunctionType = _SHIPPED_BY_NNSIGHT[name]
            return own
        try:
            loaded = load(*args)
        except PolicyViolation as violation:
            return RefusedFunction(violation)
        function = types.FunctionType(
            loaded.__code__, {"__builtins__": _BUILTINS}, loaded.__name__, loaded.__defaults__
        )
        function.__kwdefaults__ = loaded.__kwdefaults__
        function.__annotations__ = loaded.__annotations__
        return function

    return fenced


def _fenced_fill(function: Any, names: dict[str, Any]) -> None:
    if type(function) is RefusedFunction or function in _SHIPPED_BY_NNSIGHT.values():
        return
    if getattr(function, "__globals__", {}).get("__builtins__") is not _BUILTINS:
        raise refuse("changing what a function sees")
    function.__globals__.update(names)
    function.__globals__["__builtins__"] = _BUILTINS


def _fenced_subimport(name: str) -> ModuleType:
    """The module, or one of that name with nothing in it: that it was imported harms nobody."""
    return importlib.import_module(name) if module_allowed(name) else ModuleType(name)


def _fenced_module(name: str, names: dict[str, Any]) -> ModuleType:
    """A module of the author's own, without what the import system keeps in it."""
    made = UserModule(name)
    vars(made).update({key: value for key, value in names.items() if not key.startswith("__")})
    return made


class _TorchFunctions:
    """In the place of the class that torch keeps its functions in."""


def _fenced_getattr(owner: Any, name: str) -> Any:
    if name == "__new__" and isinstance(owner, type):
        return Nothing  # of an enumeration, which makes its members before that is looked at
    if owner is not _TorchFunctions:
        raise refuse(f"`.{name}` of something in a payload")
    return guarded_import_from("torch", name)


_OF_FUNCTIONS = NamedOnly.of(
    "torch.autograd.function.FunctionMeta", refuse("`torch.autograd.function.FunctionMeta`")
)
_CLASS_OF = {**CLASS_OF, _OF_FUNCTIONS: UserFunctionClass}


def _fenced_class(constructor: type, name: str, bases: tuple[type, ...], *more: Any) -> type:
    refuse_metaclass(bases)
    # What guarded code may assign to is told by the class of its class.
    wanted = _CLASS_OF.get(constructor, constructor)
    if type(wanted) is NamedOnly:
        return NamedOnly.of(name, wanted.violation)
    # `NamedTuple` would make a class without fields, by a class of its own.
    plain = tuple(tuple if base is NamedTuple else base for base in bases)
    inside, *others = more
    inside = dict(inside)
    _require_harmless_class(inside)
    made: type = _make_skeleton_class(wanted, name, plain, inside, *others)
    return made


def _require_harmless_class(inside: dict[str, Any]) -> None:
    """Raise PolicyViolation for one by which objects would say of themselves what is not so."""
    inert = (RefusedFunction, CompiledFunction)
    require_harmless(name for name, value in inside.items() if type(value) not in inert)


def _fenced_class_state(made: type, state: tuple[dict[str, Any], dict[str, Any]]) -> type:
    """A class of the author's own with what is in it."""
    names, slots = state
    inside = with_generated(made, names)
    _require_harmless_class(inside)
    filled: type = _class_setstate(made, (inside, dict(slots or {})))
    return filled


_BY_VALUE = "cloudpickle.cloudpickle.dynamic_subimport"
_REPLACED: dict[str, Any] = {
    "nnsight.intervention.serialization._fill": refusing_incomplete(_fenced_fill),
    "cloudpickle.cloudpickle.subimport": _fenced_subimport,
    "cloudpickle.subimport": _fenced_subimport,
    _BY_VALUE: _fenced_module,
    "_frozen_importlib.ModuleSpec": Nothing,
    "_frozen_importlib_external.SourceFileLoader": Nothing,
    "cloudpickle.cloudpickle._make_skeleton_class": _fenced_class,
    **{".".join(name): function for name, function in REPLACED.items()},
    "builtins.getattr": _fenced_getattr,
    "torch.autograd.function.FunctionMeta": _OF_FUNCTIONS,
    "torch._C._VariableFunctionsClass": _TorchFunctions,
    "__future__._Feature": Nothing,
    "types.CodeType": Nothing,
    "builtins.CodeType": Nothing,
    "cloudpickle.cloudpickle._make_function": CompiledFunction,
    "cloudpickle.cloudpickle._function_setstate": Nothing,
    "dataclasses._MISSING_TYPE": Missing,
    "dataclasses._HAS_DEFAULT_FACTORY_CLASS": Nothing,
    "cloudpickle.cloudpickle._class_setstate": _fenced_class_state,
    "_collections._tuplegetter": Nothing,
    "collections._tuplegetter": Nothing,
    "_thread.get_ident": Nothing,
    "enum.Enum.__new__": Nothing,
    "typing.ForwardRef": Nothing,
    "dataclasses._DataclassParams": DataclassParams,
    "logging.getLogger": Logger,
    "re._compile": re.compile,
    "types.SimpleNamespace": Namespace,
    "argparse.Namespace": Namespace,
    # A path as text: those that a configuration has beside what the trace reads of it.
    "pathlib.PosixPath": PurePosixPath,
    "pathlib._local.PosixPath": PurePosixPath,
    "pathlib.WindowsPath": PureWindowsPath,
    "pathlib._local.WindowsPath": PureWindowsPath,
    "dataclasses._dataclass_getstate": dataclass_state,
    "dataclasses._dataclass_setstate": set_dataclass_state,
    "dataclasses._replace": dataclasses.replace,  # what each data class has since Python 3.13
}


class FencedUnpickler(pickle._Unpickler):
    """nnsight's unpickler, for payloads made of nothing but what a trace needs.

    Python's own and not the one in C: that one fills whatever it is told to.
    """

    _brings_a_module = False
    persistent_load = serialization.CustomCloudUnpickler.persistent_load
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: Any, persistent_objects: dict[str, Any] | None) -> None:
        super().__init__(file)
        self.persistent_objects = persistent_objects or {}

    def load_build(self) -> None:
        """Fill an object, of those that this payload has made."""
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        instance, state = stack[-2:]
        others = isinstance(instance, _NOT_FILLED) or any(
            instance is each for each in self.persistent_objects.values()
        )
        if others:
            raise refuse(f"changing a {type(instance).__name__} in a payload")
        for part in state if type(state) is tuple else (state,):
            if isinstance(part, dict):
                if type(part) not in (dict, OrderedDict):
                    raise refuse("a state of this kind in a payload")
                require_harmless(key for key in part if isinstance(key, str))
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build

    def load(self) -> Any:
        """What the payload says. Raises PolicyViolation where that uses what is not on the list, or
        is that."""
        loaded = super().load()
        if type(loaded) is NamedOnly:
            raise loaded.violation
        return loaded

    def find_class(self, module: str, name: str) -> Any:
        """A global by name; for those not on the list, stand-ins that refuse when they are used,
        and from the first module by value on not before the trace uses them."""
        full = f"{module}.{name}"
        if full == _BY_VALUE:
            self._brings_a_module = True
        if full in _REPLACED:
            return _REPLACED[full]
        if full in allowed.PICKLED or _is_plain(module, name):
            return super().find_class(module, name)
        if module.startswith(allowed.PICKLED_ROOTS):
            found = super().find_class(module, name)
            # A dotted name may lead through a module to anywhere; what it finds tells.
            if isinstance(found, type) and found.__module__.startswith("nnsight."):
                return found
        is_builtin = module == "builtins" and not name.startswith("_")
        found = _BUILTINS.get(name) if is_builtin else _importable(module, name)
        refused = found is None or type(found) is RefusedFunction
        if refused and self._brings_a_module:
            return unavailable(full)
        if refused:
            root = module.partition(".")[0]
            is_here = root in sys.modules or importlib.util.find_spec(root)
            reason = refuse(f"`{full}` in a payload") if is_here else not_here(full)
            return NamedOnly.of(full, reason)
        return found


def _importable(module: str, name: str) -> Any:
    """What guarded code could import as well, by where it is defined; None for all else."""
    if "." in name:
        return None
    own = vars(sys.modules[module]).get(name) if module in sys.modules else None
    root = module.partition(".")[0].lstrip("_")
    for place in (module, module.lstrip("_"), allowed.DEFINED_IN.get(module, ""), root):
        if not module_allowed(place):
            continue
        with contextlib.suppress(ImportError, PolicyViolation):
            found = guarded_import_from(place, name)
            if place == module or found is own:
                return found
    return None


def _is_plain(module: str, name: str) -> bool:
    """Data types (``torch.float32``), and classes: of torch's modules, of what `topk` and the like
    give, and of what goes into transformers' models and comes out."""
    if module == "torch":
        return isinstance(vars(torch).get(name), torch.dtype)
    # What a module has by that name itself: a dotted one may lead through it to anywhere.
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if not isinstance(found, type) or found.__module__ != module:
        return False
    is_of_torch = module.startswith("torch.nn.modules.") and issubclass(found, torch.nn.Module)
    return is_of_torch or module == "torch.return_types" or issubclass(found, _DATA)
