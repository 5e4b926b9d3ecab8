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
from dataclasses import dataclass
from typing import Any

import torch
from nnsight.util import apply
from transformers.utils.output_capturing import _active_collector

from mesh.errors import BadRequest, DeviceFailed, MeshError
from mesh.shard.device import is_lost
from mesh.shard.taps import sources
from mesh.shard.taps.caches import Lengths, TapCaches
from mesh.shard.taps.codec import Buffers, Kind, Path, Reader, Writer, is_cache, pack, unpack
from mesh.shard.taps.joints import ShardJoints
from mesh.shard.taps.ledger import Loose, ShardLedger
from mesh.shard.taps.run import Header, Patterns, Request, Run
from mesh.shard.taps.tree import SpanTree
from mesh.types import LayerRange

logger = logging.getLogger(__name__)

_FIX = "Run the same hearthnet version on both machines."
_MAX_NESTED = 16
_MAX_OBSERVED_BYTES = 16 << 20
_SCORE_BYTES = 12
"""What eager attention has of one score at once, in fp32: it, it masked, its softmax."""
_KEPT_SCORE_BYTES = 8
"""What of that autograd keeps of every layer."""
_MALFORMED = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""What reading a message that is not what it should be raises."""


@dataclass(frozen=True, slots=True)
class TapLimits:
    """Bounds of one session; `positions` are rows, of one forward and of all its caches."""

    tensor_bytes: int = 4 << 30
    positions: int = 32768


class _Aborted(BaseException):
    """The job gave up the forward under way."""


class TapSession:
    """What a job can do with some layers of a shard; a `mesh.shard.taps.run.Host`.

    `exchange` and `go_on` return the answer, or None when the device should be given to others
    before `go_on` is called again. Everything is called on one thread.
    """

    def __init__(self, tree: SpanTree, layers: LayerRange, limits: TapLimits) -> None:
        self._tree = tree
        self._layers = layers
        self._limits = limits
        self._joints = ShardJoints()
        self.ledger = ShardLedger(tree.device, limits.tensor_bytes, self._joints)
        self.patterns = Patterns()
        self.sourced: dict[str, Any] = {}
        self.observed: frozenset[str] = frozenset()
        self._observed_with_grad = False
        self._modules_sourced: set[str] = set()
        self._caches = TapCaches(tree, layers)
        self._runs: list[Run] = []

    def exchange(self, message: bytes | memoryview) -> bytes | None:
        """Do what `message` asks. Errors are answers, too."""
        try:
            header, buffers = unpack(message)
            self._prepare(header)
            op = header["op"]
            if op in ("span", "call"):
                return self._start(header, buffers)
            if op in ("resume", "abort"):
                return self._drive(self._top(), (header, buffers))
            return self._at_once(op, header, buffers)
        except MeshError as error:
            return _refusal(error)
        except _MALFORMED as error:
            return _refusal(_malformed(error))

    def go_on(self) -> bytes | None:
        """Continue after a pause."""
        return self._drive(self._top(), None)

    def close(self) -> None:
        """Free everything; forwards under way are unwound."""
        while self._runs:
            self._runs.pop().unwind()
        for path in self._modules_sourced:
            self._tree.unsource(path)
        self._modules_sourced.clear()
        self._release()
        self._joints.forget()
        self._caches.clear()

    # Requests

    def _prepare(self, header: Header) -> None:
        if header.get("release"):
            self._release()
        self._joints.drop(header.get("unreachable", []))
        for number in header.get("free", ()):
            self._caches.free(number)
        if header.get("obs") is not None:
            self.observed = frozenset(self._located(header["obs"]))
            self._observed_with_grad = bool(header.get("obs_grad"))
        for base in self._located(header.get("sourced", [])):
            self.sourced.setdefault(base, None)

    def _release(self) -> None:
        self.ledger.clear()
        self._joints.clear()
        self.sourced.clear()
        self.observed = frozenset()

    def _located(self, locations: list[Any]) -> list[str]:
        for location in locations:
            self._tree.check(location, self._layers)
        return locations

    def _want(self, run: Run, header: Header) -> None:
        """Take over which visits to stop at, counted from this message on."""
        wanted = {location: frozenset(map(int, visits)) for location, visits in header["want"]}
        run.wanted = dict(zip(self._located(list(wanted)), wanted.values(), strict=True))
        for location in (*wanted, *self.observed):
            path, is_inside, _ = location.partition(".source.")
            if is_inside and path not in self._modules_sourced:
                self._tree.source(path)
                self._modules_sourced.add(path)

    def _start(self, header: Header, buffers: Buffers) -> bytes | None:
        if len(self._runs) >= _MAX_NESTED:
            raise BadRequest("Module calls are nested too deeply.", fix="Call fewer from within.")
        run = Run(self, header, self._execute)
        self._want(run, header)
        self._runs.append(run)
        return self._drive(run, (header, buffers))

    def _top(self) -> Run:
        if not self._runs:
            raise BadRequest("No forward is under way.", fix=_FIX)
        return self._runs[-1]

    def _drive(self, run: Run, request: Request | None) -> bytes | None:
        try:
            return run.go_on(self._tree, request)
        finally:
            if run.is_over and run in self._runs:
                self._runs.remove(run)

    def _at_once(self, op: str, header: Header, buffers: Buffers) -> bytes:
        operations: dict[str, Callable[[Header, Reader], Any]] = {
            "backward": self._backward,
            "weight": self._weight,
            "cacheop": self._cache_operation,
            "kv": self._cache_contents,
        }
        operation = operations.get(op)
        if operation is None:
            raise BadRequest(f"Unknown operation {op[:50]!r}.", fix=_FIX)
        # Beside the ledger: gradients and weights are nobody's shared tensors.
        loose = Loose(self._tree.device)
        reader = Reader(buffers, loose.read, _nothing_else, self._tree.device)
        try:
            value = operation(header, reader)
        except RuntimeError as error:
            raise _raised(error) from error
        writer = Writer(loose.write, _nothing_else)
        return pack({"op": "value", "value": writer.value(value)}, writer.buffers)

    def _backward(self, header: Header, reader: Reader) -> list[torch.Tensor | None]:
        return self._joints.backward(
            header["joint"], reader.value(header["grad"]), header["earlier"]
        )

    def _weight(self, header: Header, _reader: Reader) -> torch.Tensor:
        module = self._tree.module(header["path"], self._layers)
        name = str(header["name"])
        weight = {**module._parameters, **module._buffers}.get(name)
        if weight is None:
            raise BadRequest(f"{header['path']} has no weight {name[:100]}.", fix=_FIX)
        return weight.detach()

    def _cache_operation(self, header: Header, reader: Reader) -> None:
        operation = header["cache"], header["name"], reader.value(header["args"])
        self._require_positions(self._caches.positions_after(*operation))
        self._caches.operate(*operation)

    def _cache_contents(self, header: Header, _reader: Reader) -> list[torch.Tensor]:
        return self._caches.contents(header["cache"], header["layer"])

    # Forwards, inside their greenlet

    def _execute(self, run: Run, request: Request) -> bytes:
        lengths = self._caches.lengths()
        try:
            return self._done(run, self._forward(run, *request), lengths)
        except _Aborted:
            return run.message("aborted", kv=self._caches.growth(lengths))
        except MeshError as error:
            return _refusal(error)
        except Exception as error:  # noqa: BLE001 - whatever model code raises is the job's error
            return _refusal(_raised(error))

    def _forward(self, run: Run, header: Header, buffers: Buffers) -> Any:
        reader = self._reader(run, buffers)
        self.ledger.read_changed(header["changed"], reader)
        value = reader.value(header["value"])
        self._check_size(run, value)
        if header["op"] == "call":
            args, kwargs = value
            return self._tree.module(header["path"], self._layers)(*args, **kwargs)
        return self._span(run, header, value)

    def _done(self, run: Run, value: Any, lengths: Lengths) -> bytes:
        answer = run.message("done", value, kv=self._caches.growth(lengths))
        kept = self._joints.kept_bytes(self._tree.storages) if run.grad else 0
        if kept > self._limits.tensor_bytes:
            raise DeviceFailed(
                f"The graphs for gradients keep {kept} bytes on a shard, more than the"
                f" {self._limits.tensor_bytes} that one job may.",
                fix="Go back through fewer or shorter prompts in one job.",
            )
        return answer

    def _check_size(self, run: Run, value: Any) -> None:
        """Raise BadRequest when a forward over `value` would occupy the device too much."""
        rows, pairs, with_history = _extent(value)
        self._require_positions(rows + self._caches.positions())
        if run.attention != "eager":
            return
        kept = _KEPT_SCORE_BYTES * (len(self._layers) - 1) if run.grad and with_history else 0
        scores = (pairs + rows * self._caches.longest()) * self._tree.heads
        wanted = scores * (_SCORE_BYTES + kept)
        if wanted > self._limits.tensor_bytes:
            raise BadRequest(
                f"The scores of eager attention would take {wanted} bytes on a shard, more than the"
                f" {self._limits.tensor_bytes} that one job may (host.tap_memory_mb there).",
                fix='Use attn_implementation="sdpa", or fewer or shorter prompts in one trace.',
            )

    def _require_positions(self, wanted: int) -> None:
        if wanted > self._limits.positions:
            raise BadRequest(
                f"The trace asks a shard for {wanted} positions at once, cached ones included;"
                f" it takes {self._limits.positions}.",
                fix="Use fewer or shorter prompts in one trace.",
            )

    def _span(self, run: Run, header: Header, value: Any) -> Any:
        """Hidden states after the layers, between them, and what transformers collects inside."""
        hidden, calls = value
        captured: dict[str, list[Any]] = {str(key): [] for key in header["capture"]}
        if captured:
            self._tree.capture_outputs()
        between = []
        token = _active_collector.set(captured)
        try:
            numbers = range(header["start"], header["stop"])
            for number, call in zip(numbers, header["calls"], strict=True):
                run.breathe()
                self._tree.check(str(number), self._layers)
                args, kwargs = calls[call]
                hidden = self._tree.layer(number)(hidden, *args, **kwargs)
                between.append(hidden)
        finally:
            _active_collector.reset(token)
        return hidden, (between[:-1] if header["between"] else []), captured

    def show(self, run: Run, provider: str, value: Any) -> Any:
        """See `Host`."""
        if provider.endswith(".fn") and provider[:-3] in self.sourced:
            info = sources.drill(self._tree.reporter, self.sourced, provider[:-3], value)
            self._converse(run, run.message("drill", provider=provider, info=info))
            return value
        before = _extent(value)
        header, reader = self._converse(run, run.message("hit", value, provider=provider))
        answer = reader.value(header["value"])
        if any(now > then for now, then in zip(_extent(answer), before, strict=True)):
            self._check_size(run, answer)
        return answer

    def observe(self, run: Run, provider: str, value: Any) -> None:
        """See `Host`; handed over with the next message, or now when there is much of it."""
        writer = run.writer
        if not self._observed_with_grad:
            writer = Writer(self.ledger.write_detached, self._other(run), writer.buffers)
        run.observed.append([provider, writer.value(value)])
        if sum(map(len, run.writer.buffers)) > _MAX_OBSERVED_BYTES:
            self._converse(run, run.message("more"))

    def _converse(self, run: Run, message: bytes) -> tuple[Header, Reader]:
        header, buffers = run.converse(message)
        if header["op"] == "abort":
            raise _Aborted
        self._want(run, header)
        reader = self._reader(run, buffers)
        self.ledger.read_changed(header["changed"], reader)
        return header, reader

    # Values

    def new_writer(self, run: Run) -> Writer:
        """See `Host`."""
        return Writer(self.ledger.write, self._other(run))

    def _other(self, run: Run) -> Callable[[Any, Path], list[Any]]:
        def other(value: Any, path: Path) -> list[Any]:
            number = self._caches.number_of(value) if is_cache(value) else None
            if number is not None:
                return [int(Kind.CACHE), number]
            number = len(run.standing) + 1
            run.standing[path] = (number, value)
            return [int(Kind.KEPT), number, type(value).__name__]

        return other

    def _reader(self, run: Run, buffers: Buffers) -> Reader:
        def other(data: list[Any], path: Path) -> Any:
            if data[0] == Kind.CACHE:
                return self._caches.get(data[1])
            # Only where it stood: elsewhere its methods would be called for a tensor's.
            number, value = run.standing.get(path, (None, None))
            if number != data[1]:
                raise BadRequest(
                    "An object of the model's own was put where it does not belong.",
                    fix="Change the tensors around it and leave it in its place.",
                )
            return value

        return Reader(buffers, self.ledger.read, other, self._tree.device)


def _extent(value: Any) -> tuple[int, int, bool]:
    """How many rows the largest tensor in `value` has, how many pairs of positions, and whether
    any has a gradient."""
    rows, pairs, with_history = [0], [0], [False]

    def measure(tensor: torch.Tensor) -> None:
        rows.append(tensor.numel() // max(1, tensor.shape[-1]) if tensor.dim() else 1)
        if tensor.dim() > 2:
            pairs.append(rows[-1] * tensor.shape[-2])
        with_history.append(tensor.requires_grad)

    apply(value, measure, torch.Tensor)
    return max(rows), max(pairs), any(with_history)


def _nothing_else(value: Any, _path: Path) -> Any:
    raise BadRequest(f"A {type(value).__name__} cannot be sent here.", fix=_FIX)


def _refusal(error: MeshError) -> bytes:
    return pack({"op": "error", "error": error.to_dict()}, [])


def _malformed(error: Exception) -> MeshError:
    return BadRequest(f"An intervention message is malformed: {error!r:.200}.", fix=_FIX)


def _raised(error: Exception) -> MeshError:
    if is_lost(error):
        raise error  # it is not about this job alone: `DeviceQueue` acts upon it
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceFailed("The device has no memory left.", fix="Use a shorter input.")
    return BadRequest(
        f"{type(error).__name__}: {error!s:.2000}",
        fix="The model's own code raised this on the machine that holds the layer.",
    )
