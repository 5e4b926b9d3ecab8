"""Where the autograd graph of a job and that of a shard meet, on both ends.

Every tensor with a gradient that crosses is a *joint*, with a number. On the shard a joint is a
place in its graph (`GradientEdge`, or the leaf that stands for what the job gave). In the job it is
a node whose backward asks the shard: "with this gradient at joint p, what arrives at the joints
that crossed before p?" The shard answers for the piece of graph between them and no further: what
passes through another joint stops there, because the job takes it on from there. So hooks and
edits of gradients in the job see what they would see on one machine, whatever else consumed the
tensor on the shard.

One case cannot be told apart in time: a tensor that is shown only after something computed from it
was shown. Its values are right, the job is told that its gradient would be incomplete.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mesh.errors import BadRequest
from mesh.shard.taps.graph_walks import Place, leads_from_any, next_stops, place_of
from mesh.shard.taps.meter import ENTRY_BYTES, MemoryMeter

Ask = Callable[[int, torch.Tensor, list[int]], list[torch.Tensor | None]]
"""(joint, its gradient, earlier joints) -> what arrives at each of those, None for nothing."""
Sources = list[tuple[int, list[int]]]
"""Joints, each with the earlier ones that a gradient of it arrives at next."""


_MAX_VIEWS = 32
_BATCHED = (torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor)


class _Join(torch.autograd.Function):
    """A tensor from the other end; its gradient goes to `pass_on`."""

    @staticmethod
    def forward(
        ctx: Any,
        pass_on: Callable[[torch.Tensor], Sequence[torch.Tensor | None]],
        holder: list[torch.Tensor],
        *_edges: torch.Tensor,
    ) -> torch.Tensor:
        ctx.pass_on = pass_on
        ctx.set_materialize_grads(False)
        # Out of a holder, not an input: the output can then be edited in place.
        return holder[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        count = len(ctx.needs_input_grad) - 2
        (grad,) = grads
        passed = [None] * count if grad is None else ctx.pass_on(grad)
        return (None, None, *passed)


class _Edge(torch.autograd.Function):
    """The way to a tensor's present history, with its shape and no data."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # where nothing arrives, there is no gradient of zeros
        return tensor.new_zeros(()).expand(tensor.shape)

    @staticmethod
    def backward(_ctx: Any, *grads: torch.Tensor | None) -> Any:
        return grads[0]


