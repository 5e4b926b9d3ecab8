"""Forwards as ordinary as chat's, which need not be looked at operation by operation.

What a job says in the message that begins a forward is plain data, so what it asks for is known
before anything runs: tensors of its own with the shapes that a model's loop passes to its layers,
and nothing that names an ``out``, an ``inplace`` or another object. Such a forward computes what
chat computes, writes to nothing of the model, keeps no graph, and its memory is bounded by its
rows. All others run under `guard`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from mesh.shard.taps.codec import EncodedKind
from mesh.shard.taps.messages import TapForward, TapSpan
from mesh.shard.taps.meter import MemoryMeter
from mesh.shard.taps.tree import SpanTree

_PASSED = frozenset(
    {
        "attention_mask", "position_ids", "position_embeddings", "cache_position",
        "past_key_values", "cache", "use_cache", "output_attentions",
    }
)  # fmt: skip
"""What transformers' models pass to their layers; since 5.23 the cache by its shorter name."""
_FLOATING = frozenset({"fp32", "fp16", "bf16"})
_MOST_ROWS = 512
"""Beyond, computing takes longer than looking."""
_BYTES = 8
"""Of an intermediate value and of what it is widened to, while both are there."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Of a span's layers: values per row in the residual stream, in all projections of one layer
    together, and attention heads."""

    hidden: int
    wide: int
    heads: int

    @classmethod
    def of(cls, layers: Collection[nn.Module], config: Any) -> Widths | None:
        """None for layers that compute more than projections and attention (experts, recurrences,
        convolutions), and where gradients of weights are kept."""
        text = config.get_text_config()
        heads = getattr(text, "num_attention_heads", None)
        hidden = getattr(text, "hidden_size", None)
        weights = [list(layer.parameters()) for layer in layers]
        plain = all(w.dim() <= 2 and not w.requires_grad for layer in weights for w in layer)
        if not plain or not weights or type(heads) is not int or type(hidden) is not int:
            return None
        return cls(hidden, max(sum(max(w.shape) for w in layer) for layer in weights), heads)

    def bytes(self, layers: int, batch: int, rows: int, keys: int) -> int:
        """The most that a forward of `rows` per sequence over `keys` positions holds at once, and
        leaves: the states between `layers`, and their caches."""
        inside = batch * rows * (3 * self.wide + 24 * self.hidden)
        attention = batch * self.heads * rows * keys * 4 + 4 * batch * keys * self.wide
        left = layers * batch * (rows * self.hidden + keys * self.wide)
        return _BYTES * (inside + attention + left) + (1 << 20)


@dataclass(frozen=True, slots=True)
class _Shapes:
    """What tensors may look like beside hidden states of ``[batch, rows, hidden]``."""

    batch: int
    rows: int
    most_keys: int
    widest: int

    def fit(self, shape: list[int]) -> bool:
        """Whether no operator makes more of the hidden states by such a tensor beside them."""
        match shape:
            case [rows]:
                return rows == self.rows
            case [batch, keys]:
                return batch in (1, self.batch) and keys <= self.most_keys
            case [batch, rows, width]:
                return batch in (1, self.batch) and rows == self.rows and width <= self.widest
            case [batch, 1, rows, keys]:
                return (
                    batch in (1, self.batch) and rows in (1, self.rows) and keys <= self.most_keys
                )
        return False


class OrdinaryForwards:
    """Of one session, from its first until it does anything else: what it put into its caches or
    changed may make later forwards anything but ordinary."""

    def __init__(self, tree: SpanTree, meter: MemoryMeter) -> None:
        self._meter = meter
        self._widths = Widths.of(tree.modules, tree.config)

    def end(self) -> None:
        """The session has done something else."""
        self._widths = None

    def hold_room(self, asked: TapForward, known: Collection[int], cached: int) -> int:
        """Bytes held for the forward that is asked for, in the place of what it makes; 0 when it
        has to be watched. As `room_of`; given back by whoever asks."""
        room = None if self._widths is None else room_of(asked, self._widths, known, cached)
        if room is None:
            self.end()
            return 0
        if room > self._meter.limit_bytes - self._meter.held_bytes:
            return 0  # exactly counted, it may fit
        self._meter.take(room)
        return room


def room_of(asked: TapForward, widths: Widths, known: Collection[int], cached: int) -> int | None:
    """What the forward that is `asked` for takes at most, in bytes; None if it is not ordinary.

    `known` are the numbers of tensors that exist here already, which a job could change by sending
    them again; `cached` how many positions all caches of the session hold.
    """
    if not isinstance(asked, TapSpan) or asked.capture or asked.changed or asked.sourced:
        return None
    try:
        _, (hidden, (_, groups)) = asked.value
        brought: set[int] = set()
        shape = _new_tensor(hidden, known, brought)
        if shape is None or len(shape) != 3 or hidden[3][0] not in _FLOATING:
            return None
        batch, rows, width = shape
        if width != widths.hidden or not 0 < batch * rows <= _MOST_ROWS:
            return None
        shapes = _Shapes(batch, rows, rows + cached, widths.wide)
        if not all(_is_call(group, shapes, known, brought) for group in groups):
            return None
    except (KeyError, TypeError, ValueError, IndexError):
        return None  # malformed: whoever reads it says what is wrong
    layers = max(0, asked.stop - asked.start)
    return widths.bytes(layers, batch, rows, rows + cached)


def _is_call(group: Any, shapes: _Shapes, known: Collection[int], brought: set[int]) -> bool:
    _, ((_, args), (kind, pairs)) = group
    if kind != EncodedKind.DICT or args:
        return False
    return all(name in _PASSED and _is_plain(item, shapes, known, brought) for name, item in pairs)


def _is_plain(item: Any, shapes: _Shapes, known: Collection[int], brought: set[int]) -> bool:
    if item is None or type(item) is bool:
        return True
    if item[0] == EncodedKind.CACHE:
        return True
    if item[0] == EncodedKind.TUPLE:
        return all(
            each[0] == EncodedKind.TENSOR and _is_plain(each, shapes, known, brought)
            for each in item[1]
        )
    if item[0] != EncodedKind.TENSOR:
        return False
    if item[3] is None and item[1] in brought:
        return not item[2]
    shape = _new_tensor(item, known, brought)
    return shape is not None and shapes.fit(shape)


def _new_tensor(entry: Any, known: Collection[int], brought: set[int]) -> list[int] | None:
    """The shape of a tensor that the message brings, whose number joins what it `brought`; None for
    what is none."""
    kind, tag, joint, description = entry
    if (
        kind != EncodedKind.TENSOR
        or joint
        or tag in known
        or tag in brought
        or len(description) != 2
    ):
        return None
    brought.add(tag)
    shape: list[int] = description[1]
    return shape
