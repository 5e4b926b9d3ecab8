"""A decoder layer as three ONNX graphs over onnxruntime's fused operators.

Before its mixer and behind it, rows of any sessions are computed together, as a matrix is read once
for all of them; the mixer is computed for one session at a time (`attention_graph`,
`recurrence_graph`).

- `front_model`: ``x`` (1, rows, hidden) to ``projected`` (1, rows, what the mixer takes), and to
  ``gate`` (1, rows, what it gives) where what it gives is multiplied by that.
- `back_model`: ``attended``, ``gate`` and ``x`` of the same rows to ``y``, as ``x``.

Floats are fp32 throughout.
Operators: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from mesh.shard.compiled import experts_graph
from mesh.shard.compiled.builder import (
    DOWN,
    FLOAT,
    OUTPUT,
    QKV,
    RATES,
    SHARED_DOWN,
    SHARED_UP,
    UP,
    GraphBuilder,
    Product,
)
from mesh.shard.compiled.parts import (
    Attention,
    DeltaNet,
    Experts,
    FeedForward,
    LayerParts,
    Mixer,
    ShortConvolution,
)


def front_model(parts: LayerParts, products: Mapping[str, Product]) -> bytes:
    """The serialised graph of what stands before the mixer.

    What it refers to is looked for in its products' folder.
    """
    graph, mixer = GraphBuilder(products), parts.mixer
    x = graph.norm(graph.input("x", FLOAT, [1, "rows", parts.hidden]), parts.before_mixer)
    found = graph.product(x, QKV)
    if isinstance(mixer, Attention):
        projected, gate = _before_attention(graph, mixer, found)
    elif isinstance(mixer, DeltaNet):
        mixed, gate = graph.split(found, [mixer.mixed, mixer.attended])
        projected = graph.op("Concat", [mixed, graph.product(x, RATES)], axis=-1)
    else:
        first, gate, second = graph.split(found, [mixer.width] * 3)
        projected = graph.op("Mul", [first, second])
    for name, value, width in (
        ("projected", projected, mixer.projected),
        ("gate", gate, mixer.attended),
    ):
        if value:
            graph.op("Identity", [value], outputs=[name])
            graph.output(name, [1, "rows", width])
    return graph.serialised()


def back_model(parts: LayerParts, products: Mapping[str, Product]) -> bytes:
    """The serialised graph of what stands behind the mixer; its products as in `front_model`."""
    graph, mixer = GraphBuilder(products), parts.mixer
    x = graph.input("x", FLOAT, [1, "rows", parts.hidden])
    y = graph.product(_gated(graph, mixer), OUTPUT)
    x = graph.add(x, parts.multiplier, graph.norm(y, parts.after_mixer))
    normed, part = graph.norm(x, parts.before_feed_forward), parts.feed_forward
    if isinstance(part, Experts):
        y = experts_graph.mixed(graph, part, normed, parts.hidden)
        if part.shared is not None:
            both = SHARED_UP, SHARED_DOWN
            y = graph.op("Add", [y, _feed_forward(graph, part.shared, normed, *both)])
    else:
        y = _feed_forward(graph, part, normed)
    y = graph.add(x, parts.multiplier, graph.norm(y, parts.after_feed_forward))
    graph.op("Identity", [y], outputs=["y"])
    graph.output("y", [1, "rows", parts.hidden])
    return graph.serialised()


def product_model(product: Product, rows: int, columns: int) -> bytes:
    """The serialised graph of one product: ``x`` (rows, columns) to ``y`` (rows, out)."""
    graph = GraphBuilder({"product": product})
    graph.input("x", FLOAT, ["rows", columns])
    graph.op("Identity", [graph.product("x", "product")], outputs=["y"])
    graph.output("y", ["rows", rows])
    return graph.serialised()


def _before_attention(graph: GraphBuilder, attention: Attention, found: str) -> tuple[str, str]:
    """What attention takes, and the gate's numbers, if there are some."""
    keys, width = attention.kv_heads * attention.width, attention.width
    norms, gate = (attention.query_norm, attention.key_norm), ""
    if norms == (None, None) and attention.gate is None:
        return found, gate
    wide = attention.attended * (1 if attention.gate is None else 2)
    q, k, v = graph.split(found, [wide, keys, keys])
    if attention.gate is not None:
        q = graph.op("Reshape", [q, graph.numbers(0, 0, attention.heads, 2 * width)])
        flat = graph.numbers(0, 0, attention.attended)
        q, gate = (graph.op("Reshape", [each, flat]) for each in graph.split(q, [width, width]))
    return graph.op("Concat", [*_normed(graph, attention, q, k), v], axis=-1), gate


def _gated(graph: GraphBuilder, mixer: Mixer) -> str:
    """What the mixer gave, times its gate."""
    shape: list[int | str] = [1, "rows", mixer.attended]
    attended = graph.input("attended", FLOAT, shape)
    if mixer.gate is None:
        return attended
    numbers = graph.input("gate", FLOAT, shape)
    if not isinstance(mixer, ShortConvolution):
        attended = graph.norm_heads(attended, mixer.gate.norm, mixer.heads, mixer.width)
    if mixer.gate.activation is not None:
        numbers = _activated(graph, numbers, mixer.gate.activation)
    return graph.op("Mul", [attended, numbers])


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
    if not part.is_gated:
        return graph.product(_activated(graph, up, part.activation), second)
    gate, multiplied = graph.split(up, [part.width, part.width])
    active = graph.op("Mul", [_activated(graph, gate, part.activation), multiplied])
    return graph.product(active, second)


def _activated(graph: GraphBuilder, x: str, activation: str) -> str:
    if activation == "silu":
        return graph.op("QuickGelu", [x], contrib=True, alpha=1.0)
    if activation == "gelu_tanh":
        return graph.op("Gelu", [x], approximate="tanh")
    return graph.op({"gelu": "Gelu", "relu": "Relu", "sigmoid": "Sigmoid"}[activation], [x])
