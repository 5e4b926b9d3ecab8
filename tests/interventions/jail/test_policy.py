"""The inner fence: ordinary bodies pass with the same numbers; the rest gets a sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import nnsight
import pytest
import torch
from nnsight.intervention import serialization
from nnsight.modeling.transformers import TransformersModel
from nnsight.schema.request import RequestModel
from nnsight.tracing.backend import Backend
from nnsight.tracing.tracer import Tracer

from mesh.errors import PolicyViolation
from mesh.interventions.jail import policy
from mesh.interventions.jail.allowed import GUARDS
from mesh.interventions.jail.desugar import compile_guarded
from mesh.interventions.jail.job import Jail
from mesh.interventions.jail.limits import Ending, JobOutcome
from mesh.interventions.jail.names import guarded_builtins
from mesh.interventions.jail.policy import FencedUnpickler
from tests.checkpoints import make_tokenizer
from tests.interventions.jail import own_module, toy_model, trace_bodies

RUN = "tests.interventions.jail.fenced:run"
WARM = "tests.interventions.jail.fenced:warm"


class Shipping(Backend):
    """Takes the payload that a client would post."""

    payload = b""

    def __call__(self, tracer: Tracer) -> None:
        self.payload = RequestModel.serialize(tracer)


@pytest.fixture(autouse=True, scope="module")
def _bodies_travel_by_value() -> Iterator[None]:
    """As code of a notebook or a script does."""
    for module in (trace_bodies, own_module):
        nnsight.register(module)
    yield
    from cloudpickle import unregister_pickle_by_value

    for module in (trace_bodies, own_module):
        unregister_pickle_by_value(module)


def payload_of(name: str) -> bytes:
    shipping = Shipping()
    with contextlib.suppress(UnboundLocalError):  # of what it would have saved
        trace_bodies.BENIGN[name](toy_model.model(), trace_bodies.example(), shipping)
    return shipping.payload


def here(name: str) -> dict[str, Any]:
    # oneDNN's kernels, which the jail cannot use, differ from torch's own in the last bit.
    with torch.backends.mkldnn.flags(enabled=False):
        return trace_bodies.BENIGN[name](toy_model.model(), trace_bodies.example(), None)


async def behind_the_fence(jail: Jail, payload: bytes, *, fence: bool = True) -> JobOutcome:
    first = b"u" if fence else b"t"
    async with await jail.start_job(RUN, first + payload, trusted=False) as job:
        return await job.outcome()


def test_there_are_enough_ordinary_bodies() -> None:
    assert len(trace_bodies.BENIGN) >= 30


async def test_ordinary_bodies_pass_and_give_the_same_values() -> None:
    jail = await Jail.start(WARM, namespaces=False)
    try:
        for name in trace_bodies.BENIGN:
            outcome = await behind_the_fence(jail, payload_of(name))
            assert outcome.ending is Ending.FINISHED, f"{name}: {outcome.text}"
            saved = torch.load(io.BytesIO(outcome.result), weights_only=False)
            assert saved, name
            local = here(name)
            for key, value in saved.items():
                if key != "cache":
                    assert_same(local[key], value, f"{name}.{key}")
        await _refusals(jail)
    finally:
        await jail.stop()


class Exploit:
    """Calls something as the payload is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (__import__("os").getpid, ())


async def _refusals(jail: Jail) -> None:
    """Payloads that are refused, with the reason and the user's line."""
    outcome = await behind_the_fence(jail, pickle.dumps(Exploit()))
    assert outcome.ending is Ending.FAILED
    assert "`posix.getpid` in a payload is not available" in outcome.text
    model, shipping, x = toy_model.model(), Shipping(), trace_bodies.example()
    with model.trace(x, backend=shipping):
        hidden = model.layers[0].output
        torch.save(hidden, "/nowhere")
    outcome = await behind_the_fence(jail, shipping.payload)
    assert "`torch.save` is not available" in outcome.text
    assert 'torch.save(hidden, "/nowhere")' in outcome.text.replace("'", '"')
    with model.session(backend=shipping), model.trace(x):
        hidden = model.layers[0].output.__dict__
    outcome = await behind_the_fence(jail, shipping.payload)
    assert '"__dict__" is an invalid attribute name' in outcome.text
    with model.trace(x, backend=shipping):
        model.layers[1].own = own_module.Probe()
        opened = model.layers[1].own.source.self__line_0.output  # noqa: F841
    outcome = await behind_the_fence(jail, shipping.payload)
    assert "`.source` of code of one's own is not available" in outcome.text, outcome.text
    for number, refused in enumerate(
        (
            "`logging.Handler`",
            "module `os`",
            "came as compiled code",
            "IPv4Address` is not available",
        )
    ):
        with model.trace(x, backend=shipping):
            used = [  # noqa: F841 - a trace of one line
                lambda: own_module.Shouting().level, own_module.never_in_a_job,
                own_module.told_by_text, lambda: own_module.LOCALHOST.packed,
            ][number]()  # fmt: skip
        outcome = await behind_the_fence(jail, shipping.payload)
        assert outcome.ending is Ending.FAILED
        assert f"{refused}" in outcome.text, outcome.text


