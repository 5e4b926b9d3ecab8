"""Attention of one session over its own keys and values, as graphs of onnxruntime.

- `attention_model`: ``projected`` of one session to ``attended`` (1, rows, heads * width), with
  ``last`` (1,) int32, where the last row stands, the padding's included, ``total`` () int32, one
  more than that, ``queries`` (1,) int32, how many rows attention takes, ``keys`` and ``values``
  (1, kv heads, room, width), ``padding`` (6,) int64 and ``rows`` (1,) int64 (see `padding`),
  and, for layers that turn by position, ``cos`` and ``sin`` (positions, half the turned width), and
  ``sinks`` (heads,) and ``growth`` (positions,) for those that have some. Its
  outputs ``new_keys`` and ``new_values`` are to be bound to the memory of ``keys`` and ``values``:
  the rows are written into them in place.
- `grouped_model`: the same where several queries share a key, or a window hides most of them:
  ``at`` (1,) int64 is how many positions there were before, ``end`` (1,) int64 where the last row
  stands, the padding's included, and one more, ``positions`` (1, rows and padding) int64 where each
  stands. Keys are multiplied where they lie, those that there is room for behind the end as well.
  Where queries and keys are normalised once they have turned, ``query_gamma`` and ``key_gamma``
  (width,).

Floats are fp32 throughout. The rows of a piece of a prompt, and one that comes by itself, are given
to kernels that add up in the same order: a row has the same bits in whatever chunk it comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from onnx import TensorProto

from mesh.shard.compiled.builder import FLOAT, GraphBuilder
from mesh.shard.compiled.parts import Attention
from mesh.shard.compiled.slots import FEWEST_ROWS, WIDE

_SINKS, _QUERIES = 11, 16
"""Which inputs of the attention operator are the sinks, and how many rows it takes of each
session."""

_LONGEST_WINDOW = 2048
"""Longer ones hide little of what most sessions have."""

_PART = 128
"""So many columns and rows of a matrix onnxruntime multiplies at a time; with fewer columns half of
them and twice as many rows, and so on (MlasGemm in
https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/mlas/lib/sgemm.cpp)."""

_GROUP = 2
"""Queries that share a key, from which on reading it once for all of them is worth it: the other
graph packs it for each."""


def padding(rows: int) -> int:
    """How many rows of zeros attention gets behind `rows` of each session, 0 or 1.

    It computes rows in tiles of an even number, and one that is alone in a tile by another kernel,
    with other last bits, than those that are not. With a row to keep it company its bits are the
    same in whatever chunk it comes; rounded to 8 bit behind it, they would otherwise differ by much
    more than the last. Its keys and values are written behind the session's end, where nothing is.
    """
    return rows % 2


def row_shape(rows: int) -> dict[str, torch.Tensor]:
    """What tells a graph how many rows there are, and how many attention gets beyond them."""
    return {
        "padding": torch.tensor([0, 0, 0, 0, padding(rows), 0]),
        "rows": torch.tensor([rows]),
    }


def attention_model(attention: Attention) -> bytes:
    """The serialised graph of attention; the same bytes for layers that differ in weights only."""
    heads, kv_heads, width = attention.heads, attention.kv_heads, attention.width
    graph = GraphBuilder({})
    projected = graph.input("projected", FLOAT, [1, "rows", attention.projected])
    projected = graph.op("Pad", [projected, graph.input("padding", TensorProto.INT64, [6])])
    if attention.growth is not None:
        q, rest = graph.split(projected, [heads * width, 2 * kv_heads * width])
        graph.input("positions", TensorProto.INT64, [1, "given"])
        projected = graph.op("Concat", [_grown(graph, q), rest], axis=-1)
    shape: list[int | str] = [1, kv_heads, "room", width]
    for name in ("keys", "values"):
        graph.input(name, FLOAT, shape)
        graph.output(f"new_{name}", shape)
    inputs = [projected, "", "", "keys", "values"]
    inputs.append(graph.input("last", TensorProto.INT32, [1]))
    inputs.append(graph.input("total", TensorProto.INT32, []))
    turns = attention.table is not None
    if turns:
        inputs += [graph.input(n, FLOAT, ["positions", "turned"]) for n in ("cos", "sin")]
    if attention.sinks is not None:
        inputs += [""] * (_SINKS - len(inputs)) + [graph.input("sinks", FLOAT, [heads])]
    inputs += [""] * (_QUERIES - len(inputs))
    inputs.append(graph.input("queries", TensorProto.INT32, [1]))
    y = graph.op(
        "GroupQueryAttention",
        inputs,
        outputs=["with_padding", "new_keys", "new_values"],
        contrib=True,
        num_heads=heads,
        kv_num_heads=kv_heads,
        scale=attention.scale,
        softcap=attention.softcap,
        local_window_size=attention.window or -1,
        do_rotary=int(turns),
        rotary_interleaved=int(attention.turns_pairs),
    )
    stop = graph.input("rows", TensorProto.INT64, [1])
    graph.op("Slice", [y, graph.numbers(0), stop, graph.numbers(1)], outputs=["attended"])
    graph.output("attended", [1, "rows", heads * width])
    return graph.serialised()


def may_group(attention: Attention) -> bool:
    """Whether `grouped_model` computes this attention, and a single row faster: 1.3 to 2 times as
    fast with 2 or 3 queries to a key, 2 to 2.8 times with 4 (AVX-512). The other multiplies what a
    window hides as well: behind 4000 positions five to twelve times as much as one of 512 shows."""
    if attention.latent is not None:
        return False
    if attention.window is not None:
        return FEWEST_ROWS <= attention.window <= _LONGEST_WINDOW
    return attention.sinks is None and attention.heads >= _GROUP * attention.kv_heads


def reach(attention: Attention) -> int | None:
    """How many keys before its own `grouped_model` takes for a row at most; None: all of them."""
    return None if attention.window is None else attention.window + _aligned(attention.width)


def grouped_model(attention: Attention, turned: int, *, alone: bool) -> bytes:
    """The serialised graph of attention that reads keys once for all queries that share them;
    `turned` numbers of each head turn by position.

    The operator of `attention_model` packs them for each query. Here a row that is `alone` gives a
    matrix of queries to each key head; of several rows each head has one of its own. The bits are
    the same where `lone_rows.is_grouped` says so.
    """
    heads, kv_heads, width = attention.heads, attention.kv_heads, attention.width
    graph = GraphBuilder({})
    x = graph.input("projected", FLOAT, [1, "rows", (heads + 2 * kv_heads) * width])
    if not alone:
        x = graph.op("Pad", [x, graph.input("padding", TensorProto.INT64, [6])])
    q, k, v = graph.split(x, [heads * width, kv_heads * width, kv_heads * width])
    if attention.table is not None or attention.window is not None:
        graph.input("positions", TensorProto.INT64, [1, "given"])
    if attention.table is not None:
        q, k = _turned(graph, attention, turned, q, k)
    if attention.normed_turned:
        q, k = _normed(graph, attention, q, k)
    at, end = (graph.input(name, TensorProto.INT64, [1]) for name in ("at", "end"))
    seen = []
    for name, new in (("keys", k), ("values", v)):
        shape: list[int | str] = [1, kv_heads, "room", width]
        given = [graph.input(name, FLOAT, shape), graph.by_head(new, kv_heads, width), at]
        written = graph.op("TensorScatter", given, outputs=[f"new_{name}"], axis=-2)
        graph.output(written, shape)
        seen.append(written)
    mask, count = "", end
    if attention.window is not None:
        # Wide heads are multiplied in parts, which are others with few keys; those behind the end
        # are not seen.
        stop = graph.op("Max", [end, graph.numbers(FEWEST_ROWS)]) if width > WIDE else end
        start = _first_seen(graph, attention.window, width, at)
        seen = [graph.op("Slice", [each, start, stop, graph.numbers(2)]) for each in seen]
        mask = _within(graph, attention.window, start, stop)
        count = graph.op("Sub", [end, start])
        if attention.sinks is not None:
            mask = _with_sinks(graph, attention, mask)
            count = graph.op("Add", [count, graph.numbers(1)])
            nothing = graph.constant(np.zeros((1, kv_heads, 1, width), np.float32))
            seen = [graph.op("Concat", [nothing, each], axis=2) for each in seen]
    given = [*seen, mask, "", "", count]
    (_attend_alone if alone else _attend_several)(graph, attention, q, given)
    graph.output("attended", [1, "rows", heads * width])
    return graph.serialised()


def _aligned(width: int) -> int:
    """Keys of heads of that width are multiplied by so many at a time: of those that a window hides
    whole parts can be left out, and the others are added up as ever."""
    columns = _PART
    while columns > _PART // 8 and columns // 2 >= width:
        columns //= 2
    return _PART * _PART // columns


def _first_seen(graph: GraphBuilder, window: int, width: int, at: str) -> str:
    """(1,): the first key that is taken, no later than the first one that any row sees."""
    part = graph.numbers(_aligned(width))
    first = graph.op("Max", [graph.op("Sub", [at, graph.numbers(window - 1)]), graph.numbers(0)])
    return graph.op("Mul", [graph.op("Div", [first, part]), part])


def _within(graph: GraphBuilder, window: int, start: str, stop: str) -> str:
    """(rows, keys) bool: which of the keys from `start` on are in the window of which row."""
    ends = [graph.op("Squeeze", [each]) for each in (start, stop)]
    columns = graph.op("Range", [*ends, graph.constant(np.array(1, np.int64))])
    places = graph.op("Reshape", ["positions", graph.numbers(-1, 1)])
    return graph.op("Greater", [columns, graph.op("Sub", [places, graph.numbers(window)])])


def _with_sinks(graph: GraphBuilder, attention: Attention, is_seen: str) -> str:
    """(1, heads, rows, keys and one): what is added to scores, for a key of zeros before the others
    what takes weight and gives nothing."""
    hidden, shown = (graph.constant(np.array(each, np.float32)) for each in (-np.inf, 0))
    scores = graph.op("Where", [is_seen, shown, hidden])
    heads, one = graph.numbers(1, attention.heads), graph.numbers(1)
    of_keys = graph.op("Concat", [heads, graph.op("Shape", [is_seen])], axis=0)
    of_sinks = graph.op("Concat", [heads, graph.op("Shape", [is_seen], end=1), one], axis=0)
    sinks = graph.input("sinks", FLOAT, [attention.heads])
    sinks = graph.op("Reshape", [sinks, graph.numbers(1, -1, 1, 1)])
    parts = [graph.op("Expand", [sinks, of_sinks]), graph.op("Expand", [scores, of_keys])]
    return graph.op("Concat", parts, axis=3)


def _turned(
    graph: GraphBuilder, attention: Attention, turned: int, q: str, k: str
) -> tuple[str, str]:
    """Queries and keys turned by position, as far as `turned` says."""
    turning = [graph.input(name, FLOAT, ["table", "half"]) for name in ("cos", "sin")]
    turning.append("positions")
    if attention.growth is not None:
        q = _grown(graph, q)
    whole = 0 if turned == attention.width else turned
    q, k = (
        graph.op(
            "RotaryEmbedding",
            [x, *turning],
            num_heads=n,
            rotary_embedding_dim=whole,
            interleaved=int(attention.turns_pairs),
        )
        for x, n in ((q, attention.heads), (k, attention.kv_heads))
    )
    return q, k


def _normed(graph: GraphBuilder, attention: Attention, q: str, k: str) -> tuple[str, str]:
    """Queries and keys normalised by what ``query_gamma`` and ``key_gamma`` (width,) have."""
    width = attention.width
    q_gamma, k_gamma = (graph.input(f"{of}_gamma", FLOAT, [width]) for of in ("query", "key"))
    return (
        graph.norm_heads(q, attention.query_norm, attention.heads, width, q_gamma),
        graph.norm_heads(k, attention.key_norm, attention.kv_heads, width, k_gamma),
    )


def _grown(graph: GraphBuilder, q: str) -> str:
    """Queries times what ``growth`` (positions,) has for where they stand."""
    factors = graph.op("Gather", [graph.input("growth", FLOAT, ["table"]), "positions"])
    return graph.op("Mul", [q, graph.op("Unsqueeze", [factors, graph.numbers(2)])])


def _attend_alone(graph: GraphBuilder, attention: Attention, q: str, given: Sequence[str]) -> None:
    """A row: the queries that share a key are rows of a matrix, as many as `padding` asks for.
    `given` are keys, values, what a window shows of them, and, last, how many there are."""
    share = attention.heads // attention.kv_heads
    q = graph.op("Reshape", [q, graph.numbers(1, attention.kv_heads, share, attention.width)])
    if more := padding(share):
        q = graph.op("Pad", [q, graph.numbers(0, 0, 0, 0, 0, 0, more, 0)])
    keys, values, mask, *rest = given
    if attention.sinks is not None:
        mask = graph.op("Reshape", [mask, graph.numbers(1, attention.kv_heads, share, -1)])
        if more:
            mask = graph.op("Pad", [mask, graph.numbers(0, 0, 0, 0, 0, 0, more, 0)])
    elif mask:  # the same for each of them
        counted = graph.op("Shape", [mask], start=1)
        shape = graph.op("Concat", [graph.numbers(share + more), counted], axis=0)
        mask = graph.op("Expand", [mask, shape])
    y = graph.op(
        "Attention", [q, keys, values, mask, *rest],
        is_causal=0, scale=attention.scale, softcap=attention.softcap,
    )  # fmt: skip
    if more:
        y = graph.op("Slice", [y, graph.numbers(0), graph.numbers(share), graph.numbers(2)])
    flat = graph.numbers(1, 1, attention.heads * attention.width)
    graph.op("Reshape", [y, flat], outputs=["attended"])


def _attend_several(
    graph: GraphBuilder, attention: Attention, q: str, given: Sequence[str]
) -> None:
    """Rows that see one another as well; `given` as in `_attend_alone`."""
    q = graph.by_head(q, attention.heads, attention.width)
    y = graph.op(
        "Attention", [q, *given],
        is_causal=1, scale=attention.scale, softcap=attention.softcap,
    )  # fmt: skip
    y = graph.op("Transpose", [y], perm=[0, 2, 1, 3])
    y = graph.op("Reshape", [y, graph.numbers(1, -1, attention.heads * attention.width)])
    rows = graph.input("rows", TensorProto.INT64, [1])
    graph.op("Slice", [y, graph.numbers(0), rows, graph.numbers(1)], outputs=["attended"])
