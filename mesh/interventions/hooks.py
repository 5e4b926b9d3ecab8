"""nnsight's interleaver and the shards' forwards, in step.

The interleaver, with the user's code, is here; the modules run there. With every message a hop
learns which visits of which locations somebody waits for; at each of them it stands still, shows
the value, and gets it back. What it passed without stopping it counts, so that occurrences and
out-of-order errors come out as on one machine.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from nnsight.intervention.interleaver import EarlyStopException, Interleaver
from nnsight.intervention.source import Compiled, bind
from torch import nn
from torch.autograd import forward_ad

from mesh.errors import BadFrame, BadRequest, MeshError
from mesh.interventions.hop import CPU, JobHop
from mesh.shard.taps.codec import Buffers, EncodedKind, Path, Reader, Staying, Writer, is_cache
from mesh.shard.taps.messages import (
    Passed,
    TapAbort,
    TapDone,
    TapDrill,
    TapForward,
    TapHit,
    TapRefusal,
    TapResume,
    TapSource,
    TapSpan,
    TapStop,
    TapValue,
)

if TYPE_CHECKING:
    from mesh.interventions.caches import Caches


_MOST_NAMED = 8
"""Lines that an error names."""
_NOT_THEIRS = ("nnsight.", "mesh.")
_NO_FAILURES = (MeshError, EarlyStopException)
"""What ends a trace, and is not the model's."""
_BY_USER_CODE = "__intervention_tb__"
"""What nnsight puts on an error that user code raised, whose traceback shows its own line."""


class SpanInterleaver(Interleaver):  # type: ignore[misc]  # nnsight is untyped here
    """nnsight's interleaver, which says when a trace ends, and of what the model itself raises, or
    cannot be given, at which lines user code waits for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.on_end: Callable[[], None] = lambda: None

    def __exit__(self, kind: Any, raised: Any, frames: Any) -> bool:
        is_failure = isinstance(raised, BadRequest) or (
            isinstance(raised, Exception) and not isinstance(raised, _NO_FAILURES)
        )
        if is_failure and not hasattr(raised, _BY_USER_CODE):
            for mediator in self.mediators[:_MOST_NAMED]:
                if line := _waits_at(mediator):
                    raised.add_note(f"Your code was waiting at {line}")
        return bool(super().__exit__(kind, raised, frames))

    def cancel(self) -> None:
        """End the trace and tell who listens."""
        super().cancel()
        self.on_end()


class RemoteLayerError(RuntimeError):
    """What the model's code raised on the machine that holds the layer."""


