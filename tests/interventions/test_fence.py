"""What libraries would do unguarded for code behind the fence, and what a payload may fill."""

from __future__ import annotations

import collections
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from nnsight.schema import request
from nnsight.tracing.util import Scope
from transformers import BatchEncoding, GenerationConfig
from transformers.modeling_outputs import BaseModelOutput

from mesh.errors import BadRequest, PolicyViolation
from mesh.interventions.jail.policy import FencedUnpickler, raise_fence
from tests.interventions.jail import toy_model

Fenced = Callable[[str], tuple[str, Any]]
ADDRESS = "{'__array_interface__': {'data': (id(7), True), 'shape': (3,), 'typestr': '<u8'}}"


def _fenced(source: str) -> tuple[str, Any]:
    """Where the fence is up: (what was raised, what the body calls `seen`)"""
    own = {
        "torch": torch, "model": toy_model.model(),
        "np": numpy, "Batch": BatchEncoding, "Settings": GenerationConfig, "Out": BaseModelOutput,
    }  # fmt: skip
    try:
        names = Scope(own, {}, {})
        exec(request.compile(source, "<body>", "exec"), names)  # noqa: S102
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test asks for
        return type(error).__name__, str(error)
    return "", (names.get("seen"), pickle.dumps(names.get("space")))


@pytest.fixture(scope="module")
def fenced() -> Iterator[Fenced]:
    """Runs bodies in another process, as the fence is never lowered."""
    with ProcessPoolExecutor(1, get_context("spawn"), raise_fence) as process:
        yield lambda source: process.submit(_fenced, source).result(60)


@pytest.mark.parametrize(
    "body",
    ["import string\nstring.Formatter()", "from string import Formatter",
     "import sympy\nsympy.sin('print(1)')", "import sympy\nsympy.Poly('print(1)')",
     "import sympy\nx = sympy.Symbol('x')\nsympy.nsolve([x + sympy.Symbol('print(1)')], [x], [1])",
     # annotations
     "import functools\n@functools.singledispatch\ndef f(x): pass\n"
     "def g(x: '().__class__'): pass\nf.register(g)",
     "import functools\n@functools.singledispatch\ndef f(x): pass\n"
     "def g(x: 'type'): pass\nf.register(g)",
     "import typing\ndef f(x: 'eval'): pass\ntyping.get_type_hints(f)",
     "from torch.utils.data import argument_validation",
     "from torch.utils.data import IterDataPipe",
     # fields of data classes
     "import dataclasses\nclass L(str):\n    def isidentifier(self): return True\n"
     "dataclasses.make_dataclass('X', [(L('a=print(1), b'), int)])"],
)  # fmt: skip
def test_text_is_not_a_way_around_the_fence(body: str, fenced: Fenced) -> None:
    assert fenced(body)[0] == "PolicyViolation"


@pytest.mark.parametrize(
    "copy",
    ["functools.update_wrapper(Own(), (x for x in ()), assigned=('gi_frame',), updated=())",
     "functools.update_wrapper(Own(), torch.relu, assigned=('__globals__',), updated=())",
     "functools.update_wrapper(Own(), torch.nn.functional.relu, updated=('__globals__',))",
     "functools.wraps(model.layers[0])(Own())._module", "functools.wraps(torch)(Own()).load",
     "functools.wraps(torch.Tensor)(Own()).data_ptr", "contextlib.contextmanager(torch).load",
     "torch.no_grad()(torch).load", "torch.func.vmap(torch).load",
     "functools.update_wrapper(collections, Own(seen=1)).seen"],
)  # fmt: skip
def test_what_wraps_copies_is_what_wrappers_need(copy: str, fenced: Fenced) -> None:
    own = (
        "import collections, contextlib, functools\n"
        "class Own:\n    def __init__(self, **names):\n        self.seen = names\n"
    )
    assert fenced(own + copy)[0] in ("PolicyViolation", "AttributeError")


