"""Remote decoder layers inside an ordinary Hugging Face model.

The model's own loop calls its layers one by one. The first layer of a run of layers on one hop
gives back a stand-in (a tensor with shape and no data), which the next ones recognise as theirs;
the last one asks the hop to run all of them. So nothing is known here about any architecture: what
the loop passes to its layers, masks, positions, caches, just travels. Where the operations of the
loop are traced, the job has its layers in another order, or the loop takes apart what a layer gives
(a tuple), each layer asks for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from greenlet import getcurrent
from nnsight.intervention.source import STATE, Controller
from torch import nn
from torch._guards import detect_fake_mode
from transformers.utils.output_capturing import _active_collector

from mesh.errors import BadRequest
from mesh.interventions.caches import Caches
from mesh.interventions.hooks import Hooks, SpanInterleaver
from mesh.interventions.hop import JobHop
from mesh.interventions.weights import KEPT_BYTES, RemoteTensors, RemoteWeights
from mesh.shard.taps.messages import TapCall, TapSpan

Log = Callable[[str], None]


class _StandIn(torch.Tensor):
    """What a layer gives that is not asked for yet: a shape. Whoever takes it apart gets the parts
    of what the layer does give."""

    in_full: Callable[[_StandIn], Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.in_full(self))

    def __getitem__(self, key: Any) -> Any:
        return self.in_full(self)[key]


@dataclass(slots=True)
class _Deferred:
    """Layers called so far of a run that is not asked for yet."""

    hop: JobHop
    hidden: torch.Tensor
    start: int
    waits: bool
    """Whether there will be more."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    stand_ins: list[_StandIn] = field(default_factory=list)

    @property
    def next(self) -> int:
        return self.start + len(self.calls)


