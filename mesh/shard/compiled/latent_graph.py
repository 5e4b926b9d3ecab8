"""Attention over latents (`mesh.shard.compiled.latent`), as graphs of onnxruntime.

- `before_latents` and `behind_latents` are the nodes before attention and behind it, for rows of
  any sessions.
- `latent_model` is the graph of attention, of one session: ``projected`` (1, rows, (heads + 1) *
  width), each head's query and then the key, with ``at`` (1,) int64, how many positions there were
  before, ``positions`` (1, rows or more) int64, where each row stands, ``rows`` (1,) int64,
  ``keys`` (1, 1, room, width), no fewer than `FEWEST_ROWS`, so that products over them are always
  cut at the same places, and, for layers that turn by position, ``cos`` and ``sin`` (positions,
  half the turned width) and ``growth`` (positions,), to ``attended`` (1, rows, heads * rank).
  ``new_keys`` is to be bound to the memory of ``keys``: the rows are written into it in place.

Floats are fp32 throughout. All heads share a key, so their queries are one matrix, of one row or of
several: a row has the same bits in whatever chunk it comes.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from mesh.shard.compiled.builder import FLOAT, LATENT_KEYS, LATENT_VALUES, QUERIES, GraphBuilder
from mesh.shard.compiled.latent import Latent
from mesh.shard.compiled.parts import Attention

_NEVER = np.array(-np.inf, np.float32)


def before_latents(graph: GraphBuilder, attention: Attention, latent: Latent, found: str) -> str:
    """What attention takes of what the first product has `found`."""
    norm, heads = latent.query_norm, attention.heads
    wide = heads * (latent.plain + latent.turned) if norm is None else len(norm.gamma)
    q, plain, turned = graph.split(found, [wide, latent.rank, latent.turned])
    if norm is not None:
        q = graph.product(graph.norm(q, norm), QUERIES)
    pieces = graph.split(q, [latent.plain, latent.turned] * heads)
    met = graph.each_product(pieces[0::2], LATENT_KEYS)
    queries = [part for both in zip(pieces[1::2], met, strict=True) for part in both]
    return graph.op("Concat", [*queries, turned, graph.norm(plain, latent.norm)], axis=-1)


def behind_latents(graph: GraphBuilder, attention: Attention, latent: Latent, attended: str) -> str:
    """The values of what was ``attended``, (1, rows, heads * value width)."""
    each = graph.split(attended, [latent.rank] * attention.heads)
    return graph.op("Concat", graph.each_product(each, LATENT_VALUES), axis=-1)


def latent_model(attention: Attention, latent: Latent) -> bytes:
    """The serialised graph of attention; the same bytes for layers that differ in weights only."""
    heads, width = attention.heads, attention.width
    graph = GraphBuilder({})
    x = graph.input("projected", FLOAT, [1, "rows", attention.projected])
    rows = graph.input("rows", TensorProto.INT64, [1])
    given = graph.input("positions", TensorProto.INT64, [1, "given"])
    positions = graph.op("Slice", [given, graph.numbers(0), rows, graph.numbers(1)])
    q, k = graph.split(x, [heads * width, width])
    if attention.table is not None:
        turning = [graph.input(name, FLOAT, ["table", "half"]) for name in ("cos", "sin")]
        q, k = (
            graph.op(
                "RotaryEmbedding",
                [x, *turning, positions],
                num_heads=n,
                rotary_embedding_dim=latent.turned,
                interleaved=int(attention.turns_pairs),
            )
            for x, n in ((q, heads), (k, 1))
        )
    if attention.growth is not None:
        factors = graph.op("Gather", [graph.input("growth", FLOAT, ["table"]), positions])
        q = graph.op("Mul", [q, graph.op("Unsqueeze", [factors, graph.numbers(2)])])
    seen, count = _seen(graph, k, width)
    q = graph.op("Reshape", [q, graph.numbers(-1, width)])
    q = graph.op("Mul", [q, graph.constant(np.array(attention.scale, np.float32))])
    scores = graph.op("MatMul", [q, graph.op("Transpose", [seen], perm=[1, 0])])
    shape = graph.op("Concat", [graph.numbers(-1, heads), count], axis=0)
    scores = graph.op("Reshape", [scores, shape])
    columns = graph.op("Range", [_scalar(graph, each) for each in (0, count, 1)])
    places = graph.op("Reshape", [positions, graph.numbers(-1, 1, 1)])
    is_seen = graph.op("LessOrEqual", [columns, places])
    scores = graph.op("Where", [is_seen, scores, graph.constant(_NEVER)])
    weights = graph.op("Softmax", [scores], axis=-1)
    weights = graph.op("Reshape", [weights, graph.op("Concat", [graph.numbers(-1), count], axis=0)])
    # What turned is added up as well: to leave it out would be to copy all latents.
    y = graph.op("MatMul", [weights, seen])
    y = graph.op("Slice", [y, graph.numbers(latent.turned), graph.numbers(width), graph.numbers(1)])
    flat = graph.numbers(1, -1, heads * latent.rank)
    graph.op("Reshape", [y, flat], outputs=["attended"])
    graph.output("attended", [1, "rows", heads * latent.rank])
    return graph.serialised()


def _seen(graph: GraphBuilder, k: str, width: int) -> tuple[str, str]:
    """The keys of all positions that there is room for once those of the rows are written, (count,
    width), and `count`, (1,)."""
    shape: list[int | str] = [1, 1, "room", width]
    new = graph.op("Reshape", [k, graph.numbers(1, 1, -1, width)])
    given = [graph.input("keys", FLOAT, shape), new, graph.input("at", TensorProto.INT64, [1])]
    written = graph.op("TensorScatter", given, outputs=["new_keys"], axis=-2)
    graph.output(written, shape)
    count = graph.op("Shape", [written], start=2, end=3)
    return graph.op("Reshape", [written, graph.numbers(-1, width)]), count


def _scalar(graph: GraphBuilder, value: int | str) -> str:
    if isinstance(value, int):
        return graph.constant(np.array(value, np.int64))
    return graph.op("Squeeze", [value])
