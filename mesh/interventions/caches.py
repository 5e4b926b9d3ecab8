"""Key/value caches whose remote layers are on the shards.

The job's cache object knows how long it is, so that masks and positions come out right. For a
remote layer transformers sees tensors of the right length without data (a byte each); whoever else
looks at keys or values gets a copy of what the shard has. Changing that copy, or continuing a cache
that was filled elsewhere, is refused: the shard would not know of it.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
)

from mesh.errors import BadRequest
from mesh.interventions.hop import JobHop
from mesh.interventions.unseen import checksum, was_given_out
from mesh.shard.taps.codec import CACHE_OPERATIONS
from mesh.shard.taps.messages import Growth

_OWN = ("_hearthnet_number", "_hearthnet_place")


class Caches:
    """The caches of a job, by the numbers the shards know them by."""

    def __init__(self, hop_of: Mapping[int, JobHop]) -> None:
        """`hop_of` says which layers are remote now, and where."""
        self._hop_of = hop_of
        self._hops = frozenset(hop_of.values())
        self._numbers = itertools.count(1)
        self._mirrored = _mirrored(weakref.ref(self))
        self._live: dict[int, weakref.ref[Any]] = {}
        self._filled: dict[int, set[int]] = {}
        """The layers that shards have put something into."""
        self._shown: dict[tuple[int, int], list[_Shown]] = {}

    @property
    def are_there(self) -> bool:
        """Whether somebody holds one."""
        return bool(self._live)

    def number_of(self, cache: Cache) -> int:
        """The number of a cache, which is a shared one from now on. Raises BadRequest."""
        number = getattr(cache, "_hearthnet_number", None)
        if number is not None:
            self._require_in_order(cache, int(number))
            return int(number)
        if type(cache) is not DynamicCache:
            raise BadRequest(
                f"A {type(cache).__name__} cannot span several machines.",
                fix="Leave cache_implementation at its default.",
            )
        remote = [(i, cache.layers[i]) for i in self._hop_of if i < len(cache.layers)]
        if any(_is_filled(layer) for _, layer in remote):
            raise BadRequest(
                "A cache that was filled elsewhere cannot be continued on other machines.",
                fix="Continue the cache that the model returned, not a copy of it.",
            )
        number = next(self._numbers)
        cache._hearthnet_number = number
        cache.__class__ = self._mirrored
        self._live[number] = weakref.ref(cache)
        weakref.finalize(cache, self._free, number)
        for index, layer in remote:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                _make_remote(layer, (weakref.ref(self), number, index))
        # By the layers, as transformers before 5.21 has no method of the cache that tells it.
        if any(getattr(layer, "record_past", False) for layer in cache.layers):
            cache.activate_past_recording()
        return number

    def by_number(self, number: int) -> Cache:
        """The live cache of that number. Raises BadRequest."""
        reference = self._live.get(number)
        cache = reference() if reference is not None else None
        if cache is None:
            raise BadRequest("A hop names a cache that is gone.", fix="Update that machine.")
        return cache

    def grow(self, growth: Sequence[Growth]) -> None:
        """Note what the shards added."""
        for number, start, stop, batch, added in growth:
            reference = self._live.get(number)
            cache = reference() if reference is not None else None
            if cache is None or added < 0:
                continue
            if not added:  # states only
                for layer in range(start, stop):
                    self._filled.setdefault(number, set()).add(layer)
                    self._shown.pop((number, layer), None)
                continue
            # Not on the meta device, where Python decides of every `cat` what it would be.
            stub = torch.zeros((batch, 1, added, 1), dtype=torch.int8)
            for layer in range(start, stop):
                Cache.update(cache, stub, stub, layer)
                _make_remote(cache.layers[layer], (weakref.ref(self), number, layer))
                self._filled.setdefault(number, set()).add(layer)
                self._shown.pop((number, layer), None)

    def mirror(self, cache: Any, name: str, arguments: tuple[Any, ...]) -> None:
        """Do to the shards' parts what is done to `cache`."""
        self.require_unchanged()
        self._shown.clear()
        for hop in self._hops:
            hop.operate_on_cache(cache._hearthnet_number, name, arguments)

    def has(self, number: int, layer: int) -> bool:
        """Whether a shard has put something into that layer."""
        return layer in self._filled.get(number, ())

    def contents(self, number: int, layer: int) -> list[torch.Tensor]:
        """Keys and values of a remote layer; the same objects until they change there."""
        place = (number, layer)
        if place not in self._shown:
            fetched = self._hop_of[layer].fetch_cache(number, layer)
            self._shown[place] = [_Shown(tensor) for tensor in fetched]
        return [shown.tensor for shown in self._shown[place]]

    def take_back(self, layer: int) -> None:
        """Put what the shard has of a layer into the job's caches, where it grows from now on."""
        self.require_unchanged()
        for number, reference in list(self._live.items()):
            cache = reference()
            if cache is not None and layer < len(cache.layers):
                cache.layers[layer] = _plain(cache.layers[layer])
                self._shown.pop((number, layer), None)

    def require_unchanged(self) -> None:
        """Raise BadRequest when what was fetched has been edited: the shards have not seen that."""
        if any(shown.is_changed() for both in self._shown.values() for shown in both):
            raise _unchangeable()

    def _require_in_order(self, cache: Any, number: int) -> None:
        there = {index for index, layer in enumerate(cache.layers) if _is_filled(layer)}
        for index in self._hop_of.keys() & (there | self._filled.get(number, set())):
            own = vars(cache.layers[index]) if index < len(cache.layers) else {}
            if own.get("_hearthnet_place", (None,))[1:] != (number, index):
                raise _unchangeable()

    def _free(self, number: int) -> None:
        self._live.pop(number, None)
        self._filled.pop(number, None)
        for place in [place for place in self._shown if place[0] == number]:
            del self._shown[place]
        for hop in self._hops:
            hop.free_cache(number)


