"""One forward of an intervention session, under way in a greenlet of the compute thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from nnsight.util import apply

from mesh.shard.taps.codec import Buffers, Path, Writer
from mesh.shard.taps.graph_walks import in_order_of_making
from mesh.shard.taps.guard import GraphShare
from mesh.shard.taps.messages import Passed, TapForward, TapReply, TapRequest, TapStop
from mesh.shard.taps.meter import MemoryMeter, Tally
from mesh.shard.taps.shared_tensors import ShardTensors
from mesh.shard.taps.tree import SpanTree

_PAUSE_S = 0.05
_MAX_PATTERNS = 256
_MAX_PATTERN_BYTES = 1 << 20
NAME_BYTES = 256
"""What a location that is kept takes besides its characters: its objects, its places in tables."""

Asked = tuple[TapRequest, Buffers]


class PassPatterns:
    """How often which locations were passed, sent once and named by a number from then on."""

    def __init__(self, meter: MemoryMeter) -> None:
        self._kept = Tally(meter)
        self._numbers: dict[tuple[tuple[str, int], ...], int] = {}

    def clear(self) -> None:
        """Forget them; nothing is sent from now on."""
        self._numbers.clear()
        self._kept.set(0)

    def encode(self, visits: dict[str, int]) -> int | tuple[int, list[Passed]]:
        """A number, with the visits the first time; number 0 is not to be kept."""
        key = tuple(visits.items())
        known = self._numbers.get(key)
        if known is not None:
            return known
        number, size = 0, NAME_BYTES + sum(NAME_BYTES + len(location) for location, _ in key)
        if len(self._numbers) < _MAX_PATTERNS and size < _MAX_PATTERN_BYTES:
            self._kept.grow(size)
            number = self._numbers[key] = len(self._numbers) + 1
        return number, list(key)


class Host(Protocol):
    """What a run needs of its session."""

    tensors: ShardTensors
    patterns: PassPatterns
    observed: frozenset[str]
    sourced: dict[str, Any]

    def show(self, run: Run, provider: str, value: Any) -> Any:
        """Let the job see `value`; returns what it makes of it."""

    def observe(self, run: Run, provider: str, value: Any) -> None:
        """Let the job know of `value`."""

    def pack(self, reply: TapReply, buffers: Buffers) -> bytes:
        """The bytes of a message to hand out. Raises BadRequest, LimitReached."""

    def new_writer(self, run: Run) -> Writer:
        """A writer for the run's next message."""

    def discard(self, writer: Writer) -> None:
        """Keep and count nothing of what it has written."""


class Run:
    """See the module; a `mesh.shard.taps.tree.Visitor`."""

    def __init__(
        self,
        host: Host,
        asked: TapForward,
        body: Callable[[Run, Asked], bytes],
    ) -> None:
        self.watching = asked.watch
        self.sourced = host.sourced
        self.is_watched = True
        """Whether each of its operations is looked at."""
        self.room = 0
        """Bytes held for it where they are not counted one by one."""
        self.graph: GraphShare | None = None
        """Of the graph that it builds, once it builds one."""
        self.grad = asked.grad
        """Whether it builds one from where it goes on."""
        self.wanted: dict[str, frozenset[int]] = {}
        self.observed: list[tuple[str, Any]] = []
        self.standing: dict[Path, tuple[int, Any]] = {}
        """The objects of our own that the value shown last has, by where in it they are."""
        self.writer = host.new_writer(self)
        self._host = host
        self.attention = asked.attn
        self._visits: dict[str, int] = {}
        self._since = 0.0
        self._greenlet: Any = greenlet(lambda asked: body(self, asked))

    @property
    def is_over(self) -> bool:
        """Whether it has said its last."""
        return bool(self._greenlet.dead)

    def go_on(self, tree: SpanTree, asked: Asked | None) -> bytes | None:
        """Let it run until it has something to say; None when it has only run for long enough."""
        tree.use_attention(self.attention)
        self._since = time.perf_counter()
        self._greenlet.parent = getcurrent()
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(self.grad)
        try:
            with tree.reporter.reporting_to(self):
                answer: bytes | None = self._greenlet.switch(asked)
        finally:
            self.grad = torch.is_grad_enabled()
            torch.set_grad_enabled(before)
        return answer

    def unwind(self) -> None:
        """End it where it stands."""
        self._greenlet.parent = getcurrent()
        self._greenlet.throw(GreenletExit)

    # From inside the greenlet

    def converse(self, message: bytes) -> Asked:
        """Hand out `message` and stand still until the answer is here."""
        asked: Asked = self._greenlet.parent.switch(message)
        return asked

    def breathe(self) -> None:
        """Give the device to others if it has been ours for long."""
        if time.perf_counter() - self._since > _PAUSE_S:
            self._greenlet.parent.switch(None)

    def reached(self, provider: str, value: Any) -> Any:
        """See `Visitor`. What is shown or observed is counted by the job, the rest here."""
        visit = self._visits.get(provider, 0)
        if visit in self.wanted.get(provider, ()):
            return self._host.show(self, provider, value)
        if provider in self._host.observed:
            self._host.observe(self, provider, value)
            return value
        self._visits[provider] = visit + 1
        return value

    def message(self, kind: type[TapStop], value: Any = None, **fields: Any) -> bytes:
        """The message to hand out now; what was observed since the last one goes with it."""
        writer, self.writer = self.writer, self._host.new_writer(self)
        try:
            return self._packed(writer, kind, value, fields)
        finally:
            self._host.discard(writer)

    def _packed(
        self, writer: Writer, kind: type[TapStop], value: Any, fields: dict[str, Any]
    ) -> bytes:
        visits, self._visits = self._visits, {}
        observed, self.observed = self.observed, []
        self.standing = {}
        changed = self._host.tensors.write_changed(writer.buffers)
        tensors: list[torch.Tensor] = []
        apply(value, tensors.append, torch.Tensor)
        changed += [writer.tensor(tensor) for tensor in in_order_of_making(tensors)]
        reply = kind(
            grad=torch.is_grad_enabled(),
            visits=self._host.patterns.encode(visits),
            observed=observed,
            changed=changed,
            value=writer.value(value),
            **fields,
        )
        return self._host.pack(reply, writer.buffers)
