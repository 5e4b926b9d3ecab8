"""One job's session on one shard: its tensors, caches, graphs, and the forwards it has under way.

Where the job wants to see a value, the forward hands out a message and stands still; the thread is
free for others until the job's answer comes. While one stands still the job may start another (an
ad-hoc module call), so they form a stack.

Only the operations of `TapSession` exist, on modules inside the session's layers; nothing that
arrives is executed or unpickled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from nnsight.util import apply
from transformers.utils.output_capturing import _active_collector

from mesh.errors import SAME_VERSION, BadRequest, LimitReached, MeshError
from mesh.shard.compiled.experts import BlockExperts
from mesh.shard.compiled.formats import BlockLinear
from mesh.shard.compiled.latent import LatentLinear
from mesh.shard.int4 import Int4Linear
from mesh.shard.packed_experts import PackedMatrices
from mesh.shard.taps import sources
from mesh.shard.taps.caches import TapCaches
from mesh.shard.taps.codec import Buffers, EncodedKind, Path, Reader, Writer, is_cache
from mesh.shard.taps.guard import GraphShare, OperationGuard
from mesh.shard.taps.joints import ShardJoints
from mesh.shard.taps.mail import CountedBuffers, Mail
from mesh.shard.taps.messages import (
    TapAbort,
    TapAborted,
    TapAtOnce,
    TapBackward,
    TapCacheContents,
    TapCacheOperation,
    TapDone,
    TapDrill,
    TapForward,
    TapHit,
    TapMore,
    TapReply,
    TapRequest,
    TapResume,
    TapSpan,
    TapValue,
    TapWeight,
)
from mesh.shard.taps.meter import ENTRY_BYTES, MemoryMeter, Tally
from mesh.shard.taps.ordinary import OrdinaryForwards
from mesh.shard.taps.refusals import MALFORMED, malformed, nothing_else, raised, refusal
from mesh.shard.taps.run import NAME_BYTES, Asked, PassPatterns, Run
from mesh.shard.taps.shared_tensors import Loose, ShardTensors
from mesh.shard.taps.tree import SpanTree
from mesh.shard.taps.weight_copies import WeightCopies
from mesh.types import LayerRange

logger = logging.getLogger(__name__)

_MAX_NESTED = 16
_KEYS_HANDED_ON = "shared_kv_states"
_MAX_OBSERVED_BYTES = 16 << 20
_SOURCE_OBJECTS = 16
"""What a byte of source takes once it is parsed, compiled and kept."""


@dataclass(frozen=True, slots=True)
class TapLimits:
    """Bounds of one session: bytes of all that it holds, and rows, those of one forward and of all
    its caches together."""

    memory_bytes: int = 4 << 30
    positions: int = 32768


class _Aborted(BaseException):
    """The job gave up the forward under way."""


class TapSession:
    """What a job can do with some layers of a shard; a `mesh.shard.taps.run.Host`.

    `exchange` and `go_on` return the answer, or None when the device should be given to others
    before `go_on` is called again. Both and `close` are called on one thread.
    """

    def __init__(self, tree: SpanTree, layers: LayerRange, limits: TapLimits) -> None:
        self._tree = tree
        self._layers = layers
        self._limits = limits
        self.meter = MemoryMeter(limits.memory_bytes)
        self.mail = Mail(self.meter)
        self._guard = OperationGuard(tree.storages, self.meter)
        self._weights = WeightCopies(tree)
        self._joints = ShardJoints(self.meter)
        self.tensors = ShardTensors(tree.device, self.meter, self._joints, self._weights)
        self.patterns = PassPatterns(self.meter)
        self.sourced: dict[str, Any] = {}
        self.observed: frozenset[str] = frozenset()
        self._observed_with_grad = False
        self._keys_handed_on: Any = None
        self._modules_sourced: set[str] = set()
        self._names = Tally(self.meter)
        self._sources = Tally(self.meter)
        self._caches = TapCaches(tree, layers, self.meter)
        self._graphs: set[GraphShare] = set()
        self._runs: list[Run] = []
        self._ordinary = OrdinaryForwards(tree, self.meter)

    def exchange(self, message: bytes | bytearray | memoryview) -> bytes | None:
        """Do what `message` asks. Errors are answers, too."""
        try:
            request, buffers = self.mail.open(message)
            self._prepare(request)
            if not isinstance(request, TapSpan) or self._runs:
                self._ordinary.end()
            if isinstance(request, TapForward):
                return self._start(request, buffers)
            if isinstance(request, TapResume | TapAbort):
                run = self._top()
                run.is_watched = True  # from here on the job's values are among the model's
                run.grad = run.grad if request.grad is None else request.grad
                return self._drive(run, (request, buffers))
            return self._at_once(request, buffers)
        except MeshError as error:
            return refusal(error)
        except MALFORMED as error:
            return refusal(malformed(error))
        finally:
            self.mail.read()

    def go_on(self) -> bytes | None:
        """Continue after a pause."""
        return self._drive(self._top(), None)

    def close(self) -> None:
        """Free everything; forwards under way are unwound."""
        with self._guard:
            while self._runs:
                run = self._runs.pop()
                run.unwind()
                self.meter.give(run.room)
        for path in self._modules_sourced:
            self._tree.unsource(path)
        self._modules_sourced.clear()
        self._caches.clear()
        self._release()
        self._joints.forget()
        self.patterns.clear()
        self._names.set(0)
        self.mail.close()

    # Requests

    def _prepare(self, request: TapRequest) -> None:
        self._joints.drop(request.unreachable)
        for number in request.free:
            self._caches.free(number)
        if request.release:
            self._release()
        if isinstance(request, TapForward | TapResume):
            if request.obs is not None:
                self.observed = frozenset(self._located(request.obs))
                self._observed_with_grad = request.obs_grad
            for base in self._located(request.sourced):
                self.sourced.setdefault(base, None)
        self._count_names()

    def _release(self) -> None:
        self.tensors.clear()
        self._joints.clear()
        self._weights.clear()
        self.sourced.clear()
        self._sources.set(0)
        self.observed = frozenset()
        if not len(self._caches):  # what they hold may have a history
            self._graphs = {run.graph for run in self._runs if run.graph is not None}

    def _located(self, locations: list[str]) -> list[str]:
        for location in locations:
            self._tree.check(location, self._layers)
        return locations

    def _count_names(self) -> None:
        wanted = (location for run in self._runs for location in run.wanted)
        names = (*self.sourced, *self.observed, *wanted)
        visits = sum(len(visits) for run in self._runs for visits in run.wanted.values())
        self._names.set(sum(map(len, names)) + (len(names) + visits) * NAME_BYTES)

    def _want(self, run: Run, request: TapForward | TapResume) -> None:
        """Take over which visits to stop at, counted from this message on."""
        wanted = {location: frozenset(visits) for location, visits in request.want}
        run.wanted = dict(zip(self._located(list(wanted)), wanted.values(), strict=True))
        self._count_names()
        for location in (*wanted, *self.observed):
            path, is_inside, _ = location.partition(".source.")
            if is_inside and path not in self._modules_sourced:
                self._tree.source(path)
                self._modules_sourced.add(path)

    def _start(self, request: TapForward, buffers: Buffers) -> bytes | None:
        if len(self._runs) >= _MAX_NESTED:
            raise BadRequest("Module calls are nested too deeply.", fix="Call fewer from within.")
        self._tree.use_attention(request.attn)
        run = Run(self, request, self._execute)
        self._runs.append(run)
        self._want(run, request)
        if self.observed or self.sourced or self._modules_sourced:
            self._ordinary.end()
        run.room = self._ordinary.hold_room(request, self.tensors.tags, self._caches.positions())
        run.is_watched = not run.room
        return self._drive(run, (request, buffers))

    def _top(self) -> Run:
        if not self._runs:
            raise BadRequest("No forward is under way.", fix=SAME_VERSION)
        return self._runs[-1]

    def _drive(self, run: Run, asked: Asked | None) -> bytes | None:
        if run.grad and run.graph is None:
            run.graph = GraphShare(self.meter)
            self._graphs.add(run.graph)
        self._guard.graph = self._joints.graph = run.graph
        self._weights.apply()
        try:
            with self._guard if run.is_watched else nullcontext():
                return run.go_on(self._tree, asked)
        finally:
            self._guard.graph = self._joints.graph = None
            self._tree.restore()
            if run.is_over and run in self._runs:
                self._runs.remove(run)
                self.discard(run.writer)
                self._count_left(run)

    def _count_left(self, run: Run) -> None:
        """Count what an ordinary forward left, instead of the room that was held for it."""
        if not run.room:
            return
        self.meter.give(run.room)
        run.room = 0
        try:
            for tensor in (*self.tensors.all(), *self._caches.tensors()):
                self._guard.count(tensor)
        except LimitReached:
            self._release()
            self._caches.clear()
            raise

    def _at_once(self, request: TapAtOnce, buffers: Buffers) -> bytes:
        # Gradients and weights cross once: neither end keeps them.
        loose = Loose(self._tree.device)
        reader = Reader(buffers, loose.read, nothing_else, self._tree.device)
        try:
            with self._guard:
                value = self._asked_for(request, reader)
                writer = Writer(loose.write, nothing_else, self.mail.new_buffers())
                try:
                    return self.pack(TapValue(value=writer.value(value)), writer.buffers)
                finally:
                    self.discard(writer)
        except RuntimeError as error:
            raise raised(error) from error

    def _asked_for(self, request: TapAtOnce, reader: Reader) -> Any:
        if isinstance(request, TapBackward):
            grad = reader.value(request.grad)
            return self._joints.backward(request.joint, grad, request.earlier)
        if isinstance(request, TapWeight):
            return self._weight(request)
        if isinstance(request, TapCacheContents):
            return self._caches.contents(request.cache, request.layer)
        return self._cache_operation(request, reader)

    def _weight(self, request: TapWeight) -> torch.Tensor:
        module, name = self._tree.module(request.path, self._layers), request.name
        weight = {**module._parameters, **module._buffers}.get(name)
        if isinstance(module, BlockLinear | Int4Linear | LatentLinear) and name == "weight":
            weight = module.weight
        if isinstance(getattr(module, name, None), BlockExperts | PackedMatrices):
            raise BadRequest(
                f"{request.path}.{name} is in few bits here, one expert by itself.",
                fix="Ask a deployment in 16 or 32 bit for it (--quant none).",
            )
        if weight is None:
            raise BadRequest(f"{request.path} has no weight {name[:100]}.", fix=SAME_VERSION)
        return self._weights.seen(weight).detach()

    def _cache_operation(self, request: TapCacheOperation, reader: Reader) -> None:
        operation = request.cache, request.name, reader.value(request.args)
        self._require_positions(self._caches.positions_after(*operation))
        graph = self._guard.graph = GraphShare(self.meter)
        try:
            with torch.set_grad_enabled(request.grad):
                self._caches.operate(*operation)
        finally:
            self._guard.graph = None
        self._graphs.add(graph)

    # Forwards, inside their greenlet

    def _execute(self, run: Run, asked: Asked) -> bytes:
        try:
            value = self._forward(run, *asked)
            return run.message(TapDone, value, kv=self._caches.growth())
        except _Aborted:
            return run.message(TapAborted, kv=self._caches.growth())
        except Exception as error:  # noqa: BLE001 - whatever model code raises is the job's error
            if not isinstance(error, MeshError):
                error = raised(error, self._tree.place_of(error))
            return refusal(error, grad=torch.is_grad_enabled(), kv=self._caches.growth())

    def _forward(self, run: Run, request: TapRequest, buffers: Buffers) -> Any:
        assert isinstance(request, TapForward)  # noqa: S101 - a run begins with one
        value = self._read(run, request, buffers)
        self._require_positions(_rows(value) + self._caches.positions())
        if isinstance(request, TapSpan):
            return self._span(run, request, value)
        args, kwargs = value
        del value
        return self._tree.module(request.path, self._layers)(*args, **kwargs)

    def _require_positions(self, wanted: int) -> None:
        if wanted > self._limits.positions:
            raise BadRequest(
                f"The trace asks a shard for {wanted} positions at once, cached ones included;"
                f" it takes {self._limits.positions}.",
                fix="Use fewer or shorter prompts in one trace.",
            )

    def _span(self, run: Run, request: TapSpan, value: Any) -> Any:
        """Hidden states after the layers, between them, and what transformers collects inside."""
        hidden, calls = value
        captured: dict[str, list[Any]] = {key: [] for key in request.capture}
        if captured:
            self._tree.capture_outputs()
        between = []
        token = _active_collector.set(captured)
        try:
            numbers = range(request.start, request.stop)
            for number, call in zip(numbers, request.calls, strict=True):
                run.breathe()
                self._tree.check(str(number), self._layers)
                args, kwargs = calls[call]
                # What the model's loop passes to all layers is one object there.
                kwargs = {k: self._handed_on(k, value) for k, value in kwargs.items()}
                hidden = self._tree.layer(number)(hidden, *args, **kwargs)
                between.append(hidden)
        finally:
            _active_collector.reset(token)
            if request.stop == self._layers.stop:
                self._keys_handed_on = None
        return hidden, (between[:-1] if request.between else []), captured

    def _handed_on(self, name: str, value: Any) -> Any:
        """An argument of a layer: of the keys that layers hand on to each other, those of the
        layers before it, which may have been asked for by themselves."""
        if name != _KEYS_HANDED_ON or value is None:
            return value
        if self._keys_handed_on is None:
            self._keys_handed_on = value
        return self._keys_handed_on

    def _with_own_keys(self, shown: Any, answer: Any) -> Any:
        """Arguments that were shown, as the job answers them, with the one object that layers hand
        keys on to each other in; it has what the job has made of it."""
        match shown, answer:
            case (_, {"shared_kv_states": own}), (args, {"shared_kv_states": made, **others}):
                if own is not None and made is not None:
                    held = dict(made)
                    own.clear()
                    own.update(held)
                return args, {**others, _KEYS_HANDED_ON: own if made is not None else None}
        return answer

    def show(self, run: Run, provider: str, value: Any) -> Any:
        """Let the job see `value`; what it makes of it."""
        if provider.endswith(".fn") and provider[:-3] in self.sourced:
            info = sources.drill(self._tree.reporter, self.sourced, provider[:-3], value)
            self._sources.grow(_SOURCE_OBJECTS * len(info.source) + ENTRY_BYTES)
            self._converse(run, run.message(TapDrill, provider=provider, info=info))
            return value
        before = _rows(value)
        self.tensors.has_shown_weights = False
        message = run.message(TapHit, value, provider=provider, kv=self._caches.growth())
        shows_weights = self.tensors.has_shown_weights
        answer = self._converse(run, message)
        if shows_weights and self._weights.unchanged(answer, value):
            return value
        answer = self._with_own_keys(value, answer)
        if (rows := _rows(answer)) > before:
            self._require_positions(rows + self._caches.positions())
        return answer

    def observe(self, run: Run, provider: str, value: Any) -> None:
        """See `Host`; handed over with the next message, or now when there is much of it."""
        writer = run.writer
        if not self._observed_with_grad:
            writer = Writer(self.tensors.write_detached, self._other(run), writer.buffers)
        run.observed.append((provider, writer.value(value)))
        if sum(map(len, run.writer.buffers)) > _MAX_OBSERVED_BYTES:
            self._converse(run, run.message(TapMore))

    def _converse(self, run: Run, message: bytes) -> Any:
        request, buffers = run.converse(message)
        if not isinstance(request, TapResume):
            raise _Aborted
        self._want(run, request)
        return self._read(run, request, buffers)

    # Values

    def _read(self, run: Run, request: TapForward | TapResume, buffers: Buffers) -> Any:
        """The value of a message, of which nothing else is kept."""
        reader = self._reader(run, buffers)
        try:
            changed, request.changed = request.changed, []
            self.tensors.read_changed(changed, reader)
            value, request.value = request.value, None
            return reader.value(value)
        finally:
            buffers.clear()

    def new_writer(self, run: Run) -> Writer:
        """A writer for the run's next message."""
        return Writer(self.tensors.write, self._other(run), self.mail.new_buffers())

    def discard(self, writer: Writer) -> None:
        """Keep and count nothing of what it has written."""
        assert isinstance(writer.buffers, CountedBuffers)  # noqa: S101 - all writers here have such
        writer.buffers.drop()

    def pack(self, reply: TapReply, buffers: Buffers) -> bytes:
        """The bytes of a message to hand out. Raises BadRequest, LimitReached."""
        assert isinstance(buffers, CountedBuffers)  # noqa: S101 - all writers here have such
        reply.sources = self._joints.take_sources()
        return self.mail.pack(reply, buffers)

    def _other(self, run: Run) -> Callable[[Any, Path], list[Any]]:
        def other(value: Any, path: Path) -> list[Any]:
            number = self._caches.number_of(value) if is_cache(value) else None
            if number is not None:
                return [int(EncodedKind.CACHE), number]
            number = len(run.standing) + 1
            run.standing[path] = (number, value)
            return [int(EncodedKind.KEPT), number, type(value).__name__]

        return other

    def _reader(self, run: Run, buffers: Buffers) -> Reader:
        def other(data: list[Any], path: Path) -> Any:
            if data[0] == EncodedKind.CACHE:
                return self._caches.get(data[1])
            # Only where it stood: elsewhere its methods would be called for a tensor's.
            number, value = run.standing.get(path, (None, None))
            if number != data[1]:
                raise BadRequest(
                    "An object of the model's own was put where it does not belong.",
                    fix="Change the tensors around it and leave it in its place.",
                )
            return value

        return Reader(buffers, self.tensors.read, other, self._tree.device)


def _rows(value: Any) -> int:
    """How many rows the largest tensor in `value` has."""
    rows = [0]

    def measure(tensor: torch.Tensor) -> None:
        rows.append(tensor.numel() // max(1, tensor.shape[-1]) if tensor.dim() else 1)

    apply(value, measure, torch.Tensor)
    return max(rows)
