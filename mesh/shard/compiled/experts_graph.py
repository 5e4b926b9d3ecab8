"""The nodes of a mixture of experts.

In few bits the experts are one operator, ``QMoE``; as they are, which is for proofs, all of them
are computed for every row and those that were not chosen count nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mesh.shard.compiled.builder import DOWN, INT8_PRODUCTS, UP, GraphBuilder
from mesh.shard.compiled.experts import Experts, Groups, Router
from mesh.shard.compiled.formats import BLOCK, BlockMatrix
from mesh.shard.compiled.parts_reader import NotCompilable

_NEVER = np.array(-1e30, np.float32)
"""Less than any score."""
_IN_TURNS, _AS_THEY_LIE = 1, 0
"""Of the operator's attributes: rows of gate and of its factor in turns; codes as ours are."""


def mixed(graph: GraphBuilder, experts: Experts, x: str, hidden: int) -> str:
    """(1, rows, hidden) through the experts of each row. Raises NotCompilable."""
    if not experts.is_gated:
        raise NotCompilable("its experts have no gate")
    rows = graph.op("Reshape", [x, graph.numbers(-1, hidden)])
    choice, scores = _scored(graph, experts.router, rows)
    if isinstance(graph.product_of(UP).matrix, torch.Tensor):
        y = _all_of_them(graph, experts, rows, choice, scores)
    else:
        y = _in_few_bits(graph, experts, rows, choice, scores)
    if (scale := experts.router.scale * experts.scale) != 1.0:
        y = graph.op("Mul", [y, graph.constant(np.array(scale, np.float32))])
    return graph.op("Reshape", [y, graph.numbers(1, -1, hidden)])


def _scored(graph: GraphBuilder, router: Router, rows: str) -> tuple[str, str]:
    """(rows, experts): by what experts are chosen, and what the chosen ones count."""
    logits = graph.op("MatMul", [rows, graph.constant(router.weight.t())])
    if router.bias is not None:
        logits = graph.op("Add", [logits, graph.constant(router.bias)])
    if router.softcap:
        cap = graph.constant(np.array(router.softcap, np.float32))
        logits = graph.op("Mul", [graph.op("Tanh", [graph.op("Div", [logits, cap])]), cap])
    if router.is_sigmoid:
        scores = graph.op("Sigmoid", [logits])
    else:
        scores = graph.op("Softmax", [logits], axis=-1)
    choice = scores
    if router.correction is not None:
        choice = graph.op("Add", [scores, graph.constant(router.correction)])
    if router.groups is not None:
        choice = _of_groups(graph, router.groups, choice, len(router.weight))
    is_plain = not router.is_sigmoid and choice == scores
    return logits if is_plain else choice, scores


def _of_groups(graph: GraphBuilder, groups: Groups, choice: str, experts: int) -> str:
    """By what experts are chosen, and nothing where one is of a group that is not kept."""
    shape = graph.numbers(-1, groups.count, experts // groups.count)
    apart = graph.op("Reshape", [choice, shape])
    best, _ = graph.outputs("TopK", [apart, graph.numbers(groups.best)], 2, axis=-1, largest=1)
    scores = graph.op("ReduceSum", [best, graph.numbers(-1)], keepdims=0)
    kept, _ = graph.outputs("TopK", [scores, graph.numbers(groups.kept)], 2, axis=-1, largest=1)
    least = graph.op("ReduceMin", [kept, graph.numbers(-1)], keepdims=1)
    is_kept = graph.op("GreaterOrEqual", [scores, least])
    is_kept = graph.op("Unsqueeze", [is_kept, graph.numbers(2)])
    apart = graph.op("Where", [is_kept, apart, graph.constant(_NEVER)])
    return graph.op("Reshape", [apart, graph.numbers(-1, experts)])


def _in_few_bits(graph: GraphBuilder, experts: Experts, rows: str, choice: str, scores: str) -> str:
    up, down = graph.blocks(UP, experts.count), graph.blocks(DOWN, experts.count)
    matrix = graph.product_of(UP).matrix
    assert isinstance(matrix, BlockMatrix)  # noqa: S101 - says the caller
    limited: dict[str, Any] = {} if experts.limit is None else {"swiglu_limit": experts.limit}
    inputs = [
        rows, choice, *up[:2], _bias(graph, UP, experts.count), *down[:2],
        _bias(graph, DOWN, experts.count), "", "", "", up[2], down[2], "", scores,
    ]  # fmt: skip
    return graph.op(
        "QMoE",
        inputs,
        contrib=True,
        k=experts.router.count,
        activation_type="swiglu",
        swiglu_fusion=_IN_TURNS,
        activation_alpha=experts.slope,
        activation_beta=experts.shift,
        normalize_routing_weights=int(experts.router.normalises),
        expert_weight_bits=matrix.bits,
        block_size=BLOCK,
        accuracy_level=INT8_PRODUCTS,
        weights_prepacked=_AS_THEY_LIE,
        **limited,
    )


def _bias(graph: GraphBuilder, name: str, experts: int) -> str:
    bias = graph.product_of(name).bias
    return "" if bias is None else graph.constant(bias.view(experts, -1))


def _all_of_them(graph: GraphBuilder, experts: Experts, rows: str, choice: str, scores: str) -> str:
    kept, _ = graph.outputs(
        "TopK", [choice, graph.numbers(experts.router.count)], 2, axis=-1, largest=1
    )
    least = graph.op("ReduceMin", [kept, graph.numbers(-1)], keepdims=1)
    chosen = graph.op("Cast", [graph.op("GreaterOrEqual", [choice, least])], to=1)
    counts = graph.op("Mul", [scores, chosen])
    if experts.router.normalises:
        total = graph.op("ReduceSum", [counts, graph.numbers(-1)], keepdims=1)
        counts = graph.op("Div", [counts, total])
    both = _dense(graph, UP, experts.count, graph.op("Unsqueeze", [rows, graph.numbers(0)]))
    apart = graph.op("Reshape", [both, graph.numbers(experts.count, -1, experts.width, 2)])
    gate, multiplied = (
        graph.op("Squeeze", [part, graph.numbers(-1)]) for part in graph.split(apart, [1, 1])
    )
    if experts.limit is not None:
        low, high = (
            graph.constant(np.array(each, np.float32)) for each in (-experts.limit, experts.limit)
        )
        gate = graph.op("Min", [gate, high])
        multiplied = graph.op("Clip", [multiplied, low, high])
    active = graph.op("QuickGelu", [gate], contrib=True, alpha=experts.slope)
    shifted = graph.op("Add", [multiplied, graph.constant(np.array(experts.shift, np.float32))])
    each = _dense(graph, DOWN, experts.count, graph.op("Mul", [active, shifted]))
    weights = graph.op(
        "Unsqueeze", [graph.op("Transpose", [counts], perm=[1, 0]), graph.numbers(-1)]
    )
    return graph.op("ReduceSum", [graph.op("Mul", [each, weights]), graph.numbers(0)], keepdims=0)


def _dense(graph: GraphBuilder, name: str, experts: int, x: str) -> str:
    """(1 or experts, rows, columns) times the matrix of each expert: (experts, rows, out)."""
    product = graph.product_of(name)
    assert isinstance(product.matrix, torch.Tensor)  # noqa: S101 - says the caller
    matrices = product.matrix.detach().float()
    matrices = matrices.view(experts, len(matrices) // experts, -1).transpose(1, 2)
    y = graph.op("MatMul", [x, graph.constant(matrices.contiguous())])
    if product.bias is None:
        return y
    return graph.op("Add", [y, graph.constant(product.bias.view(experts, 1, -1))])
