"""A decoder layer as three ONNX graphs over onnxruntime's fused operators.

Before its mixer and behind it, rows of any sessions are computed together, as a matrix is read once
for all of them; the mixer is computed for one session at a time (`attention_graph`,
`recurrence_graph`).

- `front_model`: ``x`` (1, rows, hidden) to ``projected`` (1, rows, what the mixer takes), and to
  ``gate`` (1, rows, what it gives) where what it gives is multiplied by that. ``shared`` (1, rows,
  width) are the keys and values of rows that several layers see: that which makes them gives them,
  the others take them.
- `back_model`: ``attended``, ``gate`` and ``x`` of the same rows, and ``inputs`` (1, rows, width),
  what the layer is given beside them if it is, to ``y``, as ``x``.

Floats are fp32 throughout.
Operators: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mesh.shard.compiled import experts_graph
from mesh.shard.compiled.builder import (
    DOWN,
    FLOAT,
    FORGETTING,
    GATES,
    INPUTS_GATE,
    INPUTS_PROJECTION,
    OUTPUT,
    QKV,
    RATES,
    SHARED_DOWN,
    SHARED_GATE,
    SHARED_UP,
    UP,
    GraphBuilder,
    Product,
)
from mesh.shard.compiled.feed_forward import Xielu
from mesh.shard.compiled.latent_graph import before_latents, behind_latents
from mesh.shard.compiled.parts import (
    Attention,
    ChannelDeltaNet,
    DeltaNet,
    Experts,
    FeedForward,
    LayerInputs,
    LayerParts,
    Mixer,
    NotCompilable,
    StateSpace,
)
from mesh.shard.compiled.spreading import spread


def front_model(
    parts: LayerParts,
    products: Mapping[str, Product],
    *,
    is_seen: bool = False,
    spread_from: int = 0,
) -> bytes:
    """The serialised graph of what stands before the mixer; other layers see its keys and values
    if it `is_seen`. If it is not 0, `spread_from` numbers of each head turn and the mixer takes
    heads that turn in whole (`spreading`).

    What it refers to is looked for in its products' folder. For layers that have one.
    """
    graph, mixer = GraphBuilder(products), parts.mixer
    assert mixer is not None  # noqa: S101 - says the caller
    x = graph.norm(graph.input("x", FLOAT, [1, "rows", parts.hidden]), parts.before_mixer)
    found = graph.product(x, QKV)
    if isinstance(mixer, Attention):
        projected, gate = _before_attention(graph, mixer, found)
        projected = spread(graph, mixer, projected, spread_from) if spread_from else projected
    elif isinstance(mixer, DeltaNet):
        projected, gate = _before_delta(graph, mixer, found, graph.product(x, RATES))
    elif isinstance(mixer, ChannelDeltaNet):
        projected, gate = _before_channels(graph, mixer, found, graph.product(x, RATES))
    elif isinstance(mixer, StateSpace):
        gate, projected = graph.split(found, [mixer.attended, mixer.projected])
    else:
        first, gate, second = graph.split(found, [mixer.width] * 3)
        projected = graph.op("Mul", [first, second])
    shared, both = "", mixer.projected - mixer.attended
    if is_seen:
        _, shared = graph.split(projected, [mixer.attended, both])
    for name, value, width in (
        ("projected", projected, mixer.projected),
        ("gate", gate, mixer.attended),
        ("shared", shared, both),
    ):
        if value:
            graph.op("Identity", [value], outputs=[name])
            graph.output(name, [1, "rows", width])
    return graph.serialised()


def back_model(parts: LayerParts, products: Mapping[str, Product]) -> bytes:
    """The serialised graph of what stands behind the mixer; its products as in `front_model`.

    Raises NotCompilable.
    """
    if parts.beside is not None:
        raise NotCompilable("it has experts beside its feed-forward")
    graph, mixer = GraphBuilder(products), parts.mixer
    x = given = graph.input("x", FLOAT, [1, "rows", parts.hidden])
    if mixer is not None:
        y = graph.product(_gated(graph, mixer), OUTPUT)
        x = graph.add(x, parts.multiplier, graph.norm(y, parts.after_mixer))
    if parts.feed_forward is not None:
        y = _fed(graph, parts, parts.feed_forward, given if parts.are_parallel else x)
        x = graph.add(x, parts.multiplier, graph.norm(y, parts.after_feed_forward))
    if parts.inputs is not None:
        x = graph.op("Add", [x, _of_inputs(graph, parts.inputs, x)])
    if parts.scale != 1.0:
        x = graph.op("Mul", [x, graph.constant(np.array(parts.scale, np.float32))])
    graph.op("Identity", [x], outputs=["y"])
    graph.output("y", [1, "rows", parts.hidden])
    return graph.serialised()


def _fed(graph: GraphBuilder, parts: LayerParts, part: FeedForward | Experts, x: str) -> str:
    """What feed-forward, or experts, give of rows."""
    normed = graph.norm(x, parts.before_feed_forward)
    if isinstance(part, Experts):
        y = experts_graph.mixed(graph, part, normed, parts.hidden)
        if part.shared is not None:
            shared = _feed_forward(graph, part.shared, normed, SHARED_UP, SHARED_DOWN)
            if part.shared_gate is not None:
                share = graph.op("Sigmoid", [graph.product(normed, SHARED_GATE)])
                shared = graph.op("Mul", [shared, share])
            y = graph.op("Add", [y, shared])
            if part.averaged:
                y = graph.op("Mul", [y, graph.constant(np.array(0.5, np.float32))])
        return y
    return _feed_forward(graph, part, normed)


def product_model(product: Product, rows: int, columns: int) -> bytes:
    """The serialised graph of one product: ``x`` (rows, columns) to ``y`` (rows, out)."""
    graph = GraphBuilder({"product": product})
    graph.input("x", FLOAT, ["rows", columns])
    graph.op("Identity", [graph.product("x", "product")], outputs=["y"])
    graph.output("y", ["rows", rows])
    return graph.serialised()


def _before_attention(graph: GraphBuilder, attention: Attention, found: str) -> tuple[str, str]:
    """What attention takes, and the gate's numbers, if there are some."""
    keys = attention.kv_heads * attention.width
    norms = attention.query_norm, attention.key_norm, attention.value_norm
    gate = ""
    if attention.is_interleaved:
        widths = [attention.attended, keys, keys]
        found = graph.op("Concat", _apart(graph, found, attention.kv_heads, widths), axis=-1)
    if attention.sees is not None:
        shared = graph.input("shared", FLOAT, [1, "rows", 2 * keys])
        q = graph.norm_heads(found, attention.query_norm, attention.heads, attention.width)
        return graph.op("Concat", [q, shared], axis=-1), gate
    if attention.latent is not None:
        return before_latents(graph, attention, attention.latent, found), gate
    if attention.normed_turned:
        return found, gate
    if norms == (None,) * 3 and attention.gate is None and not attention.shares_values:
        return found, gate
    if attention.gate_is_last and attention.gate is not None:
        numbers = attention.gate.heads or attention.attended
        found, gate = graph.split(found, [attention.projected, numbers])
        gate = _of_each_head(graph, gate, attention) if attention.gate.heads else gate
    is_beside = attention.gate is not None and not attention.gate_is_last
    wide = attention.attended * (2 if is_beside else 1)
    q, k, *rest = graph.split(found, [wide, keys, *([] if attention.shares_values else [keys])])
    v = graph.norm_heads(
        rest[0] if rest else k, attention.value_norm, attention.kv_heads, attention.width
    )
    if is_beside:
        q, gate = _apart(graph, q, attention.heads, [attention.attended] * 2)
    return graph.op("Concat", [*_normed(graph, attention, q, k), v], axis=-1), gate