@pytest.mark.parametrize(
    "made",
    [f"np.asarray(Batch({ADDRESS}))", f"np.asarray(Settings(**{ADDRESS}))",
     f"out = Out()\nout['__array_interface__'] = {ADDRESS}['__array_interface__']",
     f"np.asarray(torch.nn.ParameterDict({ADDRESS}))",
     f"import types\ntypes.SimpleNamespace(**{ADDRESS})",
     f"from types import SimpleNamespace\nSimpleNamespace(**{ADDRESS})",
     f"import types\ntype(types.SimpleNamespace())(**{ADDRESS})",
     f"type(int)('X', (), {ADDRESS})", f"class A: pass\ntype(A)('X', (), {ADDRESS})",
     f"import dataclasses\ndataclasses.make_dataclass('X', [], namespace={ADDRESS})",
     f"import enum\nenum.Enum('X', {ADDRESS})", "import enum\nenum.EnumType",
     "import enum\n@enum.global_enum\nclass A(enum.Enum):\n    hearthnet_test = 1"],
)  # fmt: skip
def test_no_object_says_where_in_memory_it_is(made: str, fenced: Fenced) -> None:
    assert fenced(made)[0] == "PolicyViolation"


@pytest.mark.parametrize(
    "made",
    ["dataclasses.make_dataclass('X', [], namespace={'__getattr__': told})()",
     "enum.Enum('X', {'a': 1, '__getattr__': told}).a",
     "copy.copy(dataclasses.make_dataclass('X', [], namespace={'__getstate__': state})())",
     "copy.deepcopy(dataclasses.make_dataclass('X', [], namespace={'__getstate__': state})())",
     "copy.copy(dataclasses.make_dataclass('X', [], namespace={'__getstate__': slots,"
     " '__slots__': tuple(evil)})())",
     "pruned(Own())"],
)  # fmt: skip
def test_whatever_gets_into_an_object_says_of_no_memory(made: str, fenced: Fenced) -> None:
    raised, found = fenced(
        "import copy, dataclasses, enum\nfrom torch.nn.utils import prune\n"
        f"evil = {ADDRESS}\n"
        "def state(self): return evil\ndef told(self, name): return evil[name]\n"
        "def slots(self): return None, evil\n"
        "class Own:\n"
        "    def __init__(self): self._forward_pre_hooks, self._parameters = {}, {'__dict__': 1}\n"
        "    def register_parameter(self, name, inside): inside.update(evil)\n"
        "def pruned(own):\n"
        "    try: prune.identity(own, '__dict__')\n"
        "    except (AttributeError, TypeError): pass\n"
        "    return own\n"
        f"seen = str(np.asarray({made}).dtype)"
    )
    assert raised in ("PolicyViolation", "AttributeError") or found[0] == "object", (raised, found)


@pytest.mark.parametrize(
    "body",
    ["import numpy\nnumpy.fromregex('/etc/hostname', '.', [('a', 'S1')])",
     "a = np.zeros(9)\nb = a[:]\na.resize(99999, refcheck=False)",
     "np.ndarray.resize", "import dataclasses\ndataclasses.dataclass(torch.nn.Linear)",
     "from torch.utils.data import DataLoader\nDataLoader([1, 2], num_workers=1,"
     " multiprocessing_context='fork').multiprocessing_context.log_to_stderr()"],
)  # fmt: skip
def test_files_processes_and_others_things_stay_behind_the_fence(body: str, fenced: Fenced) -> None:
    assert fenced(body)[0] == "PolicyViolation"


def test_what_people_do_with_these_libraries_they_may(fenced: Fenced) -> None:
    _, (seen, space) = fenced(
        "import dataclasses, enum, functools, types\n"
        "def loud(f):\n    @functools.wraps(f)\n    def g(*a): return f(*a) + 1\n    return g\n"
        "@loud\ndef double(x):\n    'doubles'\n    return 2 * x\n"
        "doc = double.__doc__\n"
        "@functools.total_ordering\nclass V:\n    def __init__(self, v): self.v = v\n"
        "    def __eq__(self, o): return self.v == o.v\n"
        "    def __lt__(self, o): return self.v < o.v\n"
        "@functools.singledispatch\ndef kind(x): return 'other'\n"
        "@kind.register(int)\ndef whole(x): return 'int'\n"
        "@dataclasses.dataclass(order=True)\nclass P:\n    x: int\n    y: int = 2\n"
        "Q = dataclasses.make_dataclass('Q', ['a', ('b', int, 3)])\n"
        "E = enum.Enum('E', 'red green')\n"
        "space = types.SimpleNamespace(a=1)\nspace.b = 2\n"
        "same = type(int) is type and type(space) is types.SimpleNamespace\n"
        "seen = [double(2), V(2) >= V(1), kind(1), kind(''), P(1) < P(2), Q(1).b,\n"
        "        E.green.name, repr(space), same, doc]\n",
    )
    shown = "namespace(a=1, b=2)"
    assert seen == [5, True, "int", "other", True, 3, "green", shown, True, "doubles"]
    back = pickle.loads(space)  # noqa: S301 - ours
    assert (type(back), vars(back)) == (SimpleNamespace, {"a": 1, "b": 2})


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def load(body: bytes) -> Any:
    return FencedUnpickler(io.BytesIO(b"\x80\x04" + body + b"."), {"part": Scope}).load()


