"""A loaded span as plain Hugging Face modules that nnsight's controllers report from.

The weights are those of the span that serves chat, the modules are not: chat never passes a
controller. One tree serves every intervention session of a shard, one at a time; who is at it is
`current`. Locations are named from the layer on, by its number in the whole model:
``5.mlp.output``.
"""

from __future__ import annotations

import linecache
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any, Protocol

import torch
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.interleaver import Interleaver
from nnsight.intervention.source import STATE, SourceNotAvailable, install_source
from torch import nn
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from mesh.errors import BadRequest
from mesh.models.load import LoadedSpan
from mesh.models.span_cache import SpanCache
from mesh.shard.belongings import Belonging, belongings
from mesh.shard.protection import Protection
from mesh.shard.taps.codec import storage_of
from mesh.shard.views import layers_of
from mesh.shard.weight_check import WeightCheck
from mesh.types import LayerRange

ATTENTION = frozenset({"eager", "sdpa"})
_FIX = "Run the same hearthnet and transformers versions on both machines."


class Visitor(Protocol):
    """What a forward reports to."""

    watching: bool
    sourced: dict[str, Any]

    def reached(self, provider: str, value: Any) -> Any:
        """The model is at this location with this value; it goes on with what is returned."""


class _Reporter(Interleaver):  # type: ignore[misc]  # nnsight is untyped here
    """nnsight's controllers call `handle`; it goes to whoever runs the tree."""

    def __init__(self) -> None:
        super().__init__()
        self.visitor: Visitor | None = None

    def handle(self, provider: str, value: Any) -> Any:
        """A location was passed with this value."""
        if self.visitor is None:
            return value
        return self.visitor.reached(provider, value)

    @contextmanager
    def reporting_to(self, visitor: Visitor) -> Iterator[None]:
        """Report to `visitor` meanwhile."""
        self.visitor, self.sourced = visitor, visitor.sourced
        self.interleaving = self.busy = visitor.watching
        try:
            yield
        finally:
            self.visitor, self.sourced = None, {}
            self.interleaving = self.busy = False