def _of_each_head(graph: GraphBuilder, numbers: str, attention: Attention) -> str:
    """A number of each head for all of what that gives."""
    each = graph.op("Reshape", [numbers, graph.numbers(0, 0, attention.heads, 1)])
    ones = graph.constant(np.ones((1, 1, 1, attention.width), np.float32))
    wide = graph.op("Mul", [each, ones])
    return graph.op("Reshape", [wide, graph.numbers(0, 0, attention.attended)])


def _before_delta(graph: GraphBuilder, mixer: DeltaNet, found: str, rates: str) -> tuple[str, str]:
    """What a `DeltaNet` takes, and the gate's numbers."""
    keys, values = mixer.key_heads * mixer.key_width, mixer.attended
    if not mixer.is_interleaved:
        mixed, gate = graph.split(found, [mixer.mixed, values])
        return graph.op("Concat", [mixed, rates], axis=-1), gate
    q, k, v, gate = _apart(graph, found, mixer.key_heads, [keys, keys, values, values])
    return graph.op(
        "Concat", [q, k, v, *_apart(graph, rates, mixer.key_heads, [mixer.heads] * 2)], axis=-1
    ), gate


def _before_channels(
    graph: GraphBuilder, mixer: ChannelDeltaNet, found: str, rates: str
) -> tuple[str, str]:
    """What a `ChannelDeltaNet` takes, and the gate's numbers."""
    mixed, gated = graph.split(found, [mixer.mixed, mixer.inner])
    written, passing = graph.split(rates, [mixer.heads, mixer.inner])
    passed = graph.product(passing, FORGETTING)
    return graph.op("Concat", [mixed, written, passed], axis=-1), graph.product(gated, GATES)


