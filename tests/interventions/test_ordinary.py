"""Forwards that are not looked at operation by operation: which they are, what is held for them.

The messages are those that an unmodified trace sends; each case changes one thing about them.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nnsight.modeling.transformers import TransformersModel

from mesh.codec import convert
from mesh.shard.taps import codec
from mesh.shard.taps.guard import OperationGuard
from mesh.shard.taps.messages import TapRequest
from mesh.shard.taps.meter import MemoryMeter
from mesh.shard.taps.ordinary import Widths, room_of
from mesh.shard.taps.session import TapLimits
from tests.checkpoints import FAMILIES
from tests.interventions.worlds import SPLITS, DirectChannel, Remote, remote, tree

LOOKED_AT = {"gpt2"}
"""Families whose loop passes to its layers what not every model does."""
PROMPT = torch.arange(3, 27).view(1, 24)


def logits(model: TransformersModel, prompt: torch.Tensor = PROMPT) -> torch.Tensor:
    with model.trace({"input_ids": prompt}):
        found: torch.Tensor = model.output.logits.save()
    return found


def heard(world: Remote) -> list[dict[str, Any]]:
    """The headers of all messages from now on."""
    headers: list[dict[str, Any]] = []
    channel = world.channel
    send = type(channel).call

    class Hearing(DirectChannel):
        def call(self, hop: int, message: bytes) -> bytes:
            headers.append(codec.unpack(message)[0])
            return send(self, hop, message)

    channel.__class__ = Hearing
    return headers


def asked(header: dict[str, Any]) -> Any:
    """What a shard reads in it."""
    return convert(header, TapRequest)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operations that were looked at."""
    names: list[str] = []
    look = OperationGuard.__torch_dispatch__

    def looking(self: OperationGuard, func: Any, *rest: Any, **named: Any) -> Any:
        names.append(func.name())
        return look(self, func, *rest, **named)

    monkeypatch.setattr(OperationGuard, "__torch_dispatch__", looking)
    return names


def test_a_trace_that_only_saves_what_comes_out_is_not_looked_at(watched: list[str]) -> None:
    world = remote("llama", 2)
    logits(world.model)
    assert watched == []


def test_from_the_first_value_that_the_job_gives_back_on_everything_is_looked_at(
    watched: list[str],
) -> None:
    world = remote("llama", 1)
    model = world.model
    with model.trace({"input_ids": PROMPT}):
        model.model.layers[2].output[:] = 0
        model.output.logits.save()
    assert "aten::mm" in " ".join(watched)
    watched.clear()
    logits(model)  # nor is a later one of the same session taken on trust
    assert "aten::mm" in " ".join(watched)