class _Shown:
    """Keys or values as they were fetched."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._version = tensor._version
        self._checksum = checksum(tensor)

    def is_changed(self) -> bool:
        if self.tensor._version != self._version:
            return True
        return was_given_out(self.tensor) and checksum(self.tensor) != self._checksum


_Place = tuple["weakref.ref[Caches]", int, int]


def _make_remote(layer: Any, place: _Place) -> None:
    if "_hearthnet_place" not in layer.__dict__:
        layer.__class__ = _remote_kind(type(layer))
        layer.__dict__["_hearthnet_place"] = place


def _remote_kind(kind: type[Any]) -> type[Any]:
    """`kind` of cache layer with its contents on a shard; its own class outside the job."""

    def shown(name: str, index: int) -> property:
        def get(layer: Any) -> Any:
            caches, number, where = layer.__dict__["_hearthnet_place"]
            owner = caches()
            if _is_transformers(sys._getframe(1)) or owner is None or not layer.is_initialized:
                return layer.__dict__[name]
            return owner.contents(number, where)[index]

        def put(layer: Any, value: Any) -> None:
            if not _is_transformers(sys._getframe(1)):
                raise _unchangeable()
            layer.__dict__[name] = value

        return property(get, put)

    members: dict[str, Any] = {}
    if issubclass(kind, CacheLayerMixin):
        members |= {"keys": shown("keys", 0), "values": shown("values", 1)}
    if issubclass(kind, LinearAttentionCacheLayerMixin):
        members["conv_states"] = _states_shown("conv_states", kind, second=False)
        members["recurrent_states"] = _states_shown("recurrent_states", kind, second=True)
    changing = (name for name in ("update", *CACHE_OPERATIONS) if hasattr(kind, name))
    members |= {name: _by_the_cache(_on_the_jobs_part(kind, name)) for name in changing}
    members["__reduce_ex__"] = lambda layer, _protocol: _as_plain(_plain(layer))
    members["__module__"] = kind.__module__
    return type(kind.__name__, (kind,), members)


def _states_shown(name: str, kind: type[Any], *, second: bool) -> property:
    """The states of one kind by their numbers, None where there is none."""
    first = 2 if issubclass(kind, CacheLayerMixin) else 0

    def get(layer: Any) -> Any:
        caches, number, where = layer.__dict__["_hearthnet_place"]
        owner = caches()
        if _is_transformers(sys._getframe(1)) or owner is None or not owner.has(number, where):
            return layer.__dict__[name]
        start = first + (layer.number_of_states if second else 0)
        found = owner.contents(number, where)[start : start + layer.number_of_states]
        return {i: state if state.numel() else None for i, state in enumerate(found)}

    def put(layer: Any, value: Any) -> None:
        if not _is_transformers(sys._getframe(1)):
            raise _unchangeable()
        layer.__dict__[name] = value

    return property(get, put)


def _on_the_jobs_part(kind: type[Any], name: str) -> Callable[..., Any]:
    """What `name` does to a layer whose states the job has not: its keys alone are cut."""
    if name != "crop" or not issubclass(kind, LinearAttentionCacheLayerMixin):
        own: Callable[..., Any] = getattr(kind, name)
        return own
    cuts = (base for base in kind.__mro__ if name in vars(base))
    of_keys = next(
        (base for base in cuts if not issubclass(base, LinearAttentionCacheLayerMixin)), None
    )
    return (lambda *_: None) if of_keys is None else getattr(of_keys, name)


def _by_the_cache(own: Callable[..., Any]) -> Callable[..., Any]:
    """`own` for those who keep the shard's part in step."""

    @functools.wraps(own)
    def operation(*args: Any, **kwargs: Any) -> Any:
        if not _is_transformers(sys._getframe(1)):
            raise _unchangeable()
        return own(*args, **kwargs)

    return operation


