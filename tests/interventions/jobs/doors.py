"""Bodies of traces that knock where nobody should open, for a daemon that runs them as jobs.

`REFUSED` are traces that the inner fence turns down, for keys that are not trusted. `DEEDS` are
bodies for `hostile_jobs.deed`, which runs without that fence.
"""

from __future__ import annotations

import linecache
from typing import Any

import nnsight
import torch
from nnsight.modeling.transformers import TransformersModel

from tests.interventions.jail.hostile_bodies import parse

_REFUSED = r"""
## weights
# state_dict
loot = model.state_dict()
# parameters
loot = list(model.parameters())
# module
loot = model._module
# layer_s_module
loot = model.model.layers[3]._module.mlp.up_proj.weight
# storage
loot = model.lm_head.weight.untyped_storage()
# beyond_the_end
loot = torch.as_strided(model.lm_head.weight, (10 ** 6,), (1,))
# address
loot = model.lm_head.weight.data_ptr()
# hops
loot = model.interleaver
# overwritten_for_all
model.lm_head.load_state_dict({})
# saved
model.save_pretrained(OUT)
## underscores
# base_of_a_view
loot = model.lm_head.weight[:2]._base
# modules
loot = model._modules
# parameters
loot = model.model.layers[3]._parameters
# compiled_torch
loot = torch._C
# compiled_torch_imported
from torch import _C
loot = _C
# file_writer
import torch as _t
loot = _t._C.PyTorchFileWriter(OUT)
# numpys_globals
import numpy as np
loot = np._globals
# of_ones_own_module
class _Own(torch.nn.Module):
    def _inside(self): return self._call_impl
loot = _Own()._inside()
# through_super
class _Own(torch.nn.Module):
    def _inside(self): return super()._load_from_state_dict
loot = _Own()._inside()
# of_a_derived_envoy
class _Own(type(model)):
    pass
loot = _Own._persistent_objects
# class_of_classes
class _Kind(type(int)):
    pass
loot = _Kind("A", (), {"__reduce__": lambda self: (print, ("x",))})
# array_of_ones_own
import numpy as np
class _Own(np.ndarray):
    pass
np.ones(1).view(_Own).tofile(OUT)
# lazily
import numpy as np
loot = np.ones(3).mean().__class__
# guards
_write_ = lambda x: x
# guards_by_import
from math import pi as _getattr_
## patterns
# class
match model:
    case object(__class__=loot): pass
# module
match model.model.layers[3]:
    case object(_module=loot): pass
# hops
match model:
    case object(interleaver=loot): pass
# compiled
match torch:
    case object(_C=loot): pass
# files
match torch:
    case object(load=_load): loot = _load(SECRET)
# globals
match (lambda: 0):
    case object(__globals__=loot): pass
# frames
match (x for x in ()):
    case object(gi_frame=loot): pass
# by_place
class _Own:
    __match_args__ = ("__class__",)
match _Own():
    case _Own(loot): pass
# weights
match model.lm_head.weight:
    case torch.Tensor(data_ptr=_address): loot = _address()
## pandas
# import
import pandas
loot = pandas.read_csv(SECRET)
# from
from pandas import read_pickle
loot = read_pickle(SECRET)
## sympy
# sympify
import sympy
loot = sympy.sympify(EVIL)
# s
import sympy
loot = sympy.S(EVIL)
# of_a_function
import sympy
loot = sympy.sin(EVIL)
# of_an_operation
import sympy
loot = sympy.Symbol("x") + EVIL
# of_a_name
import sympy
x = sympy.Symbol("x")
loot = sympy.nsolve([x + sympy.Symbol(EVIL)], [x], [1])
# lambdify
import sympy
loot = sympy.lambdify([], EVIL)()
# parser
from sympy.parsing.sympy_parser import parse_expr
loot = parse_expr(EVIL)
# preview
import sympy
sympy.preview("x", viewer="file", filename=OUT)
## greenlets
# import
import greenlet
loot = greenlet.getcurrent().parent
# frame
loot = model.trace(IDS).gr_frame
## frames
# of_the_process
import sys
loot = sys._getframe()
# of_a_generator
loot = (x for x in ()).gi_frame
# of_a_function
loot = (lambda: 0).__globals__
# of_a_method
loot = model.trace.__func__
# inspect
import inspect
loot = inspect.currentframe()
# of_the_trace
loot = model.trace(IDS).info
## tracebacks
# of_an_error
try:
    1 / 0
except ZeroDivisionError as error:
    loot = error.__traceback__
# of_another
try:
    model.nothing
except Exception as error:
    loot = error.with_traceback(None)
# its_owner
try:
    ().nothing
except AttributeError as error:
    loot = error.obj
## formats
# class
loot = "{0.__class__}".format(model)
# globals
loot = "{0.__init__.__globals__}".format(model)
# mapping
loot = "{m.__class__}".format_map({"m": model})
# unbound
loot = str.format("{0.__class__}", model)
# formatter
import string
loot = string.Formatter().format("{0.__init__.__globals__}", model)
# formatter_by_name
from string import Formatter
loot = Formatter().format("{0.__class__}", model)
# literal
loot = f"{model.__class__}"
## files
# stat
import os
loot = os.stat(SECRET)
# path
import pathlib
loot = pathlib.Path(SECRET).exists()
# open
loot = open(SECRET).read()
# numpy
import numpy
loot = numpy.fromfile(SECRET)
# torch
loot = torch.load(SECRET)
## environment
# os
loot = torch.os.environ
# import
from os import environ
loot = dict(environ)
# of_another
loot = open(f"/proc/{VICTIM}/environ").read()
"""