class RemoteSpans:
    """The remote layers of one model in one job."""

    def __init__(
        self, model: nn.Module, layers: str, interleaver: SpanInterleaver, hops: Sequence[JobHop],
        log: Log, *, kept_bytes: int = KEPT_BYTES,
    ) -> None:  # fmt: skip
        """`layers` names the list of decoder layers in `model`; nnsight has wrapped it already.
        So many bytes of weights that were read are kept for the next time."""
        self._model: Any = model
        self._interleaver = interleaver
        self._hops = hops
        self._log = log
        self._layers = list(cast("Iterable[nn.Module]", model.get_submodule(layers)))
        loop, _, self._list_name = layers.rpartition(".")
        self._loop: Any = model.get_submodule(loop)
        self._hop_of = {
            number: hop for hop in hops for number in range(hop.layers.start, hop.layers.stop)
        }
        self._caches = Caches(self._hop_of)
        self._hooks = Hooks(interleaver, f"model.{layers}", self._caches)
        self._hooks.attention = lambda: str(self._model.config._attn_implementation)
        self._hooks.require_as_sent = self._require_as_sent
        self._deferred: _Deferred | None = None
        self._weights = RemoteWeights(self._hop_of, kept_bytes)
        for number in self._hop_of:
            self._take_over(number)
        interleaver.on_end = self._end

    @property
    def is_tracing(self) -> bool:
        """Whether the model's own loop is running under the interleaver."""
        return bool(self._interleaver.interleaving)

    def run_layer(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A layer as the model's own loop calls it."""
        if self._deferred is None:
            self._take_back_changed(range(number, self._hop_of[number].layers.stop))
            if number not in self._hop_of:
                return self._layers[number].forward(*args, **kwargs)
        hop, deferred = self._hop_of[number], self._deferred
        hidden, rest = args[0], args[1:]
        if deferred is None and not isinstance(hidden, torch.Tensor):
            # Of the job's code: the layer says what it misses in it.
            return self.call(self._layers[number], str(number), number, args, kwargs)
        if deferred is None:
            deferred = self._deferred = _Deferred(hop, hidden, number, self._calls_in_order())
        elif number != deferred.next or hidden is not deferred.stand_ins[-1]:
            self._deferred = None
            raise _between_layers(self._model)
        if hidden.is_meta and not deferred.calls:
            self._deferred = None
            raise _between_layers(self._model)
        deferred.calls.append((rest, kwargs))
        if deferred.waits and self._hop_of.get(number + 1) is hop:
            bare = torch.empty_like(deferred.hidden, device="meta", requires_grad=False)
            deferred.stand_ins.append(stand_in := bare.as_subclass(_StandIn))
            stand_in.in_full = self.in_full
            return stand_in
        self._deferred = None
        return self._run(deferred)

    def in_full(self, stand_in: _StandIn) -> Any:
        """What the layer that gave the latest stand-in gives; it is asked for now.

        Raises BadRequest for another stand-in.
        """
        deferred = self._deferred
        self._deferred = None
        if deferred is None or stand_in is not deferred.stand_ins[-1]:
            raise _between_layers(self._model)
        return self._run(deferred)

    def call(
        self,
        module: nn.Module,
        path: str,
        layer: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """One module on its own, wherever it is called from."""
        self._take_back_changed(range(layer, layer + 1))
        if layer not in self._hop_of:
            return module.forward(*args, **kwargs)
        return self._hooks.run(self._hop_of[layer], TapCall(path=path), (args, kwargs))

    def _run(self, deferred: _Deferred) -> Any:
        groups: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        known: dict[Any, int] = {}
        calls = []
        for rest, kwargs in deferred.calls:
            key = (tuple(map(id, rest)), tuple((k, id(v)) for k, v in kwargs.items()))
            if key not in known:
                known[key] = len(groups)
                groups.append((rest, kwargs))
            calls.append(known[key])
        collector = _active_collector.get() or {}
        request = TapSpan(
            start=deferred.start,
            stop=deferred.next,
            calls=calls,
            between="hidden_states" in collector,
            capture=[k for k in collector if k != "hidden_states" and not k.startswith("_")],
        )
        hidden, between, captured = self._hooks.run(
            deferred.hop, request, (deferred.hidden, groups)
        )
        if "hidden_states" in collector:
            last = hidden[0] if isinstance(hidden, tuple) else hidden
            actual = dict(zip(map(id, deferred.stand_ins), [*between, last], strict=False))
            collector["hidden_states"][:] = [
                actual.get(id(state), state) for state in collector["hidden_states"]
            ]
        for key, values in captured.items():
            collector[key].extend(values)
        return hidden

    def _calls_in_order(self) -> bool:
        """Whether the loop calls every layer after the one before it, and nobody looks between."""
        if self._loop.__dict__[STATE].sourced:
            return False
        count = self._model.config.get_text_config().num_hidden_layers
        return (
            count == len(self._layers)
            and list(self._loop._modules[self._list_name]) == self._layers
        )

    # A trace

    def _take_back_changed(self, numbers: range) -> None:
        """Layers whose modules or weights the job has changed run in the job from now on."""
        for number in numbers:
            if number in self._hop_of and self._weights.is_changed(number):
                self._run_here(number)

    def _require_as_sent(self, first: int, stop: int) -> None:
        """Raise BadRequest when user code changed one of these layers while their hop ran them."""
        for number in range(first, stop):
            if number not in self._hop_of or self._weights.is_changed(number):
                raise BadRequest(
                    f"Layer {number} was changed while the machine that holds it was running it.",
                    fix="Change it before the trace, or before the trace reads its first value.",
                )

    def _end(self) -> None:
        self._deferred = None
        for hop in self._hops:
            hop.release(cached=self._caches.are_there)

    # Taking layers over, and giving them back to the job

    def _take_over(self, number: int) -> None:
        layer = self._layers[number]
        for name, module in layer.named_modules():
            path = f"{number}.{name}" if name else str(number)
            state = module.__dict__[STATE]
            module.__dict__["forward"] = RemoteForward(module, state, self, path, number)
            tables = {"_parameters": module._parameters, "_buffers": _as_elsewhere(module)}
            for table, stubs in tables.items():
                module.__dict__[table] = RemoteTensors(stubs, self._weights, path, number)
        self._weights.remember(number, layer)

    def _run_here(self, number: int) -> None:
        size = self._weights.pull(number)
        self._caches.take_back(number)
        del self._hop_of[number]
        for module in self._weights.modules(number):  # also those that others have replaced
            if isinstance(module.__dict__.get("forward"), RemoteForward):
                module.__dict__["forward"] = Controller(module, module.__dict__[STATE])
        self._log(
            f"layer {number} runs inside this job: its weights ({size / 2**20:.1f} MiB) were"
            " fetched because the job changes it or wants gradients of its weights"
        )


class RemoteForward(Controller):  # type: ignore[misc]  # nnsight is untyped here
    """The forward of a module that is somewhere else. A Controller, so that nnsight accepts it."""

    def __init__(
        self, module: nn.Module, state: Any, spans: RemoteSpans, path: str, layer: int
    ) -> None:
        super().__init__(module, state)
        self._spans = spans
        self._path = path
        self._layer = layer
        self._is_layer = path == str(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if detect_fake_mode() is not None:
            raise BadRequest(
                "scan() does not see inside layers on other machines.",
                fix="Call scan() at the client, outside the remote session.",
            )
        # In a worker's greenlet it is user code that calls, not the model's own loop.
        by_user = getattr(getcurrent(), "mediator", None) is not None
        if self._is_layer and args and not by_user and self._spans.is_tracing:
            return self._spans.run_layer(self._layer, args, kwargs)
        return self._spans.call(self.module_ref(), self._path, self._layer, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        """A copy of the module is the job's own: it runs here, with copies of the weights."""
        return Controller(self.module_ref(), self.state).__deepcopy__(memo)


def _as_elsewhere(module: nn.Module) -> dict[str, Any]:
    """Its buffers; those of a checkpoint, which has not been read here, as stubs."""
    # What is in none is made from the config here as there.
    made_here = module._non_persistent_buffers_set
    return {
        name: buffer
        if buffer is None or name in made_here
        else torch.empty_like(buffer, device="meta")
        for name, buffer in dict.items(module._buffers)
    }


def _between_layers(model: Any) -> BadRequest:
    return BadRequest(
        f"{type(model).__name__} computes something between its layers.",
        fix="Trace a model whose layers follow one another directly; this one only chats.",
    )
