"""Mixers that keep a running state, of one session, as graphs of onnxruntime.

``projected`` of one session to ``attended`` (1, rows, width), with ``conv`` (1, taps - 1,
channels), the last inputs of its convolution, and, but for a `ShortConvolution`, ``state`` (1,
heads, key width, width). Outputs ``new_conv`` and ``new_state`` are what those become; they may be
bound to the same memory. What differs from layer to layer is an input as well (`tables_of`), so
that layers of one shape share a graph. Floats are fp32 throughout; a row has the same bits in
whatever chunk it comes.
"""

from __future__ import annotations

import torch

from mesh.shard.compiled.builder import FLOAT, GraphBuilder
from mesh.shard.compiled.recurrences import (
    UNIT_EPSILON,
    ChannelDeltaNet,
    DeltaNet,
    Recurrence,
    ShortConvolution,
    StateSpace,
)
from mesh.shard.compiled.slots import StateShapes


def tables_of(mixer: Recurrence) -> dict[str, torch.Tensor]:
    """The inputs of its graph that are always the same."""
    taps = {"taps": mixer.convolution.taps}
    if (bias := mixer.convolution.bias) is not None:
        taps["bias"] = bias
    if isinstance(mixer, ShortConvolution):
        return taps
    tables = {**taps, "steps": mixer.steps, "decay": mixer.decay}
    if isinstance(mixer, StateSpace):  # each number of a head, that they need not be spread
        tables["passed"] = mixer.passed.repeat_interleave(mixer.width)
    return tables


def states_of(mixer: Recurrence) -> StateShapes:
    """What it keeps, by the names of its graph."""
    conv = ("conv", mixer.convolution.state)
    if isinstance(mixer, ShortConvolution):
        return StateShapes((conv,))
    return StateShapes((conv, ("state", (1, mixer.heads, mixer.key_width, mixer.width))))


def recurrence_model(mixer: Recurrence) -> bytes:
    """The serialised graph; the same bytes for layers that differ in weights only."""
    graph = GraphBuilder({})
    x = graph.input("projected", FLOAT, [1, "rows", mixer.projected])
    for name, shape in states_of(mixer).of:
        graph.input(name, FLOAT, shape)
        graph.output(f"new_{name}", shape)
    for name, table in tables_of(mixer).items():
        graph.input(name, FLOAT, table.shape)
    if isinstance(mixer, ShortConvolution):
        _convolved(graph, mixer, x, "attended", "none")
    elif isinstance(mixer, DeltaNet | ChannelDeltaNet):
        _by_delta_rule(graph, mixer, x)
    else:
        _selectively(graph, mixer, x)
    graph.output("attended", [1, "rows", mixer.attended])
    return graph.serialised()


def _convolved(graph: GraphBuilder, mixer: Recurrence, x: str, y: str, activation: str) -> str:
    bias = "" if mixer.convolution.bias is None else "bias"
    return graph.op(
        "CausalConvWithState", [x, "taps", bias, "conv"], outputs=[y, "new_conv"],
        contrib=True, activation=activation, channels_last=1,
    )  # fmt: skip


def _by_delta_rule(graph: GraphBuilder, mixer: DeltaNet | ChannelDeltaNet, x: str) -> None:
    heads, key_heads, width = mixer.heads, mixer.key_heads, mixer.key_width
    passing = mixer.projected - mixer.mixed - heads
    mixed, written, passed = graph.split(x, [mixer.mixed, heads, passing])
    mixed = _convolved(graph, mixer, mixed, "convolved", "silu")
    q, k, v = graph.split(mixed, [key_heads * width, key_heads * width, mixer.attended])
    normed = [_unit_heads(graph, mixer, each) for each in (q, k)]
    if isinstance(mixer, DeltaNet):
        graph.op(
            "LinearAttentionGate", [passed, "steps", "decay", written],
            outputs=["decays", "rates"], contrib=True,
        )  # fmt: skip
    else:
        steps = graph.op("Softplus", [graph.op("Add", [passed, "steps"])])
        graph.op("Mul", [steps, "decay"], outputs=["decays"])
        graph.op("Sigmoid", [written], outputs=["rates"])
    graph.op(
        "LinearAttention", [*normed, v, "state", "decays", "rates"],
        outputs=["attended", "new_state"], contrib=True,
        q_num_heads=heads, kv_num_heads=heads, update_rule="gated_delta",
    )  # fmt: skip


def _selectively(graph: GraphBuilder, mixer: StateSpace, x: str) -> None:
    heads, keys = mixer.heads, mixer.groups * mixer.key_width
    mixed, steps = graph.split(x, [mixer.mixed, heads])
    mixed = _convolved(graph, mixer, mixed, "convolved", "silu")
    values, written, read = graph.split(mixed, [mixer.attended, keys, keys])
    steps = graph.op("Softplus", [graph.op("Add", [steps, "steps"])])
    decays = graph.op("Mul", [steps, "decay"])
    apart = graph.op("Reshape", [values, graph.numbers(1, -1, heads, mixer.width)])
    scaled = graph.op("Mul", [apart, graph.op("Unsqueeze", [steps, graph.numbers(3)])])
    scaled = graph.op("Reshape", [scaled, graph.numbers(1, -1, mixer.attended)])
    both = [_spread(graph, each, mixer.groups, heads, mixer.key_width) for each in (read, written)]
    y = graph.op(
        "LinearAttention", [*both, scaled, "state", decays], outputs=["seen", "new_state"],
        contrib=True, q_num_heads=heads, kv_num_heads=heads, update_rule="gated", scale=1.0,
    )  # fmt: skip
    graph.op("Add", [y, graph.op("Mul", [values, "passed"])], outputs=["attended"])


def _unit_heads(graph: GraphBuilder, mixer: DeltaNet | ChannelDeltaNet, x: str) -> str:
    """Each head of queries or keys one long, as often as values share it."""
    width = mixer.key_width
    x = graph.op("Reshape", [x, graph.numbers(1, -1, mixer.key_heads, width)])
    # x / sqrt(sum of squares + epsilon), as root mean squares of so many numbers have it.
    scale = graph.constant(torch.full((width,), width**-0.5))
    epsilon = UNIT_EPSILON / width
    x = graph.op("SimplifiedLayerNormalization", [x, scale], axis=-1, epsilon=epsilon)
    return _spread(graph, x, mixer.key_heads, mixer.heads, width)


def _spread(graph: GraphBuilder, x: str, few: int, heads: int, width: int) -> str:
    """(1, rows, heads * width), of which each of a `few` heads is as many side by side."""
    if heads != few:
        x = graph.op("Reshape", [x, graph.numbers(1, -1, few, 1, width)])
        x = graph.op("Expand", [x, graph.numbers(1, 1, 1, heads // few, 1)])
    return graph.op("Reshape", [x, graph.numbers(1, -1, heads * width)])