_DEEDS = r"""
## weights
# of_another_hop
import gc
hops = [o for o in gc.get_objects() if type(o).__module__ == "mesh.interventions.hop"]
assert len(hops) == len(T.weights), hops
for hop, own, foreign in zip(hops, T.weights, reversed(T.weights)):
    hop.fetch_weight(own, "weight")
    try: hop.fetch_weight(foreign, "weight"); proof()
    except Exception as error: print("answered", type(error).__name__, error)
# overwritten
import gc
from mesh.shard.taps.codec import write_tensor
from mesh.shard.taps.messages import TapCall, TapResume
hops = [o for o in gc.get_objects() if type(o).__module__ == "mesh.interventions.hop"]
assert len(hops) == len(T.weights), hops
for hop, path in zip(hops, T.weights):
    before, sent = hop.fetch_weight(path, "weight"), []
    new = [0, 1000, 0, write_tensor(torch.ones(1, 2, before.shape[1]), sent)]
    want = [[path + ".source.F_linear_0.input", [0]]]
    value = [2, [[2, [new]], [3, []]]]
    call = TapCall(path=path, watch=True, grad=True, want=want, value=value)
    answer, _ = hop.exchange(call, sent)
    tag, sent = answer.value[1][0][1][1][1], []
    changed = [[0, tag, 2, write_tensor(before * 0, sent)]]
    value = [2, [[2, [[0, 1000, 0, None], [0, tag, 0, None], None]], [3, []]]]
    hop.exchange(TapResume(changed=changed, value=value), sent)
    hop.release()
    if not torch.equal(before, hop.fetch_weight(path, "weight")): proof()
# of_a_hop_that_is_none
import gc
(own,) = [o for o in gc.get_objects() if type(o).__name__ == "SocketChannel"]
own.call(7, b"x"); proof()
## frames
# all_the_way_up
frame, seen = sys._getframe(), []
while frame: seen.append(repr(frame.f_locals) + repr(frame.f_globals)); frame = frame.f_back
loot = "".join(seen).replace(T.nonce, "")[-100000:]
# of_greenlets
import greenlet
g, seen = greenlet.getcurrent(), []
while g: seen.append(repr(g.gr_frame and g.gr_frame.f_locals)); g = g.parent
loot = "".join(seen).replace(T.nonce, "")[-100000:]
# of_a_traceback
try: 1 / 0
except ZeroDivisionError as error: frame = error.__traceback__.tb_frame
while frame.f_back: frame = frame.f_back
loot = repr(frame.f_locals).replace(T.nonce, "")[-100000:]
# every_object
import gc
loot = repr([d for d in gc.get_objects() if type(d) is dict and "CANARY_OF_A_TEST" in d])
# of_a_format
loot = "{0.__globals__}".format(syscall)[-100000:]
## environment
# own
loot = repr(dict(os.environ))
# own_file
loot = open("/proc/self/environ", "rb").read()
# of_the_parent
loot = open(f"/proc/{os.getppid()}/environ", "rb").read()
# of_the_daemon
loot = open(f"/proc/{T.daemon}/environ", "rb").read()
## daemon
# command_line
loot = open(f"/proc/{T.daemon}/cmdline", "rb").read(); proof()
# memory
open(f"/proc/{T.daemon}/mem", "rb"); proof()
# descriptors
loot = os.listdir(f"/proc/{T.daemon}/fd"); proof()
# kill
os.kill(T.daemon, 9); proof()
# kill_its_group
os.killpg(T.daemon, 9); proof()
# kill_the_parent
os.kill(os.getppid(), 9); proof()
# its_keys
loot = open(T.runtime_file).read(); proof()
# its_files
loot = os.listdir(T.state_dir); proof()
# its_api
socket.create_connection(("127.0.0.1", T.api_port), 2); proof()
# its_logs
open(T.state_dir + "/daemon.log", "a").write("x"); proof()
## metadata
# stat
loot = str(os.stat(T.secret_path).st_size)
# extended_attributes
loot = str(os.listxattr(T.secret_path)); proof()
# links
loot = os.readlink(T.folder + "/link")
## sealed
# payload_rewritten
for fd in range(3, 64):
    try: os.pwrite(fd, b"x", 0); proof()
    except OSError: pass
# result_grown
for fd in range(3, 64):
    try: os.ftruncate(fd, 1 << 30); proof()
    except OSError: pass
"""

REFUSED = parse(_REFUSED)
DEEDS = parse(_DEEDS)


def knock(model: TransformersModel, name: str, told: dict[str, Any]) -> Any:
    """Run a body of `REFUSED` as a job; what it got."""
    body = "".join(f"    {line}\n" for line in REFUSED[name].splitlines())
    source = f"with model.session():\n    loot = 0\n{body}    loot = nnsight.save(str(loot))\n"
    path = f"<door {name}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    scope = {
        "model": model, "nnsight": nnsight, "torch": torch, "loot": None,
        "IDS": torch.tensor([[5, 7]]), "SECRET": told["secret_path"], "OUT": told["out"],
        "VICTIM": told["victim"], "EVIL": f"print({told['nonce']!r})",
    }  # fmt: skip
    exec(compile(source, path, "exec"), scope)  # noqa: S102 - a body per name, as a user writes it
    return scope["loot"]
