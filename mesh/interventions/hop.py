"""The job's end of one hop's intervention session: what both hold, and one message at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from mesh.errors import BadFrame, from_dict
from mesh.interventions.channel import SpanChannel
from mesh.interventions.gradients import mark_incomplete
from mesh.interventions.unseen import WatchedTensors
from mesh.shard.taps.codec import Buffers, Reader, Writer
from mesh.shard.taps.joints import JobJoints
from mesh.shard.taps.messages import (
    Passed,
    TapBackward,
    TapCacheContents,
    TapCacheOperation,
    TapRefusal,
    TapRequest,
    TapStop,
    TapValue,
    TapWeight,
    read_reply,
    to_bytes,
)
from mesh.shard.taps.shared_tensors import Loose
from mesh.types import LayerRange

CPU = torch.device("cpu")


class JobHop:
    """One hop of the job's route: layers of the model, in order, on one shard."""

    def __init__(self, channel: SpanChannel, number: int, layers: LayerRange) -> None:
        self.layers = layers
        self._channel = channel
        self._number = number
        self.joints = JobJoints(self._backward, mark_incomplete)
        self.tensors = WatchedTensors(CPU, self.joints)
        self._patterns: dict[int, list[Passed]] = {}
        self._freed: list[int] = []
        self._released = False
        self._subscribed: frozenset[str] = frozenset()
        self._sourced: frozenset[str] = frozenset()

    def exchange(
        self,
        request: TapRequest,
        buffers: Buffers,
        heed: Callable[[TapStop | TapRefusal], None] = lambda _: None,
    ) -> tuple[TapStop | TapValue, Buffers]:
        """One message and its answer, which `heed` is told, if it is of a forward, also where it is
        an error.

        Raises MeshError: the hop's own, or that it is gone.
        """
        request.free, self._freed = self._freed, []
        request.unreachable = self.joints.take_unreachable()
        request.release, self._released = self._released, False
        reply, received = read_reply(self._channel.call(self._number, to_bytes(request, buffers)))
        if not isinstance(reply, TapValue):
            heed(reply)
        self.joints.tell_sources(reply.sources)
        if isinstance(reply, TapRefusal):
            raise from_dict(reply.error)
        return reply, received

    def fetch_weight(self, path: str, name: str) -> torch.Tensor:
        """A copy of a weight of the module at `path`. Raises as `exchange` does."""
        weight: torch.Tensor = self._value_of(TapWeight(path=path, name=name))
        return weight

    def operate_on_cache(self, cache: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Let the hop do `name` to its part of a cache. Raises as `exchange` does."""
        writer, grad = _writer(), torch.is_grad_enabled()
        args = writer.value(arguments)
        request = TapCacheOperation(cache=cache, name=name, args=args, grad=grad)
        self._value_of(request, writer.buffers)

    def fetch_cache(self, cache: int, layer: int) -> list[torch.Tensor]:
        """Copies of keys and values of one layer of a cache. Raises as `exchange` does."""
        contents: list[torch.Tensor] = self._value_of(TapCacheContents(cache=cache, layer=layer))
        return contents

    def free_cache(self, cache: int) -> None:
        """Say with the next message that nobody holds this cache any more. Never blocks."""
        self._freed.append(cache)

    def release(self, *, cached: bool = False) -> None:
        """A trace has ended: tensors of it that come again come as new ones. `cached` is whether
        later ones may depend on it by a cache."""
        self.tensors.clear()
        self.joints.clear(cached=cached)
        self._released = True
        self._subscribed = self._sourced = frozenset()

    def new_subscriptions(self, subscribed: frozenset[str]) -> list[str] | None:
        """What to tell the hop about observed locations; None when it knows."""
        if subscribed == self._subscribed:
            return None
        self._subscribed = subscribed
        return sorted(subscribed)

    def new_sources(self, sourced: frozenset[str]) -> list[str]:
        """The operations to open up that the hop has not been told yet."""
        fresh = sourced - self._sourced
        self._sourced |= fresh
        return sorted(fresh)

    def visits(self, pattern: int | tuple[int, list[Passed]]) -> Iterable[Passed]:
        """How often each location was reached, of an answer's `visits`."""
        if isinstance(pattern, int):
            known = self._patterns.get(pattern)
            if known is None:
                raise BadFrame("A hop names visits it never sent.", fix="Update that machine.")
            return known
        number, visits = pattern
        if number:
            self._patterns[number] = visits
        return visits

    def _backward(
        self, joint: int, grad: torch.Tensor, earlier: list[int]
    ) -> list[torch.Tensor | None]:
        writer = _writer()
        request = TapBackward(joint=joint, grad=writer.value(grad), earlier=earlier)
        answer: list[torch.Tensor | None] = self._value_of(request, writer.buffers)
        return answer

    def _value_of(self, request: TapRequest, buffers: Buffers | None = None) -> Any:
        """What is answered at once."""
        reply, received = self.exchange(request, buffers or [])
        return Reader(received, Loose(CPU).read, _nothing_else, CPU).value(reply.value)


def _writer() -> Writer:
    return Writer(Loose(CPU).write, _nothing_else)


def _nothing_else(value: Any, _path: Any) -> Any:
    raise BadFrame(f"Unexpected {type(value).__name__} in an answer.", fix="Update that machine.")