ATTRIBUTE = b"N}" + text("evil") + b"K\x01s\x86"
"""A state by which unpickling sets an attribute."""


@pytest.mark.parametrize(
    "whose",
    [named("nnsight.tracing.util", "Scope"), named("torch.nn.functional", "relu"),
     named("cloudpickle.cloudpickle", "subimport") + text("collections") + b"\x85R",
     named("torch", "nn"), text("part") + b"Q"],
)  # fmt: skip
def test_a_payload_fills_what_it_has_made_and_nothing_else(whose: bytes) -> None:
    """Else it could take the fence down: what sets the builtins of code is a method of `Scope`."""
    for state in (ATTRIBUTE, b"}" + text("evil") + b"K\x01s"):
        with pytest.raises(PolicyViolation, match="changing a"):
            load(whose + state + b"b")
    owners: list[Any] = [Scope, torch.nn.functional.relu, collections, torch.nn]
    assert not [owner for owner in owners if hasattr(owner, "evil")]


@pytest.mark.parametrize("name", ["__array_interface__", "__class__", "__reduce_ex__"])
def test_nothing_in_a_payload_says_of_itself_what_is_not_so(name: str) -> None:
    unpickle = FencedUnpickler(io.BytesIO(b""), {}).find_class
    make = unpickle("cloudpickle.cloudpickle", "_make_skeleton_class")
    fill = unpickle("cloudpickle.cloudpickle", "_class_setstate")
    one = named("collections", "Counter") + b")\x81"
    space = named("types", "SimpleNamespace") + b")R"
    hostile = b"}" + text(name) + b"K\x01s"
    for way in (
        lambda: make(type, "Mine", (), {name: 1}, None, None),
        lambda: fill(make(type, "Mine", (), {}, None, None), ({name: 1}, {})),
        lambda: load(one + hostile + b"b"),
        lambda: load(space + hostile + b"b"),
    ):
        with pytest.raises(PolicyViolation, match=name):
            way()


def test_what_a_library_has_that_is_not_there_is_refused_with_how_it_comes_along() -> None:
    kind = FencedUnpickler(io.BytesIO(b""), {}).find_class("autoencoders.sparse", "TopK")
    with pytest.raises(BadRequest, match=r"by nnsight.register\(autoencoders\) before the trace"):
        kind(64)


def test_what_is_named_below_a_module_that_was_never_looked_for_is_refused() -> None:
    sys.modules["made_by_hand"] = ModuleType("made_by_hand")  # as `__main__` of a script
    try:
        kind = FencedUnpickler(io.BytesIO(b""), {}).find_class("made_by_hand.within", "Kind")
    finally:
        del sys.modules["made_by_hand"]
    with pytest.raises(PolicyViolation, match=r"made_by_hand.within.Kind` in a payload"):
        kind(64)


def test_a_class_of_a_kind_that_is_not_there_may_be_named() -> None:
    unpickle = FencedUnpickler(io.BytesIO(b""), {}).find_class
    make = unpickle("cloudpickle.cloudpickle", "_make_skeleton_class")
    fill = unpickle("cloudpickle.cloudpickle", "_class_setstate")
    kind, base = (unpickle("pydantic.main", name) for name in ("ModelMetaclass", "BaseModel"))
    own = fill(make(kind, "Settings", (base,), {}, None, None), ({"width": 3}, {}))
    with pytest.raises(PolicyViolation, match="ModelMetaclass"):
        own(width=4)
