"""What a copy of a model will do where it is to lie: time of a token, first token, bottleneck.

One stream passes its hops one after the other, so a token takes the sum of all of them; several
streams keep them busy at once. Prompts flow in chunks, one hop behind the other. Plain arithmetic
on benches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mesh.routing.fitting import HOP_MS, PREFILL_ROWS, Bench, Need, head_ms
from mesh.routing.machines import ITEMSIZE, Machine, ModelShape, Quant
from mesh.types import LayerRange, NodeId

_CHUNK_ROWS = 128
_WIRE_ITEMSIZE = 2
"""fp16, or bf16."""

_CABLE_MS = 1.0
"""A way that takes longer is no wire."""


@dataclass(frozen=True, slots=True)
class Placed:
    """One shard of a layout: layers on a device, what they need, what there is, what they cost.

    Its caches are for `positions`. `have` is what they may take there. `decode_ms` is computing a
    token, `hop_ms` the way there and back; `fetch_bytes` have to be brought there first. With
    `gap`, what the node serves of the model has to go before, as both do not fit.
    """

    node_id: NodeId
    node: str
    device: str
    format: str
    layers: LayerRange
    positions: int
    need: Need
    have: int
    decode_ms: float
    hop_ms: float
    fetch_bytes: int
    gap: bool


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What takes most of a token's time, ``computing``, ``way``, ``head`` or ``asker``; what would
    help."""

    what: str
    node: str
    ms: float
    share: float
    help: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """One copy: its shards in layer order, and what an asker gets of it.

    `token_ms` is one stream's, of which `head_ms` and, besides the head, `asker_ms` pass at the
    asker; `all_tokens_per_second` is that of all wished streams together. `first_token_ms` is after
    a prompt of 512 tokens.
    """

    shards: tuple[Placed, ...]
    token_ms: float
    head_ms: float
    asker_ms: float
    tokens_per_second: float
    all_tokens_per_second: float
    first_token_ms: float
    bottleneck: Bottleneck


Parts = Sequence[tuple[Bench, LayerRange]]


def forecast(
    model: ModelShape, parts: Parts, asker: Machine | None, quant: Quant, streams: int
) -> Forecast:
    """Of this copy; `asker` is where the ends are, if that is known."""
    head, beside = _at_asker(model, asker, quant)
    own = head + beside
    shards = tuple(_placed(model, bench, layers) for bench, layers in parts)
    token_ms = own + sum(each.decode_ms + each.hop_ms for each in shards)
    return Forecast(
        shards,
        token_ms,
        head,
        beside,
        1000 / token_ms,
        _together(parts, own, streams),
        _first_token(model, parts, own),
        _bottleneck(model, parts, shards, (head, beside), asker),
    )


def _at_asker(model: ModelShape, asker: Machine | None, quant: Quant) -> tuple[float, float]:
    """Milliseconds of a token at the asker: of the head, and besides."""
    if asker is None:
        return 0.0, 0.0
    head = head_ms(model, asker, quant)
    if asker.asked_ms is None:
        return head, asker.asker_ms
    return min(head, asker.asked_ms), max(0.0, asker.asked_ms - head)


def with_one_more(parts: Parts, extra: Bench, most_layers: int) -> float:
    """Milliseconds by which a token would change if `extra` took some layers, at best.

    The layers come from those that take longest, whole shards of them where it has room: between
    that the cost is a straight line.
    """
    ms = sum(extra.decode_ms) / len(extra.decode_ms)
    dearest = sorted(parts, key=lambda part: -_each(*part))
    first = extra.hop_ms + ms - _each(*dearest[0])
    if len(dearest[0][1]) == 1:
        first -= dearest[0][0].hop_ms
    found, saved, taken = [first], 0.0, 0
    for bench, layers in dearest:
        fits = min(len(layers), most_layers - taken)
        taken += fits
        saved += fits * _each(bench, layers) + (bench.hop_ms if fits == len(layers) else 0.0)
        found.append(extra.hop_ms + ms * taken - saved)
        if taken == most_layers:
            break
    return min(found)


def _each(bench: Bench, layers: LayerRange) -> float:
    return sum(bench.decode_ms[layers.start : layers.stop]) / len(layers)


