"""Inside the jail: what its warmed parent loads, and what one job's process does with a request.

Everything here runs behind the walls, next to the stranger's code it unpickles and runs. It holds
the ends of the model and nothing else of value. What it gives back are bytes that only the client
opens.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import json
import operator
import os
import pickle
import random
import select
import socket
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import nnsight
import numpy
import torch
import transformers
import zstandard
from cloudpickle.cloudpickle import (  # type: ignore[import-untyped]
    _DYNAMIC_CLASS_TRACKER_BY_CLASS,
)
from nnsight.intervention.serialization import UnknownPersistentIdError
from nnsight.modeling.mixins.remotable import Remotable
from nnsight.schema.request import RequestModel
from nnsight.tracing.tracer import WithBlockNotFoundError, _saves, dec, inc
from nnsight.tracing.util import filter_traceback
from torch import nn

from mesh.errors import BadRequest, MeshError
from mesh.interventions.channel import SocketChannel
from mesh.interventions.jail.limits import ToldError
from mesh.interventions.jail.lockdown import readable_paths
from mesh.interventions.jail.ownership import Namespace
from mesh.interventions.jail.policy import FencedUnpickler, raise_fence
from mesh.interventions.jail.shipped import CompleteUnpickler, bare, complete_functions
from mesh.interventions.jobs.hints import hints
from mesh.interventions.jobs.left import CameContainers, LeftGradients
from mesh.interventions.jobs.one_model import one_model
from mesh.interventions.jobs.order import JobOrder, unpack_hops
from mesh.interventions.jobs.rehearsal import NoLayers, rehearsed, written
from mesh.interventions.skeleton import Skeleton, job_model, load_skeleton
from mesh.interventions.unread import UnreadTensor
from mesh.interventions.weights import RemoteTensors
from mesh.models.manifest import read_manifest
from mesh.shard.device import DTYPES
from mesh.shard.taps.codec import Staying
from mesh.types import LayerRange, ModelId

if TYPE_CHECKING:
    from nnsight.modeling.transformers import TransformersModel

_OURS = str(Path(__file__).parents[2])
_NNSIGHT = str(Path(nnsight.__file__).parent)
_INSTALLED = (*readable_paths(), "<frozen ")
_COMPRESSION_LEVEL = 3
_UNWRITABLE = (pickle.PicklingError, TypeError, AttributeError)
"""What Python raises for an object that cannot be pickled."""

_remote_backend = Remotable._remote_backend
_skeleton: Skeleton | None = None
_rehearsal = b""


def warm(argument: str) -> None:
    """Load the model without its layers. `argument` is JSON: directory, model_id, cache_dir, dtype.

    Runs in the warmed parent, once.
    """
    global _skeleton, _rehearsal  # noqa: PLW0603 - what every forked job starts with
    order = json.loads(argument)
    manifest = read_manifest(
        Path(order["directory"]),
        model_id=ModelId(order["model_id"]),
        cache_dir=Path(order["cache_dir"]),
    )
    _skeleton = load_skeleton(manifest, dtype=DTYPES[order["dtype"]])
    _rehearsal = written(_skeleton.model)
    job_model(_skeleton, NoLayers(), [LayerRange(0, manifest.total_layers)], _say)
    try:
        quick = rehearsed(partial(_rehearse, _skeleton.model))
    except (MeshError, RuntimeError, TypeError, ValueError):
        quick = False  # what is wrong is told to the first job that traces such a model
    if not quick:
        _rehearsal = b""


def ready(hint: str, channel: socket.socket) -> Callable[[bytes], bytes]:
    """Entry point of a job; what it returns runs a payload over these hops."""
    if _skeleton is None:
        raise RuntimeError("the parent of this process was not warmed")
    if _rehearsal and not select.select([channel], [], [], 0)[0]:  # nobody waits for it yet
        _rehearse(_skeleton.model)
    _freshen()
    model = job_model(_skeleton, SocketChannel(channel), unpack_hops(hint), _say)
    return partial(_run, model)


def _rehearse(model: TransformersModel) -> None:
    order = JobOrder(compress=True, attention="", trusted=True)
    _packed(execute(model, order, _rehearsal), compress=True)


def _run(model: TransformersModel, payload: bytes) -> bytes:
    """The packed result. Raises ToldError with what the job's author should read."""
    order, request = JobOrder.unpack(payload)
    if order.attention:
        model._remoteable_set_env({"attn_implementation": order.attention})
    try:
        saved = execute(model, order, request)
        return _packed(saved, compress=order.compress)
    except BaseException as raised:  # noqa: BLE001 - all that a stranger's code raises, told to it
        raise ToldError(_told(raised)) from None