class Hooks:
    """Speaks with hops on behalf of one interleaver."""

    def __init__(self, interleaver: Interleaver, prefix: str, caches: Caches) -> None:
        """`prefix` is where the layers are in nnsight's names: ``model.model.layers``."""
        self._interleaver = interleaver
        self._prefix = f"{prefix}."
        self._caches = caches
        self._routes: tuple[Any, dict[JobHop, frozenset[str]]] = (None, {})
        self._observed_with_grad = False
        self.attention: Callable[[], str] = lambda: "sdpa"
        self.require_as_sent: Callable[[int, int], None] = lambda _first, _stop: None
        """Raises BadRequest when a layer from `first` up to `stop` is not what its hop computed."""

    def run(self, hop: JobHop, request: TapForward, value: Any) -> Any:
        """Have `hop` run something over `value`; returns what comes out at its end.

        Raises RemoteLayerError for what model code raises there, MeshError when the hop refuses or
        is gone, and whatever user code raises at a point inside.
        """
        interleaver = self._interleaver
        watching = bool(interleaver.interleaving and interleaver.busy)
        _refuse_modes()
        self._caches.require_unchanged()
        request.watch, request.attn = watching, self.attention()
        first_shown: int | None = None
        turn: TapForward | TapResume = request
        buffers = self._fill(hop, turn, value, watching=watching)
        while True:
            reply, received = self._exchange(hop, turn, buffers)
            self._count(hop, reply.visits)
            reader = self._reader(hop, received)
            if isinstance(reply, TapDone):
                self._observed(hop, reply, reader)
                if first_shown is not None:
                    stop = request.stop if isinstance(request, TapSpan) else first_shown + 1
                    self.require_as_sent(first_shown, stop)
                return reader.value(reply.value)
            if first_shown is None and isinstance(reply, TapHit | TapDrill):
                first_shown = int(reply.provider.partition(".")[0])
            try:
                answer = self._serve(hop, reply, reader)
                _refuse_modes()
                self._caches.require_unchanged()
            except BaseException:
                self._abort(hop)
                raise
            turn = TapResume()
            buffers = self._fill(hop, turn, answer, watching=watching)

    def _fill(
        self, hop: JobHop, turn: TapForward | TapResume, value: Any, *, watching: bool
    ) -> Buffers:
        """Put into a message what goes with `value`, and what is wanted; the tensors of that."""
        writer = Writer(hop.tensors.write, self._other)
        turn.changed = hop.tensors.write_changed(writer.buffers)
        turn.value = writer.value(value)
        turn.grad = torch.is_grad_enabled()
        if watching:
            self._want(hop, turn)
        return writer.buffers

    def _exchange(
        self, hop: JobHop, turn: TapForward | TapResume, buffers: Buffers
    ) -> tuple[TapStop, Buffers]:
        try:
            reply, received = hop.exchange(turn, buffers, self._heed)
        except BadRequest as error:
            raise RemoteLayerError(str(error)) from None
        return _of_a_forward(reply), received

    def _abort(self, hop: JobHop) -> None:
        try:
            reply, _ = hop.exchange(TapAbort(grad=torch.is_grad_enabled()), [], self._heed)
        except MeshError:
            return  # it has already given up; the user's error is the one to show
        self._count(hop, _of_a_forward(reply).visits)

    def _heed(self, reply: TapStop | TapRefusal) -> None:
        """What a hop did before it answered, whatever that is, has been done."""
        if reply.grad is not None:
            # What either end does to the grad mode is there for the other, as in one thread.
            torch.set_grad_enabled(reply.grad)
        self._caches.grow(reply.kv)

    # What the interleaver wants of a hop

    def _want(self, hop: JobHop, turn: TapForward | TapResume) -> None:
        interleaver = self._interleaver
        wanted: dict[str, list[int]] = {}
        for mediator in interleaver.mediators:
            pending = mediator.pending
            if pending is None or pending.provider is None:
                continue
            location = self._within(hop, pending.provider)
            passing = pending.iteration - mediator.occurrence(pending.provider)
            if location is not None and passing >= 0:
                wanted.setdefault(location, []).append(passing)
        sourced = (self._within(hop, base) for base in interleaver.sourced)
        turn.want = list(wanted.items())
        turn.obs = hop.new_subscriptions(self._observers(hop))
        turn.obs_grad = self._observed_with_grad
        turn.sourced = hop.new_sources(frozenset(base for base in sourced if base is not None))

    def _observers(self, hop: JobHop) -> frozenset[str]:
        observers = self._interleaver.observers
        if self._routes[0] is not observers:
            self._routes = (observers, {})
            self._observed_with_grad = any(
                not cache.detach for caches in observers.values() for _, cache, _ in caches
            )
        routes = self._routes[1]
        if hop not in routes:
            mine = (self._within(hop, location) for location in observers)
            routes[hop] = frozenset(location for location in mine if location is not None)
        return routes[hop]

    def _within(self, hop: JobHop, provider: str) -> str | None:
        """`provider` as the hop names it, None when it is not the hop's."""
        if not provider.startswith(self._prefix):
            return None
        location = provider[len(self._prefix) :]
        number = location.partition(".")[0]
        return location if number.isdecimal() and int(number) in hop.layers else None

    # What a hop says

    def _count(self, hop: JobHop, pattern: int | tuple[int, list[Passed]]) -> None:
        counts = self._interleaver.counts
        for location, visits in hop.visits(pattern):
            provider = self._prefix + location
            counts[provider] = counts.get(provider, 0) + visits

    def _observed(self, hop: JobHop, reply: TapStop, reader: Reader) -> None:
        for location, value in reply.observed:
            self._interleaver.handle(self._prefix + location, reader.value(value))
        hop.tensors.read_changed(reply.changed, reader)

    def _serve(self, hop: JobHop, reply: TapStop, reader: Reader) -> Any:
        self._observed(hop, reply, reader)
        if isinstance(reply, TapHit):
            value = reader.value(reply.value)
            return self._interleaver.handle(self._prefix + reply.provider, value)
        if isinstance(reply, TapDrill):
            self._drill(self._prefix + reply.provider, reply.info)
        return None

    def _drill(self, provider: str, info: TapSource) -> None:
        """Let whoever waits to open up an operation have what there is to see of it."""
        function: Any = len  # has no source, which is what nnsight then says
        if info.kind == "function":
            compiled = Compiled(None, tuple(info.names), dict(info.lines), info.source)
            self._interleaver.sourced[provider.removesuffix(".fn")] = (None, compiled)
        elif info.kind == "module":
            function = nn.Identity()
        elif info.kind == "bind":
            function = bind
        self._interleaver.handle(provider, function)

    # Values that are no tensors

    def _other(self, value: Any, _path: Path) -> list[Any]:
        if is_cache(value):
            return [int(EncodedKind.CACHE), self._caches.number_of(value)]
        if isinstance(value, Staying):
            return [int(EncodedKind.KEPT), value.number]
        raise BadRequest(
            f"A {type(value).__name__} cannot be sent to the machine that holds the layer.",
            fix="Use tensors, numbers, text and containers of them.",
        )

    def _reader(self, hop: JobHop, buffers: Buffers) -> Reader:
        def other(data: list[Any], _path: Path) -> Any:
            if data[0] == EncodedKind.CACHE:
                return self._caches.by_number(int(data[1]))
            return Staying.of(int(data[1]), str(data[2]))

        return Reader(buffers, hop.tensors.read, other, CPU)


def _waits_at(mediator: Any) -> str:
    """The line of user code; an empty string where it does not wait."""
    frame = mediator.worker.gr_frame if mediator.alive else None
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_NOT_THEIRS):
        frame = frame.f_back
    if frame is None:
        return ""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"line {frame.f_lineno}: {line}"


def _of_a_forward(reply: TapStop | TapValue) -> TapStop:
    if isinstance(reply, TapValue):
        raise BadFrame("A hop answers what it was not asked.", fix="Update that machine.")
    return reply


def _refuse_modes() -> None:
    """Raise BadRequest under a mode of torch that the shards do not share."""
    if torch.is_inference_mode_enabled():
        raise BadRequest(
            "torch.inference_mode() does not reach layers on other machines.",
            fix="Use torch.no_grad().",
        )
    if torch.is_autocast_enabled("cpu"):
        raise BadRequest(
            "torch.autocast() does not reach layers on other machines.",
            fix="Leave it out: the layers compute in the dtype they are served in.",
        )
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise BadRequest(
            "What torch.func and torch.autograd.forward_ad do does not reach layers on other"
            " machines.",
            fix="Use backward() or torch.autograd.grad, and a batch in the place of vmap.",
        )