def _placed(model: ModelShape, bench: Bench, layers: LayerRange) -> Placed:
    need = bench.need(layers)
    return Placed(
        bench.machine.node_id,
        bench.machine.name,
        bench.device.name,
        bench.format,
        layers,
        bench.positions,
        need,
        bench.have_bytes,
        sum(bench.decode_ms[layers.start : layers.stop]),
        bench.hop_ms,
        bench.fetched(layers),
        gap=need.total > bench.have_bytes - bench.replaces(layers),
    )


def _step_ms(bench: Bench, layers: LayerRange, rows: float) -> float:
    """A decode step of several streams' rows: weights are read once, rows are computed each."""
    one = sum(bench.decode_ms[layers.start : layers.stop])
    per_row = sum(bench.prefill_ms[layers.start : layers.stop]) / PREFILL_ROWS
    return max(one, rows * min(one, per_row))


def _together(parts: Parts, head: float, streams: int) -> float:
    """Tokens a second of all streams: in as many groups as there are hops, one behind the other."""
    groups = min(streams, len(parts))
    rows = streams / groups
    stages = [_step_ms(bench, layers, rows) for bench, layers in parts]
    round_ms = head * rows + sum(stages) + sum(bench.hop_ms for bench, _ in parts)
    slowest = max([*(s + HOP_MS for s in stages), head * rows])
    return streams * 1000 / max(round_ms, groups * slowest)


def _first_token(model: ModelShape, parts: Parts, head: float) -> float:
    """Milliseconds until the first token of 512: the first chunk through all, then the slowest."""
    chunks = PREFILL_ROWS / _CHUNK_ROWS
    chunk_bytes = _CHUNK_ROWS * model.row_size * _WIRE_ITEMSIZE
    stages = [
        sum(bench.prefill_ms[layers.start : layers.stop]) / chunks
        + 2 * chunk_bytes / bench.machine.mb_s / 1e3
        for bench, layers in parts
    ]
    ways = sum(bench.hop_ms for bench, _ in parts)
    return sum(stages) + (chunks - 1) * max(stages) + ways + head


def _bottleneck(
    model: ModelShape,
    parts: Parts,
    shards: Sequence[Placed],
    at_asker: tuple[float, float],
    asker: Machine | None,
) -> Bottleneck:
    head, beside = at_asker
    total = head + beside + sum(each.decode_ms + each.hop_ms for each in shards)
    here = asker.name if asker is not None else ""
    found = [
        ("head", here, head, "A machine with faster memory as the asker."),
        ("asker", here, beside, "A machine with a faster processor as the asker."),
    ]
    for (bench, _), shard in zip(parts, shards, strict=True):
        computing = " ".join(_quicker(model, parts, bench, shard))
        found.append(("computing", shard.node, shard.decode_ms, computing))
        help_ = _nearer(bench.machine.rtt_ms, shard, shards)
        found.append(("way", shard.node, shard.hop_ms, help_))
    what, name, ms, text = max(found, key=lambda each: each[2])
    return Bottleneck(what, name, ms, ms / total, text)


def _quicker(model: ModelShape, parts: Parts, bench: Bench, shard: Placed) -> Iterator[str]:
    """What would make a shard's computing take less."""
    fewer = bench.device.speed("int8")
    if shard.format not in ("int8", "int4") and fewer is not None and "int8" in model.quants:
        each = model.layer_read or model.layer_weights
        weights = sum(each[shard.layers.start : shard.layers.stop])
        read = weights * ITEMSIZE["int8"] / fewer.decode_gb_s / 1e6
        ms = read + len(shard.layers) * fewer.layer_ms
        if ms < 0.8 * shard.decode_ms:
            yield f"--quant int8: {ms:.1f} instead of {shard.decode_ms:.1f} ms there."
    own = shard.decode_ms / len(shard.layers)
    best, layers = min(parts, key=lambda part: _each(*part))
    if best is not bench and _each(best, layers) < 0.8 * own:
        yield (
            f"More free memory at {best.machine.name}: a layer takes {_each(best, layers):.2f} ms"
            f" there, {own:.2f} at {shard.node}."
        )
    else:
        yield "A machine with faster memory."


def _nearer(rtt_ms: float, shard: Placed, shards: Sequence[Placed]) -> str:
    if rtt_ms > _CABLE_MS:
        return f"A cable to {shard.node}: wired ways take 0.3 ms."
    if len(shards) > 1:
        return "Fewer machines, with more memory each."
    return "Guessed tokens (draft_tokens): a step then says several."