def test_what_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert guarded("from einops import rearrange\nimport einops")["rearrange"]
    monkeypatch.setitem(sys.modules, "einops", None)
    for line in ("import einops", "from einops import rearrange"):
        with pytest.raises(PolicyViolation, match="not installed on this node") as refused:
            guarded(line)
        assert "hearthnet[einops]" in refused.value.fix


async def test_without_the_fence_what_it_refuses_is_done() -> None:
    model, shipping = toy_model.model(), Shipping()
    with model.session(backend=shipping):
        import string

        import sympy

        seen = string.Formatter().format("{0.__class__}", model)
        evaluated = str(sympy.sin("__import__('sympy').Integer(4)"))
        hidden = torch.ones(1).__dict__
        nnsight.save([seen, evaluated, hidden])
    jail = await Jail.start(WARM, namespaces=False)
    try:
        fenced = await behind_the_fence(jail, shipping.payload)
        assert fenced.ending is Ending.FAILED
        assert "is an invalid attribute name" in fenced.text
        open_ = await behind_the_fence(jail, shipping.payload, fence=False)
        assert open_.ending is Ending.FINISHED, open_.text
        exploit = await behind_the_fence(jail, pickle.dumps(Exploit()), fence=False)
        assert "not available" not in exploit.text
    finally:
        await jail.stop()


def _text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def _global(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


def assert_same(ours: Any, theirs: Any, where: str) -> None:
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other, where)
    else:
        assert ours == theirs, where