def _apart(graph: GraphBuilder, x: str, heads: int, widths: Sequence[int]) -> list[str]:
    """`x` cut into parts of these widths, of which each head has its share beside the others'."""
    each = graph.op("Reshape", [x, graph.numbers(0, 0, heads, sum(widths) // heads)])
    parts = graph.split(each, [width // heads for width in widths])
    return [
        graph.op("Reshape", [part, graph.numbers(0, 0, width)])
        for part, width in zip(parts, widths, strict=True)
    ]


def _gated(graph: GraphBuilder, mixer: Mixer) -> str:
    """What the mixer gave, times its gate."""
    shape: list[int | str] = [1, "rows", mixer.attended]
    attended, gate = graph.input("attended", FLOAT, shape), mixer.gate
    if isinstance(mixer, Attention) and mixer.latent is not None:
        attended = behind_latents(graph, mixer, mixer.latent, attended)
    if gate is None:
        return attended
    numbers = graph.input("gate", FLOAT, shape)
    if gate.activation is not None:
        numbers = _activated(graph, numbers, gate.activation)
    if gate.norm is None:
        return graph.op("Mul", [attended, numbers])
    width = len(gate.norm.gamma)
    y = graph.op("Mul", [attended, numbers]) if gate.is_first else attended
    y = graph.norm_heads(y, gate.norm, mixer.attended // width, width)
    if gate.gamma is not None:
        y = graph.op("Mul", [y, graph.constant(gate.gamma)])
    return y if gate.is_first else graph.op("Mul", [y, numbers])


def _normed(graph: GraphBuilder, attention: Attention, q: str, k: str) -> tuple[str, str]:
    if attention.norm_whole:
        return graph.norm(q, attention.query_norm), graph.norm(k, attention.key_norm)
    width = attention.width
    return (
        graph.norm_heads(q, attention.query_norm, attention.heads, width),
        graph.norm_heads(k, attention.key_norm, attention.kv_heads, width),
    )


def _feed_forward(
    graph: GraphBuilder, part: FeedForward, x: str, first: str = UP, second: str = DOWN
) -> str:
    """`first` and `second` name its products."""
    up = graph.product(x, first)
    if part.xielu is not None:
        return graph.product(_xielu(graph, up, part.xielu), second)
    if not part.is_gated:
        return graph.product(_activated(graph, up, part.activation), second)
    gate, multiplied = graph.split(up, [part.width, part.width])
    active = graph.op("Mul", [_activated(graph, gate, part.activation), multiplied])
    return graph.product(active, second)


def _xielu(graph: GraphBuilder, x: str, by: Xielu) -> str:
    def number(value: float) -> str:
        return graph.constant(np.array(value, np.float32))

    above = graph.op("Mul", [graph.op("Mul", [x, x]), number(by.positive)])
    grown = graph.op("Exp", [graph.op("Min", [x, number(by.limit)])])
    below = graph.op("Sub", [graph.op("Sub", [grown, number(1.0)]), x])
    below = graph.op("Mul", [below, number(by.negative)])
    curve = graph.op("Where", [graph.op("Greater", [x, number(0.0)]), above, below])
    return graph.op("Add", [curve, graph.op("Mul", [x, number(by.beta)])])


def _of_inputs(graph: GraphBuilder, part: LayerInputs, x: str) -> str:
    """What is added for them."""
    inputs = graph.input("inputs", FLOAT, [1, "rows", part.width])
    y = _activated(graph, graph.product(x, INPUTS_GATE), part.activation)
    y = graph.product(graph.op("Mul", [y, inputs]), INPUTS_PROJECTION)
    return graph.norm(y, part.norm)


def _activated(graph: GraphBuilder, x: str, activation: str) -> str:
    if activation == "silu":
        return graph.op("QuickGelu", [x], contrib=True, alpha=1.0)
    if activation == "gelu_tanh":
        return graph.op("Gelu", [x], approximate="tanh")
    if activation == "squared_relu":
        positive = graph.op("Relu", [x])
        return graph.op("Mul", [positive, positive])
    names = {"gelu": "Gelu", "relu": "Relu", "sigmoid": "Sigmoid", "softplus": "Softplus"}
    return graph.op(names[activation], [x])
