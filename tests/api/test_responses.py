"""`/v1/responses` over a real socket, with OpenAI's own client and with httpx."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.api.conftest import SHARED_LOOP, Served, typed_events
from tests.api.test_structured import Weather
from tests.api.test_tools import CALL, HERMES, LOOK, THINKS, asking

pytestmark = SHARED_LOOP

ASK: list[Any] = [{"role": "user", "content": "How warm is it?"}]
LOOKS: Any = {"type": "function", **LOOK["function"], "strict": False}
HELLO = "hello big world"


async def told(http: httpx.AsyncClient, model: str, **more: Any) -> list[Any]:
    """The data of each event of a stream."""
    body = {"model": model, "input": HELLO, "stream": True, **more}
    response = await http.post("/v1/responses", json=body)
    assert response.status_code == 200
    events = typed_events(response)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_the_answer_is_whole_as_openais_types_have_it(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/responses", json={"model": "echo", "input": HELLO})).json()
    TypeAdapter(Response).validate_python(answer)
    assert (answer["status"], answer["store"], answer["truncation"]) == (
        "completed", False, "disabled",
    )  # fmt: skip
    (item,) = answer["output"]
    assert item["content"] == [
        {"type": "output_text", "text": HELLO, "annotations": [], "logprobs": []}
    ]
    assert answer["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 8,
    }
    assert answer["hearthnet"]["route"][0]["node"] == "attic"


async def test_a_stream_tells_each_item_from_its_beginning_to_its_end(
    http: httpx.AsyncClient,
) -> None:
    events = await told(http, "thinks")
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "reasoning_summary_part.added",
        *["reasoning_summary_text.delta"] * 3,
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
        "output_item.added", "content_part.added",
        *["output_text.delta"] * 2,
        "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    thought, said = events[-1]["response"]["output"]
    assert thought["summary"] == [{"type": "summary_text", "text": "first this,\nthen that."}]
    assert said["content"][0]["text"] == "so it is"
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == [
        thought, said,
    ]  # fmt: skip
    assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


async def test_what_ends_a_call_and_what_follows_it_are_told_apart(
    http: httpx.AsyncClient, api: Served
) -> None:
    *_, last = await told(http, "calls")
    assert api.generations.ended["calls"].is_set()
    told_of = [
        item.get("arguments") or item["content"][0]["text"] for item in last["response"]["output"]
    ]
    assert told_of == ["I look.", '{"a": 1}', "Again.", "{}"]


async def test_what_happens_to_the_route_is_told_between(
    http: httpx.AsyncClient, api: Served
) -> None:
    events = await told(http, "failover")
    news = [event["hearthnet"]["event"]["type"] for event in events if "hearthnet" in event]
    assert news == ["shard_status", "shard_failover"]
    assert {event["type"] for event in events if "hearthnet" in event} == {"hearthnet.event"}
    assert events[-1]["response"]["hearthnet"]["failovers"] == 1
    async with (
        openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none") as client,
        client.responses.stream(model="failover", input="hi") as stream,
    ):
        assert [event.type async for event in stream] == [event["type"] for event in events]
        assert (await stream.get_final_response()).output_text == "one two"


async def test_an_answer_that_was_cut_is_incomplete(http: httpx.AsyncClient) -> None:
    last = (await told(http, "narrow"))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert "attic has no room" in last["response"]["hearthnet"]["note"]


@pytest.mark.parametrize(
    ("model", "code"), [("breaks", "pipeline_stalled"), ("late-bug", "internal")]
)
@pytest.mark.parametrize("resumable", [False, True])
async def test_a_stream_that_fails_ends_as_openais_do(
    http: httpx.AsyncClient, api: Served, model: str, code: str, resumable: bool
) -> None:
    *_, error, failed = await told(http, model, resumable=resumable)
    assert (error["type"], error["code"], error["error"]["code"]) == ("error", code, code)
    assert (failed["type"], failed["response"]["error"]["code"]) == ("response.failed", code)
    assert failed["response"]["output"][0]["content"][0]["text"] == "one"
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none") as client:
        with pytest.raises(openai.APIError) as raised:
            async for _ in await client.responses.create(model=model, input="hi", stream=True):
                pass
        assert raised.value.code == code


async def test_a_kept_stream_that_never_came_to_an_answer_ends_so_too(
    http: httpx.AsyncClient,
) -> None:
    events = await told(http, "busy", resumable=True)
    assert [event["type"] for event in events] == [
        "response.created", "response.in_progress", "error", "response.failed",
    ]  # fmt: skip


async def test_errors_before_the_first_token_have_their_status(http: httpx.AsyncClient) -> None:
    for model, status in (("nobody", 404), ("busy", 429), ("no-route", 503), ("unfinished", 500)):
        body = {"model": model, "input": "hi"}
        assert (await http.post("/v1/responses", json=body)).status_code == status
    streamed = await http.post("/v1/responses", json={**body, "model": "busy", "stream": True})
    assert streamed.status_code == 429


@pytest.mark.parametrize(("model", "sign"), [("silent", ": ping"), ("endless", "data: ")])
async def test_who_leaves_ends_the_generation(
    http: httpx.AsyncClient, api: Served, model: str, sign: str
) -> None:
    body = {"model": model, "input": "hi", "stream": True}
    async with http.stream("POST", "/v1/responses", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith(sign):
                break
    async with asyncio.timeout(10):
        await api.generations.ended[model].wait()


async def test_a_stream_is_resumed_by_the_answers_id(http: httpx.AsyncClient) -> None:
    body = {"model": "echo", "input": HELLO, "stream": True, "resumable": True}
    response = await http.post("/v1/responses", json=body)
    name = response.headers["x-stream-id"]
    assert f'"id":"{name}"' in response.text
    rest = await http.get(f"/v1/streams/{name}", headers={"Last-Event-ID": "3"})
    assert response.text.endswith(rest.text)
    assert rest.text.startswith("id: 4\nevent: response.output_text.delta\n")


async def test_fields_and_items_reach_the_generation(http: httpx.AsyncClient, api: Served) -> None:
    body = {
        "model": "echo", "temperature": 0, "top_p": 0.5, "seed": 7, "max_output_tokens": 9,
        "instructions": "Be brief.", "include": ["message.output_text.logprobs"],
        "top_logprobs": 2, "metadata": {"a": "b"}, "user": "me", "store": True,
        "truncation": "disabled", "text": {"format": {"type": "json_object"}},
        "reasoning": {"effort": None, "summary": "auto"}, "max_tool_calls": 3,
        "tools": [LOOKS], "tool_choice": {"type": "function", "name": "look"},
        "input": [
            {"type": "message", "role": "developer", "content": "No lies."},
            {"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "look", "arguments": "{}"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call_output", "call_id": "2", "output": "21"},
            {"type": "function_call_output", "call_id": "1", "output": "20"},
            {"role": "assistant", "content": "Warm."},
            {"role": "user", "content": HELLO},
        ],
    }  # fmt: skip
    response = await http.post("/v1/responses", json=body)
    answer = response.json()
    assert answer["output"][0]["content"][0]["logprobs"][1]["bytes"] == [*b" big"]
    assert answer["metadata"] == {"a": "b"}
    assert answer["tools"] == [LOOKS]
    request = api.generations.requests[-1]
    assert (request.sampling.temperature, request.sampling.top_p) == (0, 0.5)
    assert (request.sampling.seed, request.sampling.max_tokens) == (7, 9)
    assert (request.sampling.logprobs, request.schema) == (2, {"type": "object"})
    assert request.tools is not None
    assert request.tools.named == "look"
    assert request.messages is not None
    calls = [call["id"] for call in request.messages[2].pop("tool_calls")]
    assert calls == ["1", "2"]
    assert request.messages == (
        {"role": "system", "content": "Be brief.\n\nNo lies."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm"},
        {"role": "tool", "content": "21", "tool_call_id": "2", "name": "look"},
        {"role": "tool", "content": "20", "tool_call_id": "1", "name": "look"},
        {"role": "assistant", "content": "Warm."},
        {"role": "user", "content": HELLO},
    )


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored here"),
        ({"conversation": "conv_1"}, "conversation", "nothing is stored here"),
        ({"background": True}, "background", "nothing is stored here"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input.0", "store: false"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "'web_search' are not supported"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0",
            "'input_image' are not supported",
        ),
        ({"input": [{"role": "user"}]}, "input.0.content", "missing"),
        ({"input": ["hi"]}, "input.0", "an object with a type, or with a role"),
        ({"input": []}, "input", "nothing is said"),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]},
            "input.0.call_id",
            "no call before it",
        ),
        ({"reasoning": {"effort": "xhigh"}}, "reasoning.effort", "'none', 'low'"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
        ({"truncation": "none"}, "truncation", "'auto' or 'disabled'"),
        ({"include": ["x"]}, "include.0", "reasoning.encrypted_content"),
        ({"top_logprobs": 2}, None, "message.output_text.logprobs"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"tools": [LOOKS, LOOKS]}, None, "two of them are called look"),
        ({"tool_choice": "required"}, None, "no tools to call"),
    ],
)
async def test_what_is_not_done_here_is_refused_by_name(
    http: httpx.AsyncClient, more: dict[str, Any], param: str | None, said: str
) -> None:
    response = await http.post("/v1/responses", json={"model": "echo", "input": "hi", **more})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "bad_request", param)
    assert said in error["message"] + error["fix"]


async def test_what_would_have_to_be_stored_is_not_there(api: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none") as client:
        for asked in (
            client.responses.retrieve("resp_1"),
            client.responses.delete("resp_1"),
            client.responses.input_items.list("resp_1"),
            client.conversations.create(),
        ):
            with pytest.raises(openai.BadRequestError, match="Nothing is stored") as refused:
                await asked
            assert (refused.value.status_code, refused.value.code) == (400, "not_supported")


async def test_tokens_are_counted_before_anything_is_computed() -> None:
    async with asking(HERMES, "So.") as (client, asker):
        asked: Any = {"model": "toy", "instructions": "Be brief.", "input": ASK, "tools": [LOOKS]}
        counted = await client.responses.input_tokens.count(**asked)
        assert asker.engine.generations() == ()
        answer = await client.responses.create(**asked)
        assert answer.usage is not None
        assert counted.input_tokens == answer.usage.input_tokens > 50
        with pytest.raises(openai.BadRequestError, match="knows no tools") as refused:
            async with asking("{{ messages }}", "") as (other, _):
                await other.responses.input_tokens.count(**asked)
        assert refused.value.param == "tools"


async def test_calls_and_their_outputs_go_round_through_openais_client() -> None:
    async with asking(THINKS, f"<think>\nhow?</think>\n\nI look.\n{CALL}\n{CALL}") as (
        client,
        asker,
    ):
        asked: Any = {"model": "toy", "tools": [LOOKS], "temperature": 0}
        answer = await client.responses.create(input=ASK, **asked)
        async with client.responses.stream(input=ASK, **asked) as stream:
            pieces = [e.delta async for e in stream if e.type.endswith("arguments.delta")]
            streamed = await stream.get_final_response()
        kinds = ["reasoning", "message", "function_call", "function_call"]
        for each in (answer, streamed):
            assert [item.type for item in each.output] == kinds
            assert each.output_text == "I look."
            calls = [item for item in each.output if item.type == "function_call"]
            assert [json.loads(call.arguments) for call in calls] == [{"city": "Köln"}] * 2
        assert len(pieces) > 6
        assert "".join(pieces) == "".join(call.arguments for call in calls)
        asker.says("It is 21 degrees.")
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
            for call in calls
        ]
        again = await client.responses.create(input=[*ASK, *streamed.output, *outputs], **asked)
        assert again.output_text == "It is 21 degrees."
        first, second = (call.call_id for call in calls)
        assert f"{CALL_AGAIN}{CALL_AGAIN}<|turn|>tool: 21(look {first})" in asker.prompt()
        assert f"<|turn|>tool: 21(look {second})<|turn|>assistant: " in asker.prompt()


CALL_AGAIN = '<tool_call>{"name": "look", "arguments": {"city": "Köln"}}</tool_call>'


async def test_an_answer_is_bound_to_a_schema_and_a_refusal_of_one_names_its_field() -> None:
    async with asking(HERMES, "Well, I think it is fine.") as (client, _):
        answer = await client.responses.parse(
            model="toy", input="How is it?", temperature=0, text_format=Weather
        )
        assert isinstance(answer.output_parsed, Weather)
        odd: Any = {"not": {"type": "string"}}
        tool = {**LOOKS, "strict": True, "parameters": odd}
        form = {"type": "json_schema", "name": "x", "schema": odd}
        for more, param in (
            ({"text": {"format": form}}, "text.format.schema"),
            ({"tools": [tool]}, "tools.0.parameters"),
            ({"max_output_tokens": 5000}, "max_output_tokens"),
            ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ):
            asked: Any = {"model": "toy", "input": ASK, **more}
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(**asked)
            assert refused.value.param == param
            assert "response_format" not in str(refused.value)
            assert "function.parameters" not in str(refused.value)