def edit(path: tuple[Any, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        place: Any = header
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


_PAIRS = ("value", 1, 1, 1, 0, 1, 1, 1)
"""Where the keyword arguments of the first call are."""


def keyword(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        place: Any = header
        for step in _PAIRS:
            place = place[step]
        place[:] = [pair for pair in place if pair[0] != name] + [[name, value]]

    return change


def fresh(*shape: int, dtype: str = "fp32", tag: int = 900, joint: int = 0) -> list[Any]:
    return [0, tag, joint, [dtype, list(shape)]]


EXTRAORDINARY: dict[str, Callable[[dict[str, Any]], None]] = {
    "another operation": lambda header: header.update(op="call", path="0.mlp"),
    "outputs kept": edit(("capture",), ["attentions"]),
    "tensors changed": edit(("changed",), [fresh(1, 24, 64)]),
    "insides shown": edit(("sourced",), ["0.mlp"]),
    "an unknown name": keyword("out", fresh(1, 24, 64)),
    "another object": keyword("attention_mask", [12, 1, "Parameter"]),
    "text": keyword("attention_mask", "inplace"),
    "a tensor with a history": keyword("attention_mask", fresh(1, 1, 24, 24, joint=1)),
    "a tensor that is known": keyword("attention_mask", fresh(1, 1, 24, 24, tag=700)),
    "a known tensor by its number": keyword("attention_mask", [0, 700, 0, None]),
    "a part of a known tensor": keyword("attention_mask", [0, 900, 0, [700, 0, [4], [1]]]),
    "hidden states with a history": edit(("value", 1, 0, 2), 5),
    "other hidden states": edit(("value", 1, 0, 3), ["fp32", [1, 24, 65]]),
    "too many rows": edit(("value", 1, 0, 3), ["fp32", [1, 513, 64]]),
    "no rows": edit(("value", 1, 0, 3), ["fp32", [1, 0, 64]]),
    "integers": edit(("value", 1, 0, 3), ["i64", [1, 24, 64]]),
    "a mask for many": keyword("attention_mask", fresh(9, 1, 24, 24)),
    "a mask per head": keyword("attention_mask", fresh(1, 4096, 24, 24)),
    "a long mask": keyword("attention_mask", fresh(1, 1, 24, 1 << 20)),
    "positions of more rows": keyword("position_embeddings", [2, [fresh(1, 1 << 20, 16)] * 2]),
    "positions of five dimensions": keyword("position_ids", fresh(1, 1, 1, 1, 24)),
    "positional arguments": edit((*_PAIRS[:-2], 0), [2, [True]]),
    "what is no call": edit(("value", 1, 1, 1, 0), 7),
    "nothing": edit(("value",), None),
}


@pytest.fixture(scope="module")
def message() -> dict[str, Any]:
    world = remote("llama", 1)
    headers = heard(world)
    logits(world.model)
    return headers[0]


@pytest.mark.parametrize("what", EXTRAORDINARY)
def test_whatever_else_is_asked_for_is_looked_at(what: str, message: dict[str, Any]) -> None:
    span = tree("llama", SPLITS[1][0][1])
    widths = Widths.of(span.modules, span.config)
    assert widths is not None
    assert room_of(asked(message), widths, [700], 0) is not None
    changed = copy.deepcopy(message)
    EXTRAORDINARY[what](changed)
    assert room_of(asked(changed), widths, [700], 0) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_room_held_is_more_than_a_forward_makes(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = remote(family, 1)
    session, span = world.channel.sessions[0], tree(family, SPLITS[1][0][1])
    widths = Widths.of(span.modules, span.config)
    headers = heard(world)
    most, take = [0], MemoryMeter.take

    def taking(meter: MemoryMeter, size: int) -> None:
        take(meter, size)
        most[0] = max(most[0], meter.held_bytes)

    session._ordinary.end()
    monkeypatch.setattr(MemoryMeter, "take", taking)
    with world.model.trace({"input_ids": PROMPT}):
        world.model.output.logits.save()
    if widths is None:
        assert any(w.dim() > 2 for layer in span.modules for w in layer.parameters())
        return
    room = room_of(asked(headers[0]), widths, [], 0)
    assert (room is None) == (family in LOOKED_AT)
    assert room is None or room >= most[0] > 0


def test_what_is_left_counts_as_if_it_had_been_looked_at() -> None:
    held = []
    for is_watched in (True, False):
        world = remote("llama", 1)
        session = world.channel.sessions[0]
        if is_watched:
            session._ordinary.end()
        with world.model.trace({"input_ids": PROMPT}):
            cache = world.model.output.past_key_values.save()
        gc.collect()
        held.append(session.meter.held_bytes)
        del cache
        session.close()
        gc.collect()
        assert session.meter.held_bytes == 0
    assert held[0] == held[1] > 0


def test_where_the_room_is_not_there_a_forward_is_counted_exactly(watched: list[str]) -> None:
    world = remote("llama", 1, TapLimits(memory_bytes=1 << 20))
    assert torch.equal(logits(world.model), logits(remote("llama", 1).model))
    assert watched


def test_a_forward_that_ends_half_way_gives_its_room_back() -> None:
    world = remote("llama", 1)
    session = world.channel.sessions[0]
    model = world.model
    with pytest.raises(ValueError, match="enough"), model.trace({"input_ids": PROMPT}):  # noqa: PT012
        hidden = model.model.layers[3].output.save()
        raise ValueError(f"enough of {hidden.shape}")
    session.close()
    gc.collect()
    assert session.meter.held_bytes == 0
