"""A decoder layer as three ONNX graphs over onnxruntime's fused operators.

Before attention and behind it, rows of any sessions are computed together, as a matrix is read once
for all of them; attention is computed for one session at a time (`attention_graph`).

- `front_model`: ``x`` (1, rows, hidden) to ``projected`` (1, rows, (heads + 2 kv heads) * width).
- `back_model`: ``attended`` and ``x`` of the same rows to ``y``, as ``x``.

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
    SHARED_DOWN,
    SHARED_UP,
    UP,
    GraphBuilder,
    Product,
)
from mesh.shard.compiled.parts import Attention, Experts, FeedForward, LayerParts


def front_model(parts: LayerParts, products: Mapping[str, Product]) -> bytes:
    """The serialised graph of what stands before attention.

    What it refers to is looked for in its products' folder.
    """
    graph, attention = GraphBuilder(products), parts.attention
    x = graph.norm(graph.input("x", FLOAT, [1, "rows", parts.hidden]), parts.before_attention)
    projected = graph.product(x, QKV)
    keys = attention.kv_heads * attention.width
    queries = attention.heads * attention.width
    if attention.query_norm is not None or attention.key_norm is not None:
        q, k, v = graph.split(projected, [queries, keys, keys])
        projected = graph.op("Concat", [*_normed(graph, attention, q, k), v], axis=-1)
    graph.op("Identity", [projected], outputs=["projected"])
    graph.output("projected", [1, "rows", queries + 2 * keys])
    return graph.serialised()


def back_model(parts: LayerParts, products: Mapping[str, Product]) -> bytes:
    """The serialised graph of what stands behind attention; its products as in `front_model`."""
    graph, attention = GraphBuilder(products), parts.attention
    x = graph.input("x", FLOAT, [1, "rows", parts.hidden])
    attended: list[int | str] = [1, "rows", attention.heads * attention.width]
    y = graph.product(graph.input("attended", FLOAT, attended), OUTPUT)
    x = graph.add(x, parts.multiplier, graph.norm(y, parts.after_attention))
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
    return graph.op({"gelu": "Gelu", "relu": "Relu"}[activation], [x])
