"""What names with an underscore, patterns and imports could open, and do not."""

from __future__ import annotations

import pytest

from mesh.errors import PolicyViolation
from tests.interventions.jail.test_policy import guarded

INSIDES = [
    "torch._C", "from torch import _C", "import torch._C", "import torch._C as c",
    "getattr(torch, '_C')", "'{0._C}'.format(torch)", "hasattr(torch, '_C') or torch._C",
    "import numpy as np\nnp._globals", "import numpy._globals", "from numpy import _core",
    "import numpy._core", "import torch.nn._reduction", "from torch.nn import _reduction",
    "import torch.nn as n\nn._reduction", "import math, os", "from os import path as _path",
    "torch.ones(2)._base", "torch.ones(2)._backward_hooks", "torch.ones(2)._typed_storage()",
    "torch.Tensor._make_subclass", "torch.ones(2).view(1, 2)._base",
    "import numpy as np\nnp.ones(2)[:1]._base", "model._modules", "model._parameters",
    "model.layers[0]._parameters", "model.layers._children", "model.layers[0].up._module",
    "torch.nn.Linear(1, 1)._parameters", "torch.nn.Linear(1, 1)._call_impl",
    "torch.nn.Linear._load_from_state_dict", "torch.nn.Linear(1, 1)._x = 1",
    "torch._x = 1", "model._x = 1", "torch.ones(1)._x = 1", "del torch._C",
    "class A(torch.nn.Module):\n    pass\nA()._call_impl",
    "class A(torch.nn.Module):\n    pass\nA()._call_impl = 1",
    "class A(torch.nn.Module):\n    def f(self): return super()._call_impl\nA().f()",
    "class A(torch.nn.Module):\n    pass\nA._call_impl",
    "class A(torch.Tensor):\n    pass\ntorch.ones(1).as_subclass(A)._base",
    "class A(torch.autograd.Function):\n    pass\nA._backward_cls",
    "class A(type(model)):\n    pass\nA(torch.nn.Linear(1, 1)).interleaver",
    "class A:\n    pass\nsetattr(A, '__array_interface__', 1)", "class A:\n    pass\nA.__dict__",
    "class A:\n    pass\nsetattr(A(), '__getattr__', 1)",
    "class A:\n    pass\ngetattr(A(), '__dict__')",
    "class A(type(model)):\n    pass\nA._x", "class A(type(model)):\n    pass\nA._module",
    "import numpy as np\nclass A(np.ndarray):\n    pass\nnp.ones(1).view(A).tofile('x')",
    "import numpy as np\nclass A(np.ndarray):\n    pass\nnp.ones(1).view(A).ctypes",
    "class A(type(int)):\n    pass", "class A(type(type(1))):\n    pass",
    "import random\nclass A(random.Random):\n    pass\nA()._randbelow",
    "import json\nclass A(json.JSONEncoder):\n    pass\nA()._x",
    "class A:\n    _x = 1\nA._x.__class__", "class A:\n    pass\nA().__x",
    "class A:\n    pass\nA()._x_",
    "class A:\n    pass\nA()._x__ = 1", "__x = 1", "_x_ = 1", "__ = 1", "_A__x_ = 1",
    "(1, 2)._x", "from collections import namedtuple\nnamedtuple('N', 'a')(1)._source",
    *(place.replace("NAME", name) for name in ("_getattr_", "_write_", "__builtins__", "_tmp0_")
      for place in ("NAME = 1", "def NAME(): pass", "class NAME: pass", "def f(NAME): pass",
                    "lambda *NAME: 1", "def f(**NAME): pass", "import math as NAME",
                    "from math import pi as NAME", "for NAME in (1,): pass", "[1 for NAME in (1,)]",
                    "(NAME := 1)", "del NAME", "global NAME", "NAME += 1", "NAME: int = 1",
                    "NAME[0] = 1", "NAME.x = 1", "try:\n    1/0\nexcept Exception as NAME: pass",
                    "def f():\n    x = 1\n    def g():\n        nonlocal NAME",
                    "match 1:\n    case NAME: pass", "match [1]:\n    case [*NAME]: pass",
                    "match {}:\n    case {**NAME}: pass", "match 1:\n    case int() as NAME: pass",
                    "match 1:\n    case int(NAME): pass", "match 1:\n    case NAME(): pass")),
    *(f"match {subject}:\n    case {pattern}: pass" for subject, pattern in (
        ("1", "object(__class__=x)"), ("1", "int(__doc__=x)"), ("torch", "object(save=x)"),
        ("torch", "object(_C=x)"), ("torch", "object(os=x)"), ("torch", "object(hub=x)"),
        ("torch.ones(1)", "torch.Tensor(_base=x)"), ("torch.ones(1)", "object(grad_fn=x)"),
        ("torch.ones(1)", "object(data_ptr=x)"), ("model", "object(_module=x)"),
        ("model", "object(interleaver=x)"), ("model.layers[0]", "object(register_buffer=x)"),
        ("(lambda: 0)", "object(__globals__=x)"), ("(i for i in ())", "object(gi_frame=x)"),
        ("[torch]", "[object(_C=x)]"), ("{1: torch}", "{1: object(save=x)}"),
        ("torch", "object(nothing=x) | object(_C=x)"), ("1", "torch.os.sep"), ("1", "torch._C.x"),
        ("1", "object.__class__"), ("1", "x if x.__class__"), ("1", "torch.os.PathLike()"),
        ("().__class__", "_"), ("1", "x if [torch for _ in '1'][0]._C"), ("torch", "object(_x_=y)"),
    )),
    "class A:\n    __match_args__ = ('__class__',)\nmatch A():\n    case A(x): pass",
    "class A(torch.nn.Module):\n    __match_args__ = ('_call_impl',)\n"
    "match A():\n    case A(x): pass",
]  # fmt: skip


@pytest.mark.parametrize("body", INSIDES)
def test_an_underscore_opens_nothing_that_is_others(body: str) -> None:
    with pytest.raises((PolicyViolation, NameError)):
        guarded(body)
