"""One job's session on one shard: its tensors, caches, graphs, and the forwards it has under way.

A forward runs in a greenlet of the compute thread. Where the job wants to see a value, the greenlet
hands out a message and stands still; the thread is free for others until the job's answer comes.
While one stands still the job may run another (an ad-hoc module call), so they form a stack.

Only the operations of `TapSession` exist, on modules inside the session's layers; nothing that
arrives is executed or unpickled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from nnsight.util import apply
from transformers.utils.output_capturing import _active_collector

from mesh.errors import BadRequest, DeviceFailed, MeshError
from mesh.shard.taps import sources
from mesh.shard.taps.codec import Buffers, Kind, Path, Reader, Writer, is_cache, pack, unpack
from mesh.shard.taps.joints import ShardJoints, in_order_of_making
from mesh.shard.taps.ledger import Ledger, Loose
from mesh.shard.taps.tree import SpanTree
from mesh.types import LayerRange

logger = logging.getLogger(__name__)

_FIX = "Run the same hearthnet version on both machines."
_PAUSE_S = 0.05
_MAX_NESTED = 16
_MAX_CACHES = 64
_MAX_OBSERVED_BYTES = 16 << 20
_MAX_PATTERNS = 4096
_CACHE_OPERATIONS = frozenset(
    {"reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices"}
)

Header = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TapLimits:
    """Bounds of one session."""

    tensor_bytes: int = 4 << 30


class _Aborted(BaseException):
    """The job gave up the forward under way."""


class Run:
    """One forward under way; a `mesh.shard.taps.tree.Visitor`."""

    def __init__(self, session: TapSession, header: Header) -> None:
        self._session = session
        self.watching = bool(header.get("watch"))
        self.sourced = session.sourced
        self.grad = bool(header.get("grad"))
        self.attention = str(header.get("attn", "sdpa"))
        self.wanted: dict[str, frozenset[int]] = {}
        self.visits: dict[str, int] = {}
        self.observed: list[list[Any]] = []
        self.standing: dict[Path, tuple[int, Any]] = {}
        self.writer = session.new_writer(self)
        self.greenlet: Any = None
        self.since = 0.0

    def reached(self, provider: str, value: Any) -> Any:
        """See `Visitor`."""
        visit = self.visits.get(provider, 0)
        wanted = self.wanted.get(provider)
        if wanted is not None and visit in wanted:
            return self._session.show(self, provider, value)
        if provider in self._session.observed:
            self._session.observe(self, provider, value)
            return value
        self.visits[provider] = visit + 1
        return value

    def reply(self, op: str, value: Any = None, **fields: Any) -> bytes:
        """The message that goes out now; what was observed since the last one goes with it."""
        writer, self.writer = self.writer, self._session.new_writer(self)
        visits, self.visits = self.visits, {}
        observed, self.observed = self.observed, []
        self.standing = {}
        changed = self._session.ledger.write_changed(writer.buffers)
        if self.grad:
            tensors: list[torch.Tensor] = []
            apply(value, tensors.append, torch.Tensor)
            changed += [writer.tensor(tensor) for tensor in in_order_of_making(tensors)]
        header = {
            "op": op,
            "visits": self._session.pattern(visits),
            "observed": observed,
            "changed": changed,
            "value": writer.value(value),
            **fields,
        }
        return pack(header, writer.buffers)


class TapSession:
    """What a job can do with some layers of a shard.

    `exchange` and `go_on` return the answer, or None when the device should be given to others
    before `go_on` is called again. Everything is called on one thread.
    """

    def __init__(self, tree: SpanTree, layers: LayerRange, limits: TapLimits) -> None:
        self._tree = tree
        self._layers = layers
        self.joints = ShardJoints()
        self.ledger = Ledger(
            odd=True, device=tree.device, max_bytes=limits.tensor_bytes, origins=self.joints
        )
        self.sourced: dict[str, Any] = {}
        self.observed: frozenset[str] = frozenset()
        self._observed_with_grad = False
        self._modules_sourced: set[str] = set()
        self._caches: dict[int, Any] = {}
        self._patterns: dict[tuple[tuple[str, int], ...], int] = {}
        self._runs: list[Run] = []

    def exchange(self, message: bytes | memoryview) -> bytes | None:
        """Do what `message` asks. Errors are answers, too."""
        try:
            header, buffers = unpack(message)
            self._prepare(header)
            op = header.get("op")
            if op in ("span", "call"):
                return self._start(header, buffers)
            if op in ("resume", "abort"):
                return self._drive(self._top(), (header, buffers))
            return self._at_once(str(op), header, buffers)
        except MeshError as error:
            return _refusal(error)

    def go_on(self) -> bytes | None:
        """Continue after a pause."""
        return self._drive(self._top(), None)

    def close(self) -> None:
        """Free everything; forwards under way are unwound."""
        while self._runs:
            run = self._runs[-1]
            run.greenlet.parent = getcurrent()
            run.greenlet.throw(GreenletExit)
            self._drop(run)
        for path in self._modules_sourced:
            self._tree.unsource(path)
        self._modules_sourced.clear()
        self._release()
        self.joints = ShardJoints()
        self._caches.clear()

    # Requests

    def _prepare(self, header: Header) -> None:
        if header.get("release"):
            self._release()
        for number in header.get("free", ()):
            self._caches.pop(number, None)
        if header.get("obs") is not None:
            self.observed = frozenset(self._located(header["obs"]))
            self._observed_with_grad = bool(header.get("obs_grad"))
        for base in self._located(header.get("sourced") or ()):
            self.sourced.setdefault(base, None)

    def _release(self) -> None:
        self.ledger.clear()
        self.joints.clear()
        self.sourced.clear()
        self.observed = frozenset()

    def _located(self, locations: Any) -> list[str]:
        if not isinstance(locations, (list, tuple)):
            raise BadRequest("Locations come in a list.", fix=_FIX)
        for location in locations:
            self._tree.check(str(location), self._layers)
        return [str(location) for location in locations]

    def _want(self, run: Run, header: Header) -> None:
        """Take over which visits to stop at, counted from this message on."""
        wanted: dict[str, frozenset[int]] = {}
        for provider, visits in header.get("want", ()):
            (location,) = self._located([provider])
            wanted[location] = frozenset(int(visit) for visit in visits)
        run.wanted = wanted
        for location in (*wanted, *self.observed):
            path, is_inside, _ = location.partition(".source.")
            if is_inside and path not in self._modules_sourced:
                self._tree.source(path)
                self._modules_sourced.add(path)

    def _start(self, header: Header, buffers: Buffers) -> bytes | None:
        if len(self._runs) >= _MAX_NESTED:
            raise BadRequest("Module calls are nested too deeply.", fix="Call fewer from within.")
        run = Run(self, header)
        self._want(run, header)
        run.greenlet = greenlet(lambda message: self._execute(run, message))
        self._runs.append(run)
        return self._drive(run, (header, buffers))

    def _at_once(self, op: str, header: Header, buffers: Buffers) -> bytes:
        operations: dict[str, Callable[[Header, Reader], Any]] = {
            "backward": self._backward,
            "weight": self._weight,
            "cacheop": self._cache_operation,
            "release": lambda _header, _reader: None,
        }
        operation = operations.get(op)
        if operation is None:
            raise BadRequest(f"Unknown operation {op[:50]!r}.", fix=_FIX)
        # Beside the ledger: gradients and weights are nobody's shared tensors.
        beside = Loose(self._tree.device)
        reader = Reader(buffers, beside.read, _nothing_else, self._tree.device)
        try:
            value = operation(header, reader)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise _as_mesh_error(error) from error
        writer = Writer(beside.write, _nothing_else)
        return pack({"op": "value", "value": writer.value(value)}, writer.buffers)

    def _backward(self, header: Header, reader: Reader) -> list[torch.Tensor | None]:
        earlier = [int(number) for number in header["earlier"]]
        return self.joints.backward(int(header["joint"]), reader.value(header["grad"]), earlier)

    def _weight(self, header: Header, _reader: Reader) -> torch.Tensor:
        module = self._tree.module(str(header["path"]), self._layers)
        name = str(header["name"])
        weight = {**module._parameters, **module._buffers}.get(name)  # noqa: SLF001
        if weight is None:
            raise BadRequest(f"{header['path']} has no weight {name[:100]}.", fix=_FIX)
        return weight.detach()

    def _cache_operation(self, header: Header, reader: Reader) -> None:
        name = str(header["name"])
        if name not in _CACHE_OPERATIONS:
            raise BadRequest(f"Unknown cache operation {name[:50]!r}.", fix=_FIX)
        cache = self._caches.get(int(header["cache"]))
        if cache is None:
            return
        layers = range(
            self._layers.start - self._tree.layers.start, self._layers.stop - self._tree.layers.start
        )
        arguments = reader.value(header["args"])
        for index in layers:
            getattr(cache.layers[index], name)(*arguments)

    # Forwards

    def _top(self) -> Run:
        if not self._runs:
            raise BadRequest("No forward is under way.", fix=_FIX)
        return self._runs[-1]

    def _drop(self, run: Run) -> None:
        if run in self._runs:
            self._runs.remove(run)

    def _drive(self, run: Run, message: Any) -> bytes | None:
        """Let `run` go on until it has something to say or has had the device for long enough."""
        self._tree.use_attention(run.attention)
        run.since = time.perf_counter()
        run.greenlet.parent = getcurrent()
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(run.grad)
        try:
            with self._tree.reporter.reporting_to(run):
                answer: bytes | None = run.greenlet.switch(message)
        finally:
            torch.set_grad_enabled(before)
            if run.greenlet.dead:
                self._drop(run)
        return answer

    def _pause(self, run: Run) -> None:
        if time.perf_counter() - run.since > _PAUSE_S:
            run.greenlet.parent.switch(None)

    def _execute(self, run: Run, message: tuple[Header, Buffers]) -> bytes:
        lengths: dict[int, list[tuple[int, int]]] = {}
        try:
            lengths = {n: _lengths(cache) for n, cache in self._caches.items()}
            value = self._forward(run, *message)
            return run.reply("done", value, kv=self._growth(lengths))
        except _Aborted:
            return run.reply("aborted", kv=self._growth(lengths))
        except MeshError as error:
            return _refusal(error)
        except Exception as error:  # noqa: BLE001 - whatever model code raises is the job's error
            return _refusal(_as_mesh_error(error))

    def _forward(self, run: Run, header: Header, buffers: Buffers) -> Any:
        reader = self._reader(run, buffers)
        for entry in header["changed"]:
            reader.tensor(entry)
        value = reader.value(header["value"])
        if header["op"] == "call":
            args, kwargs = value
            return self._tree.module(str(header["path"]), self._layers)(*args, **kwargs)
        return self._span(run, header, value)

    def _span(self, run: Run, header: Header, value: Any) -> Any:
        hidden, calls = value
        captured = {str(key): [] for key in header.get("capture") or ()}  # type: dict[str, list[Any]]
        token = None
        if captured:
            self._tree.capture_outputs()
        between = []
        try:
            token = _active_collector.set(captured)
            for number, call in zip(
                range(int(header["start"]), int(header["stop"])), header["calls"], strict=True
            ):
                self._pause(run)
                if number not in self._layers:
                    raise BadRequest(f"Layer {number} is not in this session.", fix=_FIX)
                args, kwargs = calls[call]
                hidden = self._tree.layer(number)(hidden, *args, **kwargs)
                between.append(hidden)
        finally:
            _active_collector.reset(token)
        return hidden, (between[:-1] if header.get("between") else []), captured

    # What the forward runs into

    def show(self, run: Run, provider: str, value: Any) -> Any:
        """Hand `value` to the job and stand still; returns what the job makes of it."""
        if provider.endswith(".fn") and provider[:-3] in self.sourced:
            info = sources.drill(self._tree.reporter, self.sourced, provider[:-3], value)
            self._converse(run, run.reply("drill", provider=provider, info=info))
            return value
        header, reader = self._converse(run, run.reply("hit", value, provider=provider))
        return reader.value(header["value"])

    def _converse(self, run: Run, reply: bytes) -> tuple[Header, Reader]:
        header, buffers = run.greenlet.parent.switch(reply)
        if header["op"] == "abort":
            raise _Aborted
        self._want(run, header)
        reader = self._reader(run, buffers)
        for entry in header["changed"]:
            reader.tensor(entry)
        return header, reader

    def observe(self, run: Run, provider: str, value: Any) -> None:
        """Keep `value` for the next message; hand it over now when that gets large."""
        writer = run.writer
        if not self._observed_with_grad:
            writer = Writer(self.ledger.write_detached, self._other(run), writer.buffers)
        run.observed.append([provider, writer.value(value)])
        if sum(map(len, run.writer.buffers)) > _MAX_OBSERVED_BYTES:
            self._converse(run, run.reply("more"))

    # Values

    def new_writer(self, run: Run) -> Writer:
        """A writer whose tensors are the session's."""
        return Writer(self.ledger.write, self._other(run))

    def _other(self, run: Run) -> Callable[[Any, Path], list[Any]]:
        def other(value: Any, path: Path) -> list[Any]:
            if is_cache(value):
                for number, cache in self._caches.items():
                    if cache is value:
                        return [int(Kind.CACHE), number]
            number = len(run.standing) + 1
            run.standing[path] = (number, value)
            return [int(Kind.KEPT), number, type(value).__name__]

        return other

    def _reader(self, run: Run, buffers: Buffers) -> Reader:
        def other(data: list[Any], path: Path) -> Any:
            if data[0] == Kind.CACHE:
                return self._cache(int(data[1]))
            number, value = run.standing.get(path, (None, None))
            if number != data[1]:
                raise BadRequest(
                    "An object of the model's own was put where it does not belong.",
                    fix="Change the tensors around it and leave it in its place.",
                )
            return value

        return Reader(buffers, self.ledger.read, other, self._tree.device)

    def _cache(self, number: int) -> Any:
        cache = self._caches.get(number)
        if cache is None:
            if len(self._caches) >= _MAX_CACHES:
                raise BadRequest("The job keeps too many caches.", fix="Let go of earlier ones.")
            cache = self._caches[number] = self._tree.new_cache()
        return cache

    def _growth(self, before: dict[int, list[tuple[int, int]]]) -> list[list[int]]:
        """``[cache, first layer, stop, batch, positions added]`` for runs of equal layers."""
        grown: list[list[int]] = []
        first = self._tree.layers.start
        for number, cache in self._caches.items():
            old = before.get(number)
            for index, (batch, length) in enumerate(_lengths(cache)):
                added = length - (old[index][1] if old else 0)
                layer = first + index
                if not added:
                    continue
                if grown and grown[-1][0] == number and grown[-1][2:] == [layer, batch, added]:
                    grown[-1][2] = layer + 1
                else:
                    grown.append([number, layer, layer + 1, batch, added])
        return grown

    def pattern(self, visits: dict[str, int]) -> Any:
        """`visits`, or the number under which the same were sent before."""
        key = tuple(visits.items())
        known = self._patterns.get(key)
        if known is not None:
            return known
        if len(self._patterns) >= _MAX_PATTERNS:
            return [0, [list(item) for item in key]]
        number = self._patterns[key] = len(self._patterns) + 1
        return [number, [list(item) for item in key]]


def _nothing_else(value: Any, _path: Path) -> Any:
    raise BadRequest(f"A {type(value).__name__} cannot be sent here.", fix=_FIX)


def _lengths(cache: Any) -> list[tuple[int, int]]:
    return [
        (layer.keys.shape[0] if layer.is_initialized else 0, int(layer.get_seq_length()))
        for layer in cache.layers
    ]


def _refusal(error: MeshError) -> bytes:
    return pack({"op": "error", "error": error.to_dict()}, [])


def _as_mesh_error(error: BaseException) -> MeshError:
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceFailed("The device has no memory left.", fix="Use a shorter input.")
    return BadRequest(
        f"{type(error).__name__}: {error!s:.2000}",
        fix="The model's own code raised this on the machine that holds the layer.",
    )
