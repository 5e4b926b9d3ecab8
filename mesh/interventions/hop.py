"""The job's end of one hop's intervention session: what both hold, and one message at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from mesh.errors import BadFrame, from_dict
from mesh.interventions.channel import SpanChannel
from mesh.interventions.gradients import mark_incomplete
from mesh.interventions.unseen import WatchedTensors
from mesh.shard.taps.codec import Buffers, Reader, Writer, pack, unpack
from mesh.shard.taps.joints import JobJoints
from mesh.shard.taps.shared_tensors import Loose
from mesh.types import LayerRange

CPU = torch.device("cpu")

Header = dict[str, Any]


class JobHop:
    """One hop of the job's route: layers of the model, in order, on one shard."""

    def __init__(self, channel: SpanChannel, number: int, layers: LayerRange) -> None:
        self.layers = layers
        self._channel = channel
        self._number = number
        self.joints = JobJoints(self._backward, mark_incomplete)
        self.tensors = WatchedTensors(CPU, self.joints)
        self._patterns: dict[int, list[tuple[str, int]]] = {}
        self._freed: list[int] = []
        self._released = False
        self._subscribed: frozenset[str] = frozenset()
        self._sourced: frozenset[str] = frozenset()

    def exchange(
        self, header: Header, buffers: Buffers, heed: Callable[[Header], None] = lambda _: None
    ) -> tuple[Header, Buffers]:
        """One message and its answer, which `heed` is told also where it is an error.

        Raises MeshError: the hop's own, or that it is gone.
        """
        header["free"], self._freed = self._freed, []
        header["unreachable"] = self.joints.take_unreachable()
        header["release"], self._released = self._released, False
        reply, received = unpack(self._channel.call(self._number, pack(header, buffers)))
        heed(reply)
        self.joints.tell_sources(reply.get("sources", []))
        if reply.get("op") == "error":
            raise from_dict(reply["error"])
        return reply, received

    def fetch_weight(self, path: str, name: str) -> torch.Tensor:
        """A copy of a weight of the module at `path`. Raises as `exchange` does."""
        weight: torch.Tensor = self._ask({"op": "weight", "path": path, "name": name}, {})
        return weight

    def operate_on_cache(self, cache: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Let the hop do `name` to its part of a cache. Raises as `exchange` does."""
        header = {"op": "cacheop", "cache": cache, "name": name, "grad": torch.is_grad_enabled()}
        self._ask(header, {"args": arguments})

    def fetch_cache(self, cache: int, layer: int) -> list[torch.Tensor]:
        """Copies of keys and values of one layer of a cache. Raises as `exchange` does."""
        contents: list[torch.Tensor] = self._ask({"op": "kv", "cache": cache, "layer": layer}, {})
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

    def visits(self, pattern: Any) -> Iterable[tuple[str, int]]:
        """How often each location was reached, of an answer's `visits`."""
        if type(pattern) is int:
            known = self._patterns.get(pattern)
            if known is None:
                raise BadFrame("A hop names visits it never sent.", fix="Update that machine.")
            return known
        number, items = pattern
        visits = [(str(location), int(count)) for location, count in items]
        if number:
            self._patterns[number] = visits
        return visits

    def _backward(
        self, joint: int, grad: torch.Tensor, earlier: list[int]
    ) -> list[torch.Tensor | None]:
        header = {"op": "backward", "joint": joint, "earlier": earlier}
        answer: list[torch.Tensor | None] = self._ask(header, {"grad": grad})
        return answer

    def _ask(self, header: Header, values: dict[str, Any]) -> Any:
        """An operation that is answered at once with a value."""
        loose = Loose(CPU)
        writer = Writer(loose.write, _nothing_else)
        header |= {name: writer.value(value) for name, value in values.items()}
        reply, buffers = self.exchange(header, writer.buffers)
        return Reader(buffers, loose.read, _nothing_else, CPU).value(reply["value"])


def _nothing_else(value: Any, _path: Any) -> Any:
    raise BadFrame(f"Unexpected {type(value).__name__} in an answer.", fix="Update that machine.")