def _unknown_part(error: UnknownPersistentIdError) -> BadRequest:
    part = str(error).removeprefix("Module:")
    return BadRequest(
        f"The request is about {part[:200]!r}, which the model here does not have; it is built by"
        f" transformers {transformers.__version__} and nnsight {nnsight.__version__}.",
        fix="Use these versions. Attach modules of your own inside the trace: one that was attached"
        " outside of it comes with every request, until the model is made anew.",
    )


def _freshen() -> None:
    """What a process of its own would not share with the others forked from the same parent."""
    # torch's own way first takes a traceback for the devices that there are none of.
    for seed in (torch.default_generator.manual_seed, random.seed, numpy.random.seed):
        seed(int.from_bytes(os.urandom(4)))
    warnings.formatwarning = lambda message, category, *_: f"{category.__name__}: {message}\n"


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - what a job prints is its author's log


def execute(model: TransformersModel, order: JobOrder, request: bytes) -> dict[str, Any]:
    unpickler: type[pickle._Unpickler | pickle.Unpickler] = CompleteUnpickler
    complete_functions()
    Remotable._remote_backend = _backend
    if not order.trusted:
        raise_fence()
        unpickler = FencedUnpickler
    objects = model._remoteable_persistent_objects()
    try:
        with one_model():
            tracer = RequestModel.deserialize(request, objects, order.compress, unpickler)
    except UnknownPersistentIdError as error:
        raise _unknown_part(error) from None
    for name, decorators in bare.items():
        _say(
            f"`{name}` runs here without {', '.join(decorators)}: nnsight ships functions without"
            " their decorators. Do in its body what they do."
        )
    frame = tracer.info.frame
    gradients = LeftGradients({**frame.f_globals, **frame.f_locals})
    containers = CameContainers(frame.f_locals, frame.f_globals)
    inc()
    try:
        tracer.execute(tracer.info.code)
        saves = _saves()
        saved = {n: v for n, v in frame.f_locals.items() if id(v) in saves}
        filled = containers.filled(frame.f_locals, saves)
        unsaved = [name for name in filled.unsaved if name not in saved]
        saved |= filled.back
    finally:
        dec()
    if filled.left:
        _say(
            f"What was saved into {', '.join(sorted(filled.left))} stays in this job: the client's"
            " own gets none of it. Give it a name inside the trace as well, and put it there behind"
            " it."
        )
    if unsaved:
        _say(
            f"What this job put into {', '.join(sorted(unsaved))} stays in it: save each value, as"
            " in acts.append(value.save()), to have them in the client's own."
        )
    if left := gradients.names(saved):
        _say(
            f"The gradients that backward() gave {', '.join(left)} stay in this job: the client's"
            " own tensors get none. Save them, or have the optimiser inside a session."
        )
    return saved


def _backend(model: Remotable, remote: bool | str, *more: Any) -> Any:
    """None, which is here, for a trace with ``remote=True`` inside of a session that is."""
    return None if remote is True else _remote_backend(model, remote, *more)


# The result


_PROTOCOL = 4


class _AtTheClient:
    """In the place of what a call gives there."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = function, arguments


class _Portable(pickle.Pickler):
    """Writes nothing that a client without hearthnet could not load."""

    def reducer_override(self, obj: Any) -> Any:
        """How an object is pickled that not every client can read as it is."""
        if (own := _of_the_author_s(obj)) is not None:
            return own
        if type(obj) is Namespace:
            return obj.__reduce__()
        if isinstance(obj, nn.Module) and isinstance(obj._parameters, RemoteTensors):
            raise pickle.PicklingError(f"{type(obj).__name__} is on another machine")
        if isinstance(obj, UnreadTensor):
            return obj.__reduce_ex__(_PROTOCOL)
        if isinstance(obj, torch.Tensor) and obj.grad_fn is not None:
            # As a leaf it would take a backward() at the client, and pass nothing on.
            alone: Any = obj.detach()
            return alone.__reduce_ex__(_PROTOCOL)
        if isinstance(obj, Staying):
            raise pickle.PicklingError(f"{obj.kind} is on another machine")
        module = getattr(obj, "__module__", None) or type(obj).__module__
        if str(module).partition(".")[0] == "mesh":
            raise pickle.PicklingError("a part of the model is on another machine")
        return NotImplemented


def _of_the_author_s(obj: Any) -> tuple[Any, ...] | None:
    """How a class that came by value is written, and an object of one that has slots there: here it
    came without, and the client's has no room for a dict."""
    if type(obj) is _AtTheClient:
        return obj.reduced
    if isinstance(obj, type):
        return _where_it_was_defined(obj) if obj in _DYNAMIC_CLASS_TRACKER_BY_CLASS else None
    kind = type(obj)
    has_slots = kind in _DYNAMIC_CLASS_TRACKER_BY_CLASS and "__slots__" in vars(kind)
    if not has_slots or not getattr(obj, "__dict__", None) or hasattr(kind, "__setstate__"):
        return None
    return copyreg.__newobj__, (kind,), (None, vars(obj))  # type: ignore[attr-defined]