class _Joint:
    """A joint, for as long as a graph of the job leads to it."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class JobJoints:
    """The job's end for one hop; see `mesh.shard.taps.shared_tensors.Origins`."""

    def __init__(self, ask: Ask, on_incomplete: Callable[[torch.Tensor], None]) -> None:
        """`on_incomplete` gets each tensor whose own gradient would miss something."""
        self._ask = ask
        self._on_incomplete = on_incomplete
        self._last_gift = 0
        self._joints: dict[int, tuple[_Joint, torch.Tensor]] = {}
        self._sources: dict[int, list[int]] = {}
        self._known: dict[int, tuple[int, bool, Any]] = {}
        self._views: set[int] = set()
        self._unreachable: list[int] = []

    def clear(self, *, cached: bool) -> None:
        """A trace has ended: what crosses from now on does not depend on what crossed before, if
        nothing of that is `cached`."""
        if not cached:
            self._joints = {}
        self._sources.clear()
        self._known.clear()
        self._views.clear()

    def tell_sources(self, sources: Sources) -> None:
        """What the shard's coming joints depend on. Of one it says nothing about, it may be all
        that crossed before."""
        self._sources.update(sources)

    def take_unreachable(self) -> list[int]:
        """The joints no gradient can be asked of any more, each once."""
        unreachable, self._unreachable = self._unreachable, []
        return unreachable

    def leaving(self, tag: int, tensor: torch.Tensor) -> int:
        """A new joint's number for a tensor with a history of the job's; 0 where the shard need not
        ask."""
        if self.is_asked(tag, tensor) and not tensor.requires_grad:
            raise unsupported("Detaching a tensor in place stops at layers on other machines")
        if not tensor.requires_grad or self._is_known(tag, tensor):
            return 0
        self._last_gift += 2
        self._add(self._new_joint(self._last_gift), tensor)
        self.settled(tag, tensor)
        return self._last_gift

    def arriving(self, joint: int, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` joined to the shard's graph. Of a negative joint the gradient would be
        incomplete."""
        here = self._new_joint(abs(joint))
        # An edge more than there is would be gone along, though it may lead to a graph that is
        # freed by now.
        sources = self._sources.pop(here.number, self._joints.keys())
        joints = [self._joints[number] for number in sources if number in self._joints]
        before = [earlier for earlier, _ in joints]

        def pass_on(grad: torch.Tensor) -> list[torch.Tensor | None]:
            if torch.is_grad_enabled():
                raise unsupported(
                    "Second derivatives (create_graph=True) stop at layers on other machines"
                )
            if any(is_batched(grad) for is_batched in _BATCHED):
                raise unsupported(
                    "Batched gradients (is_grads_batched=True, vectorize=True) stop at layers on"
                    " other machines"
                )
            return self._ask(here.number, grad, [earlier.number for earlier in before])

        with torch.enable_grad():
            joined = _join(pass_on, tensor, *(edge for _, edge in joints))
        self._add(here, joined)
        if joint < 0:
            self._on_incomplete(joined)
        return joined

    def asked(self, joint: int, tensor: torch.Tensor) -> None:
        """Show with its history what was only looked at before."""
        with torch.enable_grad():
            tensor.copy_(self.arriving(joint, tensor.detach().clone()))

    def is_asked(self, tag: int, tensor: torch.Tensor) -> bool:
        """Whether it has a gradient now and had none for the shard, or the reverse."""
        known = self._known.get(tag)
        return tensor.requires_grad != (known is not None and known[1])

    def viewing(self, joint: int, tag: int, view: torch.Tensor) -> None:
        """Take `view`, of a known tensor, for the shard's `joint`; torch takes its gradient on, to
        what it is a view of.

        After an edit it stands for that part of the memory, whoever uses it, so its own gradient
        cannot be told from the whole tensor's.
        """
        self._views.add(tag)
        self._add(self._new_joint(abs(joint)), view)
        if joint < 0:
            self._on_incomplete(view)

    def settled(self, tag: int, tensor: torch.Tensor) -> None:
        """Note the tensor as the shard knows it now."""
        known = self._known.get(tag)
        if tag in self._views and known is not None and known[0] != tensor._version:
            self._on_incomplete(tensor)
        self._known[tag] = (tensor._version, tensor.requires_grad, tensor.grad_fn)

    def _new_joint(self, number: int) -> _Joint:
        joint = _Joint(number)
        weakref.finalize(joint, self._unreachable_now, number)
        return joint

    def _unreachable_now(self, number: int) -> None:
        self._unreachable.append(number)

    def _add(self, joint: _Joint, tensor: torch.Tensor) -> None:
        with torch.enable_grad():
            self._joints[joint.number] = (joint, _edge(tensor))

    def _is_known(self, tag: int, tensor: torch.Tensor) -> bool:
        known = self._known.get(tag)
        if known is None:
            return False
        version, required, history = known
        return version == tensor._version and required and history is tensor.grad_fn


class ShardJoints:
    """The shard's end of one session; see `mesh.shard.taps.shared_tensors.Origins`.

    What is shown is kept, graph and all, until the job drops it or ends: it may go back through an
    earlier trace.
    """

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self._last_point = -1
        self._edges: dict[int, GradientEdge | torch.Tensor] = {}
        self._kept: dict[int, tuple[Place, object]] = {}
        """Where each of them was when it crossed, and the graph that it keeps."""
        self._places: dict[Place, list[int]] = {}
        self._known: dict[int, Place | None] = {}
        self._sources: Sources = []
        self.graph: object = None
        """What stands for the graph that is being built; kept as long as its joints."""

    def clear(self) -> None:
        """A trace has ended; the graph stays."""
        self._known.clear()

    def drop(self, joints: list[int]) -> None:
        """Nobody will ask for these any more: free what only they hold of the graph."""
        for joint in joints:
            if self._edges.pop(joint, None) is not None:
                place, _ = self._kept.pop(joint)
                self._places[place].remove(joint)
                if not self._places[place]:
                    del self._places[place]
                self._meter.give(ENTRY_BYTES)

    def forget(self) -> None:
        """Free the graph."""
        self._known.clear()
        self.drop(list(self._edges))

    def _keep(self, joint: int, edge: GradientEdge | torch.Tensor) -> None:
        self.drop([joint])
        self._meter.take(ENTRY_BYTES)
        place = place_of(edge)
        self._edges[joint], self._kept[joint] = edge, (place, self.graph)
        self._places.setdefault(place, []).append(joint)

    def leaving(self, tag: int, tensor: torch.Tensor) -> int:
        """The number under which the job asks for this tensor's gradient; 0 for none, negative
        where it would be incomplete."""
        if not tensor.requires_grad:
            return 0
        place = place_of(tensor)
        if self._known.get(tag) == place:
            return 0
        edge = get_gradient_edge(tensor)
        late = self._is_late(edge)
        self._last_point += 2
        self._sources.append((self._last_point, next_stops(place, self._places)))
        self._keep(self._last_point, edge)
        self._known[tag] = place
        return -self._last_point if late else self._last_point

    def arriving(self, joint: int, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` with a leaf in its history, at which the job's part of the graph begins."""
        leaf = tensor.new_zeros(()).expand(tensor.shape).requires_grad_()
        self._keep(joint, leaf)
        with torch.enable_grad():
            return _join(lambda grad: [grad], tensor, leaf)

    def asked(self, joint: int, tensor: torch.Tensor) -> None:
        """The job called `requires_grad_` on what it was shown: from here on it is a leaf."""
        if tensor.requires_grad:
            raise unsupported("Detaching a tensor in place stops at layers on other machines")
        self._keep(joint, tensor.requires_grad_())

    def take_sources(self) -> Sources:
        """What the joints that left since this was asked last depend on."""
        sources, self._sources = self._sources, []
        return sources

    def is_shown(self, tag: int) -> bool:
        """Whether the job has this tensor with its history."""
        return self._known.get(tag) is not None

    def viewed(self, tensor: torch.Tensor, tags: Sequence[int]) -> int | None:
        """The tag, of those that the job has, that `tensor` is a view of; the most direct of
        several."""
        shown = {place: tag for tag in tags if (place := self._known.get(tag)) is not None}
        place = place_of(tensor) if tensor.requires_grad else None
        for _ in range(_MAX_VIEWS):
            if place is None or place in shown:
                return None if place is None else shown[place]
            sources = place[0].next_functions  # a view is computed from one tensor
            source, number = sources[0] if len(sources) == 1 else (None, 0)
            place = None if source is None else (source, number)
        return None

    def settled(self, tag: int, tensor: torch.Tensor) -> None:
        """Note the tensor's place in the graph as the job knows it now."""
        self._known[tag] = place_of(tensor) if tensor.requires_grad else None

    def backward(
        self, joint: int, grad: torch.Tensor, earlier: list[int]
    ) -> list[torch.Tensor | None]:
        """What arrives at each of the `earlier` joints; nothing passes through one of them."""
        try:
            start = self._edges[joint]
            ends = [self._edges[number] for number in earlier]
        except KeyError as error:
            raise BadRequest(
                f"Joint {error} is not known here.", fix="Run the trace again."
            ) from error
        if not ends:
            return []
        stops = [_stop(end) for end in ends if isinstance(end, GradientEdge) and end != start]
        try:
            found = torch.autograd.grad(
                cast("Any", [start]),
                cast("Any", ends),
                [grad],
                allow_unused=True,
                retain_graph=True,
            )
        finally:
            for stop in stops:
                stop.remove()
        return list(found)

    def _is_late(self, edge: GradientEdge) -> bool:
        """Whether something computed from here was shown before."""
        shown = (end.node for end in self._edges.values() if isinstance(end, GradientEdge))
        return leads_from_any(shown, (edge.node, edge.output_nr))


def unsupported(what: str) -> BadRequest:
    """The refusal of what only a whole model can do, and the way around it."""
    return BadRequest(
        f"{what}.",
        fix="Before the trace, call requires_grad_() on a weight of each layer concerned: those"
        " layers then run inside the job.",
    )


def _join(
    pass_on: Callable[[torch.Tensor], Sequence[torch.Tensor | None]],
    tensor: torch.Tensor,
    *edges: torch.Tensor,
) -> torch.Tensor:
    joined: torch.Tensor = _Join.apply(pass_on, [tensor], *edges)  # type: ignore[no-untyped-call]
    return joined


def _edge(tensor: torch.Tensor) -> torch.Tensor:
    edge: torch.Tensor = _Edge.apply(tensor)  # type: ignore[no-untyped-call]
    return edge


def _stop(end: GradientEdge) -> Any:
    def stop(grads: tuple[torch.Tensor | None, ...]) -> Any:
        return tuple(None if i == end.output_nr else grad for i, grad in enumerate(grads))

    return end.node.register_prehook(stop)
