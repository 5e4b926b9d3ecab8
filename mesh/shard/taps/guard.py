"""Every tensor operation of one session's forwards, looked at before it runs.

Three promises rest on it, whatever the job's process says on the tap protocol. Nothing that belongs
to the model is written to, through whatever view: a job may put any value at any place, also an
``out=`` or an ``inplace`` where the model's code has none. Nothing is shown that was in memory
before, which may be another's: memory without values gets zeros, for a job can look at it before
the model's code fills it, and a product of groups that would leave out rows does not begin. And
every byte that an operation makes is counted as it is made, until it is freed: graphs, caches and
half-done forwards keep what they keep by tensors, and an operation whose result cannot fit does not
begin.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mesh.errors import BadRequest
from mesh.shard.taps.codec import storage_of
from mesh.shard.taps.extents import Extent, extent_of, tensors
from mesh.shard.taps.meter import ENTRY_BYTES, MemoryMeter

_WRITTEN_UNSAID = frozenset({"running_mean", "running_var"})
"""Of batch norms, which say in no schema that they write to them; no decoder layer has one."""
_MAKES_NOTHING = frozenset({"aten::_unsafe_view"})
"""Says that its result is new, which is a view."""
_WITHOUT_VALUES = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
                 "new_empty_strided")
)  # fmt: skip
_GROUPED = "aten::_grouped_mm"
_GROUP_ENDS = (2, "offs")
_NO_NAMES: dict[str, Any] = {}
_NODE_BYTES = 512
"""A node of an autograd graph, without the tensors that it saves."""


class GraphShare:
    """What the graph nodes of one forward take; given back when nobody refers to it any more."""

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self._nodes = [0]
        weakref.finalize(self, _give_nodes, meter, self._nodes)

    def add(self) -> None:
        """One more node. Raises LimitReached."""
        self._meter.take(_NODE_BYTES)
        self._nodes[0] += 1


@dataclass(frozen=True, slots=True)
class _Rule:
    """What is to be known of an operator: arguments it writes to, and what it makes."""

    writes: tuple[tuple[int, str], ...]
    makes: bool
    is_empty: bool
    is_grouped: bool
    extent: Extent


class OperationGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active while a session's code runs. `model` are the storages of the model, by address."""

    def __init__(self, model: frozenset[int], meter: MemoryMeter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._meter = meter
        self._rules: dict[Any, _Rule] = {}
        self._alive: dict[int, _Counted] = {}
        self.graph: GraphShare | None = None
        """Counts the nodes of the graph that is being built; None where there is none."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # To ask it to stay away would import it: a second, and 75 MB that stay.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one tensor operation if it may. Raises LimitReached; BadRequest for a write to the
        model."""
        # Some hundred times per layer: what most operations do not need is looked for last.
        named = kwargs or _NO_NAMES
        rule = self._rules.get(func)
        if rule is None:
            rule = self._learn(func)
        for index, name in rule.writes:
            self._require_writable(_argument(index, name, args, named), func)
        if rule.is_grouped:
            _require_whole(args[0], args[1], _argument(*_GROUP_ENDS, args, named))
        if rule.makes:
            self._meter.require(rule.extent(func, args, named))
        if self.graph is not None and any(t.requires_grad for t in tensors(args, named)):
            self.graph.add()
        out = func(*args, **named)
        if rule.is_empty:
            out.zero_()
        if rule.makes:
            if isinstance(out, torch.Tensor):
                self.count(out)
            else:
                for tensor in tensors((out,)):
                    self.count(tensor)
        return out

    def count(self, tensor: torch.Tensor) -> None:
        """Hold what the tensor's memory takes for as long as that lives; does nothing for what is
        counted, or the model's. Raises LimitReached."""
        if tensor.layout is not torch.strided or tensor.is_meta:
            return
        storage = storage_of(tensor)
        key, size = storage._cdata, storage.nbytes() + ENTRY_BYTES
        known = self._alive.get(key)
        if known is not None:
            if size > known.size:
                self._meter.take(size - known.size)
                known.size = size
        elif storage.data_ptr() not in self._model:
            self._meter.take(size)
            counted = self._alive[key] = _Counted(storage, _forget)
            counted.alive, counted.key = self._alive, key
            counted.meter, counted.size = self._meter, size

    def _learn(self, func: Any) -> _Rule:
        schema = func._schema
        writes = tuple(
            (index, argument.name)
            for index, argument in enumerate(schema.arguments)
            if (argument.alias_info is not None and argument.alias_info.is_write)
            or argument.name in _WRITTEN_UNSAID
        )
        # What writes its result to an argument may make that larger.
        makes = bool(writes) and ("out" in func._overloadname or "resize" in schema.name)
        makes = makes or any(
            result.alias_info is None and "Tensor" in str(result.type) for result in schema.returns
        )
        makes = makes and schema.name not in _MAKES_NOTHING
        rule = self._rules[func] = _Rule(
            writes,
            makes,
            schema.name in _WITHOUT_VALUES,
            schema.name == _GROUPED,
            extent_of(func),
        )
        return rule

    def _require_writable(self, written: Any, func: Any) -> None:
        for tensor in tensors((written,)):
            if storage_of(tensor).data_ptr() in self._model:
                raise BadRequest(
                    f"{func._schema.name} would write to the model itself, which all share.",
                    fix="Change a copy: clone() it first.",
                )


class _Counted(weakref.ref[Any]):
    """A storage for as long as it lives."""

    __slots__ = ("alive", "key", "meter", "size")
    alive: dict[int, _Counted]
    key: int
    meter: MemoryMeter
    size: int


def _forget(dead: _Counted) -> None:
    del dead.alive[dead.key]
    dead.meter.give(dead.size)


def _argument(index: int, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return args[index] if index < len(args) else named.get(name)


def _require_whole(rows: torch.Tensor, groups: torch.Tensor, ends: torch.Tensor | None) -> None:
    """Raise BadRequest where some `rows` are in none of the `groups`, as where a row goes to an
    expert that there is none of."""
    if ends is None or (rows.dim(), groups.dim()) != (2, 3):
        return
    if not len(ends) or int(ends[-1]) != len(rows):
        raise BadRequest(
            f"Some rows go to experts that there are none of: there are {len(groups)}.",
            fix=f"Choose experts from 0 to {len(groups) - 1}.",
        )


def _give_nodes(meter: MemoryMeter, nodes: list[int]) -> None:
    meter.give(nodes[0] * _NODE_BYTES)