class SpanTree:
    """The layers of one shard, instrumented. Not thread-safe."""

    def __init__(self, loaded: LoadedSpan, device: torch.device) -> None:
        """`loaded` is used by nobody else; only its weights may be shared."""
        self._protection = Protection(loaded.module, loaded.pages)
        self.loaded = loaded
        self.layers = loaded.layers
        self.device = device
        self.reporter = _Reporter()
        self._model: Any = loaded.module
        self.config = loaded.config
        self._layers: dict[int, nn.Module] = dict(
            enumerate(layers_of(self._model), self.layers.start)
        )
        self._weights: dict[int, list[Belonging]] = defaultdict(list)
        for belonging in belongings(self._model):
            if address := _address(belonging.tensor):
                self._weights[address].append(belonging)
        self.storages = frozenset(self._weights)
        """The addresses of the memory that belongs to the model."""
        self._replaced: list[Belonging] = []
        self._envoys: dict[str, Envoy] = {}
        self._roots = []
        for number, layer in self._layers.items():
            root = Envoy(layer, path=str(number), interleaver=self.reporter)
            self._roots.append(root)  # children are held by their parents only
            self._envoys.update({envoy.path: envoy for envoy in root.modules()})
        self._configs = _configs(self._model)
        self._sourced: Counter[str] = Counter()

    def weight_check(self) -> WeightCheck:
        """A check of its weights."""
        return WeightCheck(self._model, self.loaded.sha256)

    @property
    def modules(self) -> list[nn.Module]:
        """The layers, in order."""
        return list(self._layers.values())

    def layer(self, number: int) -> nn.Module:
        """A layer by its number in the whole model. Raises BadRequest."""
        layer = self._layers.get(number)
        if layer is None:
            raise BadRequest(f"Layer {number} is not on this shard ({self.layers}).", fix=_FIX)
        return layer

    def module(self, path: str, within: LayerRange) -> nn.Module:
        """A module inside the layers `within`. Raises BadRequest."""
        self.check(path, within)
        envoy = self._envoys.get(path)
        if envoy is None:
            raise BadRequest(f"There is no module {path} on this shard.", fix=_FIX)
        module: nn.Module = envoy._module
        return module

    def check(self, location: object, within: LayerRange) -> None:
        """Raise BadRequest unless `location` lies inside the layers `within`."""
        number = str(location).partition(".")[0]
        if not number.isdecimal() or int(number) not in within:
            raise BadRequest(f"{str(location)[:100]} is not in layers {within}.", fix=_FIX)

    def source(self, path: str) -> None:
        """Make the operations inside this module's forward report, until `unsource`."""
        envoy = self._envoys.get(path)
        if envoy is None:
            raise BadRequest(f"There is no module {path} on this shard.", fix=_FIX)
        try:
            install_source(envoy)
        except SourceNotAvailable as error:
            raise BadRequest(f"{path} has no Python source: {error}.", fix=_FIX) from error
        self._sourced[path] += 1

    def unsource(self, path: str) -> None:
        """Undo one `source`."""
        self._sourced[path] -= 1
        if self._sourced[path] <= 0:
            del self._sourced[path]
            state = self._envoys[path]._module.__dict__[STATE]
            state.body, state.compiled, state.sourced = state.original, None, False

    def place_of(self, error: Exception) -> str:
        """Which module's code raised `error`, and at which line; empty if none of these."""
        paths = {id(envoy._module): path for path, envoy in self._envoys.items()}
        place = ""
        for frame, number in walk_tb(error.__traceback__):
            path = paths.get(id(frame.f_locals.get("self")))
            if path is not None:
                layer, _, inside = path.partition(".")
                file = frame.f_code.co_filename
                line = linecache.getline(file, number, frame.f_globals).strip()
                place = f" [layer {layer}{inside and f', {inside}'}: `{line}`,"
                place += f" {Path(file).name} line {number}]"
        return place

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in memory of the model's."""
        return _address(tensor) in self.storages

    def owner(self, tensor: torch.Tensor) -> torch.Tensor:
        """The weight that `tensor` is a part of; itself where it is not a part of just one."""
        for belonging in self._weights.get(_address(tensor), ()):
            if _covers(belonging.tensor, tensor):
                return belonging.tensor
        return tensor

    def replace(self, weight: torch.Tensor, other: torch.Tensor) -> None:
        """Have the modules compute with `other` in the place of a weight, until `restore`."""
        for belonging in self._weights.get(_address(weight), ()):
            table = belonging.table
            if belonging.tensor is weight and table and table[belonging.key] is not other:
                table[belonging.key] = other
                self._replaced.append(belonging)

    def restore(self) -> None:
        """Have them compute with the model's own weights again."""
        while self._replaced:
            belonging = self._replaced.pop()
            if belonging.table is not None:
                belonging.table[belonging.key] = belonging.tensor

    def use_attention(self, name: str) -> None:
        """Compute attention with this implementation from now on. Raises BadRequest."""
        if name not in ATTENTION:
            raise BadRequest(
                f"Attention {name[:50]!r} is not available on a shard.", fix="Use eager or sdpa."
            )
        for config in self._configs:
            config._attn_implementation = name

    def new_cache(self) -> SpanCache:
        """An empty cache; its layer 0 is the span's first."""
        return SpanCache(self.config)

    def capture_outputs(self) -> None:
        """Install transformers' own hooks for attentions and the like, once."""
        maybe_install_capturing_hooks(self._model)


def _address(tensor: torch.Tensor) -> int:
    """Where its storage is; 0 for one without memory that can be pointed to."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return 0
    return storage_of(tensor).data_ptr()


def _covers(weight: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether `tensor`, in the same storage, is a part of `weight`."""
    if weight.dtype != tensor.dtype or not weight.is_contiguous():
        return weight is tensor
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    start = tensor.storage_offset() - weight.storage_offset()
    return start >= 0 and start + sum((n - 1) * step for n, step in steps) < weight.numel()


def _configs(model: nn.Module) -> list[Any]:
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return list(found.values())