def guarded(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__builtins__": guarded_builtins(), "torch": torch}
    names["model"] = toy_model.model()
    names["held"] = [sys]  # as a container of somebody's may have a module in it
    exec(compile_guarded(source, "<body>"), names)  # noqa: S102
    return names


@pytest.mark.parametrize(
    "body",
    [
        "import os", "import sys", "import subprocess", "from os import path", "import ctypes",
        "from torch import save", "from torch import os", "import torch.utils.cpp_extension",
        "from operator import attrgetter", "import importlib", "import numpy.ctypeslib",
        "torch.os.getpid()", "torch.sys.modules", "torch.load('x')", "torch.save([], 'x')",
        "torch.from_file('x')", "torch.hub.load('x')", "torch.UntypedStorage.from_file('x')",
        "torch.ones(2).untyped_storage()", "torch.ones(2).data_ptr()",
        "torch.ones(2).numpy().tofile('x')",
        "torch.as_strided(torch.ones(1), (99,), (1,))", "torch.distributed",
        "torch.multiprocessing",
        "torch.jit.script", "torch.ops.aten", "torch.set_default_dtype(torch.float64)",
        "import numpy\nnumpy.load('x')", "import numpy as np\nnp.memmap('x')",
        "import numpy as np\nnp.lib", "import math\nmath.__loader__", "import random\nrandom._os",
        "import random\ngetattr(random, '_os')", "import json\njson.load(1)",
        "import enum\nenum.sys", "import dataclasses\ndataclasses.sys", "import re\nre._compiler",
        "__import__('os')", "breakpoint()",
        "().__class__", "(lambda: 0).__globals__", "getattr((), '__class__')",
        "getattr(lambda: 0, '__code__')", "'{0.__class__}'.format(1)",
        "'{a.__class__}'.format_map({'a': 1})", "str.format('{0.__class__}', 1)",
        "(x for x in ()).gi_frame", "type('X', (), {})", "setattr(torch, 'x', 1)", "torch.x = 1",
        "del torch.ones", "model.x = 1", "model._module", "model.layers[0]._module",
        "model.interleaver", "model.layers.train()", "model.layers[0].register_buffer('x', None)",
        "model.layers[0].load_state_dict({})", "model.layers[0].requires_grad_(True)",
        "model.layers[0].to('cpu')", "model.layers[0].source.node", "held[0].path",
        "try:\n    ().x\nexcept AttributeError as e:\n    e.obj",
        "try:\n    1/0\nexcept Exception as e:\n    e.__traceback__",
        "try:\n    1/0\nexcept* ZeroDivisionError:\n    pass",
        "class A(metaclass=type):\n    pass", "class A:\n    def __reduce__(self): return 1",
        "def __getattr__(x): return 1", "_getattr_ = getattr", "async def f(): pass",
        "from math import *", "model.trace(1).info", "1\nx = print\nx.__self__",
        "y = [0]\ny.__class__ += 1", "from abc import ABCMeta", "import abc\nabc.ABCMeta",
        "from torch.utils.data import datapipes", "import tqdm\ntqdm.cli", "torch.utils.checkpoint",
        "torch.utils.swap_tensors", "torch.utils.data.datapipes",
        "model.interleaver = torch.nn.Identity()", "model._own = torch.nn.Identity()",
        "torch.cuda.CUDAPluggableAllocator", "from torch.cuda import graphs",
        "import gc\ngc.get_objects()", "from types import FunctionType",
        "import contextlib\ncontextlib.chdir('/')", "import warnings\nwarnings.sys",
        "import contextlib\ncontextlib.sys", "import types\ntypes.CodeType",
        "model.trace = torch.nn.Identity()", "model.layers[0].own = lambda x: x",
        "torch.PyTorchFileReader", "torch.CompilationUnit", "torch.parse_ir", "torch.fork",
        "torch.FloatStorage", "torch.UntypedStorage",
        "from sympy import lazy_function", "from einops.tests.run_tests import Popen",
        "import nnsight\nnnsight.mount(len, 'evil')",
        "from nnsight.intervention.envoy import install_source",
    ],
)  # fmt: skip
def test_what_is_not_for_everybody_is_refused_with_a_sentence(body: str) -> None:
    with pytest.raises(PolicyViolation) as refusal:
        guarded(body)
    assert refusal.value.fix
    assert len(str(refusal.value)) > 30


@pytest.mark.parametrize(
    "body",
    ["open('x')", "eval('1')", "exec('1')", "globals()", "vars()", "dir()", "input()",
     "compile('1', '', 'eval')", "memoryview(b'')", "exit()"],
)  # fmt: skip
def test_builtins_that_are_not_for_everybody_refuse_to_be_called(body: str) -> None:
    name = body.partition("(")[0]
    with pytest.raises(PolicyViolation, match=f"`{name}` is not available"):
        guarded(body)


@pytest.mark.parametrize("owner", ["()", "torch"])
def test_a_name_is_text_and_nothing_that_says_of_itself_how_it_starts(owner: str) -> None:
    lying = "class Name(str):\n    def startswith(self, *_): return False\n"
    with pytest.raises(TypeError, match="must be string"):
        guarded(f"{lying}getattr({owner}, Name('__class__'))")


def test_how_a_tokenizer_pads_is_for_everybody_to_set() -> None:
    tokenizer = make_tokenizer(384, sentencepiece=False)
    names = {"__builtins__": guarded_builtins(), "tokenizer": tokenizer}
    source = "tokenizer.padding_side = 'right'\ntokenizer.pad_token = tokenizer.eos_token"
    exec(compile_guarded(source, "<body>"), names)  # noqa: S102
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("right", tokenizer.eos_token)
    with pytest.raises(PolicyViolation, match=r"assigning to `\.name_or_path`"):
        exec(compile_guarded("tokenizer.name_or_path = '/'", "<body>"), names)  # noqa: S102


def test_a_refusal_names_the_line() -> None:
    with pytest.raises(PolicyViolation) as refusal:
        compile_guarded("x = 1\n\ny = x.__class__\n", "<body>")
    assert refusal.value.param == "3"
    assert str(refusal.value).startswith('line 3 of the traced code: "__class__" is')


def test_augmented_assignment_evaluates_in_python_s_order_and_once() -> None:
    source = (
        "seen = []\n"
        "def note(name, value):\n    seen.append(name)\n    return value\n"
        "class Box:\n    pass\n"
        "box = Box()\nbox.value = [1, 2, 3]\n"
        "note('owner', box).value[note('key', slice(0, 2))] += note('more', [9])\n"
        "note('again', box).value += note('last', [4])\n"
        "result = box.value\n"
    )
    names = guarded(source)
    assert names["seen"] == ["owner", "key", "more", "again", "last"]
    assert names["result"] == [1, 2, 9, 3, 4]
    assert not [name for name in names if name.startswith("_tmp")]


@pytest.mark.parametrize(
    "name",
    ["os.system", "torch.os.system", "nnsight.intervention.envoy.torch.os.system",
     "torch.hub.load", "builtins.eval", "builtins._getattr_", "numpy.testing.run_string",
     "_operator.attrgetter", "operator.attrgetter", "nnsight.ndif.httpx.get", "torch.save",
     "torch._C._nn._parse_to", "torch.nn._reduction.get_enum", "posix.getpid", "_io.open",
     "random._os", "json.load", "einops.einops._rearrange", "nnsight.tracing.tracer._saves",
     "numpy._globals._NoValue", "torch.nn.modules.module.torch.os.system",
     "torch.nn.modules.module.inspect", "torch.return_types.inspect",
     "transformers.cache_utils.logger", "torch.storage.UntypedStorage", "torch.FloatStorage"],
)  # fmt: skip
def test_a_payload_cannot_name_what_is_not_on_the_list(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    for split in range(1, name.count(".") + 1):
        parts = name.split(".")
        module, attribute = ".".join(parts[:split]), ".".join(parts[split:])
        text = b"\x80\x04" + _text(module) + _text(attribute) + b"\x93."
        # Names below modules of nnsight that may be named are looked up, and there are none.
        absent = module.startswith("nnsight.intervention.envoy.torch")
        with pytest.raises(ModuleNotFoundError if absent else PolicyViolation):
            FencedUnpickler(io.BytesIO(text), {}).load()


def test_what_is_not_on_the_list_may_be_named_inside_a_payload_and_not_be_used() -> None:
    """As annotations name types."""

    def loaded(body: bytes) -> Any:
        return FencedUnpickler(io.BytesIO(b"\x80\x04" + body + b"."), {}).load()

    (stand_in,) = loaded(b"]" + _global("ipaddress", "IPv4Address") + b"a")
    ways: list[Callable[[], Any]] = [
        stand_in, functools.partial(stand_in, "x"), type("Own", (stand_in,), {}),
        lambda: stand_in.packed, lambda: stand_in.__new__(stand_in),
        lambda: loaded(_global("ipaddress", "IPv4Address") + b")R"),
        lambda: loaded(_global("ipaddress", "IPv4Address") + b")\x81"),
    ]  # fmt: skip
    for way in ways:
        with pytest.raises(PolicyViolation, match=r"ipaddress.IPv4Address` in a payload is not"):
            way()


@pytest.mark.parametrize("owner", [_global("collections", "OrderedDict"), b"]", b"}", b")"])
def test_a_payload_reads_attributes_of_torch_s_functions_only(owner: bytes) -> None:
    """As those are named by; it says nothing of any other attribute."""
    functions = _global("torch._C", "_VariableFunctionsClass")
    take = b"\x80\x04" + _global("builtins", "getattr")
    matmul = FencedUnpickler(io.BytesIO(take + functions + _text("matmul") + b"\x86R."), {})
    assert matmul.load() is torch.matmul
    for whose, name in ((owner, "__class__"), (owner, "clear"), (functions, "save")):
        payload = take + whose + _text(name) + b"\x86R."
        with pytest.raises(PolicyViolation):
            FencedUnpickler(io.BytesIO(payload), {}).load()


def test_compiled_code_that_comes_along_refuses_to_run_and_not_to_come() -> None:
    """A module by value brings all that is in it, also what no trace uses."""
    unpickle = FencedUnpickler(io.BytesIO(b""), {}).find_class
    made = unpickle("cloudpickle.cloudpickle", "_make_function")(
        unpickle("types", "CodeType")(0, b"\x97"), {}, "f", None, None
    )
    with pytest.raises(PolicyViolation, match="came as compiled code"):
        made(1, two=2)
    spec = unpickle("_frozen_importlib", "ModuleSpec")("x", None)
    spec.__setstate__({"loader": 1})
    assert not vars(spec)
    os_module = unpickle("cloudpickle.cloudpickle", "subimport")("os")
    assert not hasattr(os_module, "getpid")
    assert unpickle("cloudpickle.cloudpickle", "subimport")("math") is math
    make = unpickle("cloudpickle.cloudpickle", "_make_skeleton_class")
    with pytest.raises(PolicyViolation, match="a class of classes"):
        make(type, "Meta", (type,), {}, None, None)


def test_the_state_of_a_data_class_is_set_in_the_author_s_own_objects_only() -> None:
    unpickle = FencedUnpickler(io.BytesIO(b""), {}).find_class
    set_state = unpickle("dataclasses", "_dataclass_setstate")
    state_of = unpickle("dataclasses", "_dataclass_getstate")
    make = unpickle("cloudpickle.cloudpickle", "_make_skeleton_class")

    @dataclass
    class Theirs:
        secret: int = 1

    def named(name: str) -> dict[str, Any]:
        (field,) = dataclasses.fields(Theirs)
        field.name = name
        return {name: field}

    mine = make(type, "Mine", (), {}, None, None)
    mine.__dataclass_fields__ = named("a")
    own = mine()
    set_state(own, [5])
    assert state_of(own) == [5]
    theirs = Theirs()
    for use in (lambda: set_state(theirs, [2]), lambda: state_of(theirs)):
        with pytest.raises(PolicyViolation, match="Theirs"):
            use()
    mine.__dataclass_fields__ = named("__class__")
    with pytest.raises(PolicyViolation, match="__class__"):
        set_state(own, [Theirs])
    assert (theirs.secret, type(own)) == (1, mine)


class Lying(str):
    """Text that says of itself that it is a name."""

    __slots__ = ()

    def isidentifier(self) -> bool:
        return True


@pytest.mark.parametrize(
    "name",
    ["a): pass\nimport os\ndef f(", "__class__", "_\uff3fclass__", "class", "a b",
     Lying("self, x=print('evil')")],
)  # fmt: skip
def test_a_data_class_that_comes_along_has_fields_that_are_names(name: str) -> None:
    with pytest.raises(PolicyViolation):
        data_class(name)


def test_what_a_data_class_generates_is_for_its_own_objects() -> None:
    mine = data_class("secret")
    assert repr(mine(5)) == "Mine(secret=5)"
    theirs = SimpleNamespace(secret=1)
    for use in (lambda: mine.__init__(theirs, 2), lambda: mine.__repr__(theirs)):
        with pytest.raises(PolicyViolation, match="of a SimpleNamespace"):
            use()
    assert theirs.secret == 1


def data_class(name: str) -> Any:
    """What becomes of a data class with a field of this name when it comes with a request."""
    unpickle = FencedUnpickler(io.BytesIO(b""), {}).find_class
    made = unpickle("cloudpickle.cloudpickle", "_make_skeleton_class")(
        type, "Mine", (), {}, None, None
    )
    compiled = unpickle("cloudpickle.cloudpickle", "_make_function")
    (field,) = dataclasses.fields(dataclass(type("One", (), {"__annotations__": {"a": int}})))
    field.name = name
    names = {"__dataclass_fields__": {name: field}, "__init__": compiled(), "__repr__": compiled()}
    return unpickle("cloudpickle.cloudpickle", "_class_setstate")(made, (names, {}))


def test_what_comes_along_cannot_take_a_guard_s_place() -> None:
    """Names that only the guards have, among a function's: its code does not look there."""

    def identity(x: Any) -> Any:
        return x

    for name in GUARDS:
        source = "def probe():\n    torch.hearthnet_test = 1\n    return [a for a in (1, 2)][0]\n"
        scope = {
            "__builtins__": guarded_builtins("1f2e"), "torch": torch, name: identity,
        }  # fmt: skip
        exec(compile_guarded(source, "<body>", "1f2e"), scope)  # noqa: S102
        with pytest.raises(PolicyViolation, match="changing `torch`"):
            scope["probe"]()
        assert not hasattr(torch, "hearthnet_test")


def test_a_payload_cannot_change_what_nnsight_s_own_functions_see() -> None:
    from nnsight.modeling import transformers

    fill = _global("nnsight.intervention.serialization", "_fill")
    call = _global("nnsight.modeling.transformers", "TransformersModel._call")
    payload = b"\x80\x04" + fill + call + b"}" + _text("evil") + b"K\x01s" + b"\x86R."
    with pytest.raises(PolicyViolation, match="what a function sees"):
        FencedUnpickler(io.BytesIO(payload), {}).load()
    assert not hasattr(transformers, "evil")


@pytest.mark.parametrize(
    "where",
    [
        "/anywhere/nnsight/modeling/transformers.py",
        r"C:\site-packages\nnsight\modeling\transformers.py",
    ],
)
def test_what_a_model_generates_with_is_the_server_s_own_whatever_comes(where: str) -> None:
    """Its source is shipped by every client, and would not pass the fence."""
    load = policy._fenced_loader(serialization._load_function)
    loaded = load("def generate(): evil", "generate", None, None, None, where, 1)
    assert loaded is TransformersModel.generate.__wrapped__
    FencedUnpickler(io.BytesIO(b""), {}).find_class(serialization.__name__, "_fill")(
        loaded, {"evil": 1}
    )
    assert "evil" not in loaded.__globals__
