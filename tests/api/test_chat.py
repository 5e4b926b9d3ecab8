"""`/v1/chat/completions` over a real socket, with httpx and with OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from mesh.types import WireDtype
from tests.api.conftest import SHARED_LOOP, Served

pytestmark = SHARED_LOOP

HELLO = [{"role": "user", "content": "hello big world"}]


def body(model: str = "echo", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": HELLO, **more}


async def chunks(http: httpx.AsyncClient, payload: dict[str, Any]) -> list[Any]:
    """The data of each event; ``[DONE]`` as that text."""
    response = await http.post("/v1/chat/completions", json={**payload, "stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["cache-control"] == "no-cache"
    events = [e for e in response.text.split("\n\n") if e and not e.startswith(":")]
    assert all(e.startswith("data: ") and "\n" not in e for e in events)
    return [d if (d := e[6:]) == "[DONE]" else json.loads(d) for e in events]


async def test_whole_answer_has_text_usage_and_extension(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/chat/completions", json=body())
    answer = response.json()
    assert response.status_code == 200
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "echo"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello big world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    extension = answer["hearthnet"]
    assert extension["token_ids"] == [0, 1, 2]
    assert extension["route"] == [
        {"shard_id": "echo:0-5", "node": "attic", "layers": "0-5"},
        {"shard_id": "echo:6-11", "node": "kitchen", "layers": "6-11"},
    ]
    assert (extension["failovers"], extension["fallback"]) == (0, False)
    assert extension["timings"]["first_token_ms"] == 12.5
    assert extension["timings"]["tokens_per_second"] is None  # infinity is no JSON
    assert extension["timings"]["drafted_tokens"] == 8
    assert extension["timings"]["accepted_tokens"] == 6
    assert extension["timings"]["hops"][0]["p95_ms"] == 2.0


async def test_stream_opens_with_role_and_ends_with_reason_and_done(
    http: httpx.AsyncClient,
) -> None:
    *events, end = await chunks(http, body())
    assert end == "[DONE]"
    assert {e["object"] for e in events} == {"chat.completion.chunk"}
    assert len({e["id"] for e in events}) == 1
    deltas = [e["choices"][0]["delta"] for e in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [d["content"] for d in deltas[1:-1]] == ["hello", " big", " world"]
    assert deltas[-1] == {}
    assert [e["choices"][0]["finish_reason"] for e in events] == [None] * 4 + ["stop"]
    assert all("usage" not in e for e in events)
    assert ["hearthnet" in e for e in events] == [False] * 4 + [True]
    assert events[-1]["hearthnet"]["token_ids"] == [0, 1, 2]


async def test_include_usage_adds_one_chunk_without_choices(http: httpx.AsyncClient) -> None:
    *events, _ = await chunks(http, body(stream_options={"include_usage": True}))
    assert all(e["usage"] is None for e in events[:-1])
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == 8
    assert events[-1]["hearthnet"]["failovers"] == 0


async def test_failover_is_visible_and_every_chunk_has_a_choice(http: httpx.AsyncClient) -> None:
    *events, _ = await chunks(http, body("failover"))
    told = [e["hearthnet"]["event"] for e in events if "event" in e.get("hearthnet", {})]
    assert [t["type"] for t in told] == ["shard_status", "shard_failover"]
    assert told[1]["replaced_by"] == ["failover:4-11"]
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "one two"
    assert events[-1]["hearthnet"]["failovers"] == 1


async def test_an_answer_that_ended_for_lack_of_room_says_so(http: httpx.AsyncClient) -> None:
    *events, _ = await chunks(http, body("narrow"))
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert "attic has no room" in events[-1]["hearthnet"]["note"]


async def test_error_in_mid_stream_is_the_last_event(http: httpx.AsyncClient) -> None:
    *events, last = await chunks(http, body("breaks"))
    assert last["error"]["code"] == "pipeline_stalled"
    assert last["error"]["fix"] == "Try again."
    assert events[-1]["hearthnet"]["event"]["type"] == "pipeline_aborted"


async def test_generation_without_end_is_an_error(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/chat/completions", json=body("unfinished"))
    assert response.status_code == 500
    assert (await chunks(http, body("unfinished")))[-1]["error"]["code"] == "internal"


async def test_text_that_breaks_lines_arrives_whole(http: httpx.AsyncClient) -> None:
    ugly = "\x1b[31mred\x1b[0m\u2028next\x85\tß\n"
    *events, _ = await chunks(http, body("ugly"))
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == ugly


async def test_logprobs_of_both_kinds(http: httpx.AsyncClient) -> None:
    payload = body(logprobs=True, top_logprobs=2)
    whole = (await http.post("/v1/chat/completions", json=payload)).json()
    entry = whole["choices"][0]["logprobs"]["content"][1]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == (" big", -0.5, list(b" big"))
    assert entry["top_logprobs"][1] == {"token": "ö", "logprob": -9999.0, "bytes": [195, 182]}
    *events, _ = await chunks(http, payload)
    streamed = [
        c for e in events for c in (e["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole["choices"][0]["logprobs"]["content"]


async def test_tokens_that_are_half_a_character_have_their_own_bytes(
    http: httpx.AsyncClient,
) -> None:
    asked = body("halves", logprobs=True)
    (choice,) = (await http.post("/v1/chat/completions", json=asked)).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["\ufffd", "\ufffd\ufffd", " sings"]
    said = bytes(byte for entry in entries for byte in entry["bytes"]).decode()
    assert said == choice["message"]["content"] == "🐈 sings"


async def test_fields_reach_the_generation(http: httpx.AsyncClient, api: Served) -> None:
    payload = body(
        temperature=0, top_p=0.5, top_k=-1, min_p=0.1, repetition_penalty=1.1, seed=-7,
        stop=["a", "b"], max_completion_tokens=9, logprobs=True, top_logprobs=3, ignore_eos=True,
        wire_dtype="fp32", fallback_to_local=False, user="me", metadata={"a": "b"}, store=True,
        hearthnet={"draft": False}, verbosity="medium", presence_penalty=1.5, frequency_penalty=-1,
        logit_bias={"5": -100, "17": 2.5},
        n=1, tools=[], response_format={"type": "text"}, parallel_tool_calls=True,
    )  # fmt: skip
    payload["messages"] = [
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None},
        {"role": "user", "content": [
            {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}},
            {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}},
        ]},
    ]  # fmt: skip
    assert (await http.post("/v1/chat/completions", json=payload)).status_code == 200
    request = api.generations.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 0)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0.1, 1.1, -7)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1)
    assert sampling.logit_bias == ((5, -100), (17, 2.5))
    assert (sampling.stop, sampling.max_tokens, sampling.logprobs) == (("a", "b"), 9, 3)
    assert sampling.ignore_eos
    assert request.wire_dtype is WireDtype.FP32
    assert request.fallback_to_local is False
    assert request.draft is False
    assert request.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "a\nb"},
    )


async def test_absent_temperature_is_openais_default(http: httpx.AsyncClient, api: Served) -> None:
    await http.post("/v1/chat/completions", json=body())
    sampling = api.generations.requests[-1].sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.logprobs) == (1.0, None, None)
    assert api.generations.requests[-1].wire_dtype is None
    assert api.generations.requests[-1].fallback_to_local is None
    assert api.generations.requests[-1].draft is True


async def test_openai_client_reads_whole_and_streamed_answers(api: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="unused") as client:
        whole = await client.chat.completions.create(model="echo", messages=HELLO)  # type: ignore[arg-type]
        assert whole.choices[0].message.content == "hello big world"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 2
        assert whole.model_extra is not None
        assert whole.model_extra["hearthnet"]["token_ids"] == [0, 1, 2]
        again = [*HELLO, whole.choices[0].message.model_dump(), *HELLO]
        stream = await client.chat.completions.create(
            model="echo",
            messages=again,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "wire_dtype": "fp32"},
        )
        text, last = "", None
        async for chunk in stream:
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            last = chunk
        assert text == "hello big world"
        assert last is not None
        assert last.usage is not None
        assert last.usage.completion_tokens == 3
        models = await client.models.list()
        assert [model.id for model in models.data] == ["echo"]


async def test_openai_client_maps_errors(api: Served) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{api.url}/v1", api_key="unused", max_retries=0
    ) as client:

        async def ask(model: str, **more: Any) -> None:
            stream = await client.chat.completions.create(model=model, messages=HELLO, **more)  # type: ignore[call-overload]
            if more:
                async for _ in stream:
                    pass

        with pytest.raises(openai.NotFoundError) as missing:
            await ask("nobody")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError):
            await ask("nobody", stream=True)
        with pytest.raises(openai.RateLimitError):
            await ask("busy")
        with pytest.raises(openai.BadRequestError) as long:
            await ask("too-long")
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.InternalServerError) as gone:
            await ask("no-route", stream=True)
        assert gone.value.code == "shard_unavailable"
        with pytest.raises(openai.APIError) as stalled:
            await ask("breaks", stream=True)
        assert stalled.value.code == "pipeline_stalled"


async def test_reasoning_stands_apart_from_the_answer(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/chat/completions", json=body("thinks"))).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == "so it is"
    assert message["reasoning_content"] == "first this,\nthen that."
    *streamed, _ = await chunks(http, body("thinks", stream_options={"include_usage": True}))
    for used in (answer["usage"], streamed[-1]["usage"]):
        assert used["completion_tokens_details"] == {"reasoning_tokens": 2}
    deltas = [choice["delta"] for chunk in streamed for choice in chunk["choices"]]
    assert deltas[1:4] == [
        {"reasoning_content": "first this,\n"},
        {"reasoning_content": "then that"},
        {"reasoning_content": ".", "content": "so"},
    ]
    # The message may be sent back as it came.
    again = {"model": "echo", "messages": [message, *HELLO]}
    assert (await http.post("/v1/chat/completions", json=again)).status_code == 200