def _plain(layer: Any) -> Any:
    """A layer with its contents in it, as transformers has it."""
    if "_hearthnet_place" not in layer.__dict__:
        return layer
    plain: Any = object.__new__(type(layer).__bases__[0])
    plain.__dict__.update({k: v for k, v in layer.__dict__.items() if k not in _OWN})
    if isinstance(layer, CacheLayerMixin):
        plain.keys, plain.values = layer.keys, layer.values
        if layer.is_initialized:
            plain.dtype, plain.device = plain.keys.dtype, plain.keys.device
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        _put_states(plain, layer.conv_states, layer.recurrent_states)
    return plain


def _put_states(plain: Any, conv: dict[int, Any], recurrent: dict[int, Any]) -> None:
    """As a layer has them that was filled."""
    plain.conv_states, plain.recurrent_states = conv, recurrent
    for number in range(plain.number_of_states):
        inputs, state = conv[number], recurrent[number]
        plain.is_conv_states_initialized[number] = inputs is not None
        plain.is_recurrent_states_initialized[number] = state is not None
        plain.has_previous_state[number] = inputs is not None or state is not None
        plain.conv_kernel_size[number] = None if inputs is None else inputs.shape[-1]
        known = state if inputs is None else inputs
        if known is not None:
            plain.dtype, plain.device = known.dtype, known.device


def _plain_cache(cache: Any) -> DynamicCache:
    plain = DynamicCache.__new__(DynamicCache)
    plain.__dict__.update({k: v for k, v in cache.__dict__.items() if k not in _OWN})
    plain.layers = [_plain(layer) for layer in cache.layers]
    return plain


def _as_plain(plain: Any) -> tuple[Any, ...]:
    # Pickle takes no other class from `__reduce_ex__` in the usual form.
    return copyreg._reconstructor, (type(plain), object, None), plain.__dict__  # type: ignore[attr-defined]


def _is_transformers(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("transformers.")


def _mirroring(name: str, caches: weakref.ref[Caches]) -> Callable[..., Any]:
    own = getattr(DynamicCache, name)
    signature = inspect.signature(own)

    def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).args[1:]
        owner = caches()
        if owner is not None:
            owner.mirror(self, name, arguments)
        return own(self, *arguments)

    return operation


def _mirrored(caches: weakref.ref[Caches]) -> type[Any]:
    members: dict[str, Any] = {name: _mirroring(name, caches) for name in CACHE_OPERATIONS}
    members["__reduce_ex__"] = lambda cache, _protocol: _as_plain(_plain_cache(cache))
    members["update"] = _by_the_cache(DynamicCache.update)
    members["__iter__"] = lambda cache: iter(_plain_cache(cache))
    members["__module__"] = DynamicCache.__module__
    return type(DynamicCache.__name__, (DynamicCache,), members)


def _is_filled(layer: Any) -> bool:
    if isinstance(layer, CacheLayerMixin) and layer.is_initialized:
        return True
    has_states = isinstance(layer, LinearAttentionCacheLayerMixin)
    return has_states and any(layer.has_previous_state.values())


def _unchangeable() -> BadRequest:
    return BadRequest(
        "The keys and values of a layer on another machine can be read, not changed.",
        fix="Change what they are computed from, the outputs of k_proj and v_proj, or all layers at"
        " once by the cache's own methods.",
    )
