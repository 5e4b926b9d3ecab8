"""Requests and frames on their way to and from an asker."""

from __future__ import annotations

import pytest

from mesh.errors import BadRequest, NoRoute
from mesh.models.harvest import HarvestBatch
from mesh.pipeline.commands import Credit, Generate, GenerationFrame, Harvest, HarvestOrder
from mesh.processes.messages import Answer, Cancel, ProcessMessage, encode, reader
from mesh.shard.commands import Unload
from mesh.types import (
    Edit,
    GenerationRequest,
    ModelId,
    PipelineAborted,
    Principal,
    PrincipalKind,
    Queued,
    SamplingParams,
    ShardFailover,
    ShardId,
    ShardStatus,
    Site,
    TokenDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolUse,
    WireDtype,
)

FRAMES = [
    TokenDelta("a", (1, 2), (TokenLogprob(1, b"a", -0.5, ((2, b"\xf0\x9f", -1.0),)),), 3),
    TokenDelta("", (), tool_calls=(ToolCallDelta(0, "", "c", "look"), ToolCallDelta(0, "{"))),
    ShardStatus(ShardId("m:0-3"), "attic", "degraded", "it is slow"),
    ShardFailover(ShardId("m:0-3"), (ShardId("m:0-1"), ShardId("m:2-3")), 7),
    PipelineAborted("nobody is left"),
    Queued(3),
]


def passed_on(message: ProcessMessage) -> ProcessMessage:
    """What the other side makes of a message."""
    return reader([type(message)])(encode(message))


def test_a_request_comes_back_as_it_was() -> None:
    request = GenerationRequest(
        "cmpl-1",
        ModelId("m"),
        prompt_ids=(5, 1, 4),
        sampling=SamplingParams(temperature=0.5, seed=3, stop=("a", "b")),
        wire_dtype=WireDtype.BF16,
        edits=(Edit(Site(3), 2.0, b"data"),),
        principal=Principal(PrincipalKind.KEY, "0a1b2c3d"),
    )
    assert passed_on(Generate(request)) == Generate(request)
    called = {"id": "c", "function": {"name": "look", "arguments": {"a": [1, None, 0.5]}}}
    chat = GenerationRequest(
        "chatcmpl-1",
        ModelId("m"),
        messages=({"role": "assistant", "content": "", "tool_calls": [called]},),
        tools=ToolUse(
            ({"type": "function", "function": {"name": "look"}},), in_pieces=False, strict=("look",)
        ),
        schema={"type": "object", "properties": {"a": {"enum": [1, None, "x"]}}},
    )
    assert passed_on(Generate(chat)) == Generate(chat)


@pytest.mark.parametrize("frame", FRAMES)
def test_a_frame_comes_back_as_it_was(frame: TokenDelta) -> None:
    arrived = passed_on(GenerationFrame.of("r", frame))
    assert isinstance(arrived, GenerationFrame)
    assert (arrived.id, arrived.frame) == ("r", frame)


def test_an_error_comes_back_as_one_of_its_class() -> None:
    arrived = passed_on(Answer(1, error=NoRoute("nobody.", fix="Wait.")))
    assert isinstance(arrived, Answer)
    assert isinstance(arrived.error, NoRoute)
    assert str(arrived.error) == "nobody. Wait."


def test_an_answer_of_another_kind_than_the_request_names_is_refused() -> None:
    asked = Harvest(HarvestOrder(HarvestBatch("0" * 16, 0, 1, "layers.", "layers.*"), (), 8))
    assert Answer.to(asked, {"rows": 1}).result_of(asked) == {"rows": 1}
    with pytest.raises(BadRequest, match="object"):
        Answer.to(Unload(ShardId("m:0-3"), 0.0), 5).result_of(asked)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (encode(Credit("r", 1)), "Credit"),
        (b"\x81\xa4type\xa6Cancel", "number"),
        (b"\x82\xa4type\xa6Cancel\xa6number\xa1r", "int"),
        (b"\x83\xa4type\xa6Cancel\xa6number\x01\xa1x\x01", "unknown field"),
        (b"\x90", "object"),
        (b"\xc1", "malformed"),
        (b"", "truncated"),
    ],
)
def test_what_is_no_message_for_this_side_is_refused_by_name(body: bytes, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        reader([Cancel])(body)