def _where_it_was_defined(kind: type) -> tuple[Any, ...]:
    """How a class that came by value is found: by the number that cloudpickle gave it there, also
    one that a function defined; in another process by its name, or one that has only that."""
    module = _AtTheClient(importlib.import_module, kind.__module__)
    bare = _AtTheClient(type, kind.__name__, (), {})
    named = _AtTheClient(getattr, module, kind.__qualname__, bare)
    tracker = _AtTheClient(importlib.import_module, "cloudpickle.cloudpickle")
    by_number = _AtTheClient(operator.attrgetter("_DYNAMIC_CLASS_TRACKER_BY_ID"), tracker)
    number = _DYNAMIC_CLASS_TRACKER_BY_CLASS[kind]
    return operator.methodcaller("get", number, named), (by_number,)


def _packed(saved: dict[str, Any], *, compress: bool) -> bytes:
    try:
        buffer = _written(saved)
        if not compress:
            return buffer.getvalue()
        return zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL).compress(buffer.getbuffer())
    except _UNWRITABLE:
        for name, value in saved.items():
            _require_writable(name, value)
        raise
    except (MemoryError, RuntimeError) as error:
        # torch goes on to close its archive, and fails at that.
        if not any(isinstance(each, MemoryError) for each in (error, error.__context__)):
            raise
        raise MemoryError("There is not enough left to write down what was saved.") from None


def _written(saved: dict[str, Any]) -> io.BytesIO:
    buffer = io.BytesIO()
    writer = SimpleNamespace(**{**vars(pickle), "Pickler": _Portable})
    torch.save(saved, buffer, pickle_module=writer, pickle_protocol=_PROTOCOL)
    return buffer


def _require_writable(name: str, value: Any) -> None:
    try:
        _written({name: value})
    except _UNWRITABLE as error:
        raise BadRequest(
            f"What was saved as {name!r} cannot be sent: {error}.",
            fix="Save tensors, numbers, text and containers of them.",
        ) from None


# What went wrong


def _told(raised: BaseException) -> str:
    """The traceback with the author's own lines, where it has any."""
    errors = _with_what_led_to_it(raised)
    for error in errors:
        kept = filter_traceback(error.__traceback__, _is_theirs)
        if kept is None and not _is_ours(error):
            kept = filter_traceback(error.__traceback__, _is_the_model_s)
        error.__traceback__ = kept
    text = "".join(traceback.format_exception(raised, limit=-30)).rstrip()
    if _is_ours(raised):
        text = text.replace(f"{type(raised).__module__}.", "")
    for path in sorted(_INSTALLED, key=len, reverse=True):  # where the node has it, tells its owner
        text = text.replace(f'File "{path}{os.sep}', 'File "')
    return "\n".join([text, *hints(errors, text, is_ours=_is_ours(raised))])


def _with_what_led_to_it(raised: BaseException) -> list[BaseException]:
    """All errors that are told beside `raised`, itself first."""
    found: dict[int, BaseException] = {}
    left: list[BaseException | None] = [raised]
    while left:
        error = left.pop()
        if error is None or id(error) in found:
            continue
        found[id(error)] = error
        if isinstance(error.__context__, WithBlockNotFoundError):
            error.__context__ = None  # how nnsight finds out that a backward() has no block
        left += [error.__cause__, error.__context__]
        left += error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return list(found.values())


def _is_ours(error: BaseException) -> bool:
    return type(error).__module__.startswith("mesh.")


def _is_theirs(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_INSTALLED)


def _is_the_model_s(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith((_OURS, _NNSIGHT))
