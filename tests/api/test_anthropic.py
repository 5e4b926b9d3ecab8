"""`/v1/messages` over a real socket, with Anthropic's own client and with httpx."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message

from mesh.identity.api_keys import Quota, Scope
from tests.api.conftest import SHARED_LOOP, Served, serving, typed_events, with_key
from tests.api.test_keys import make
from tests.api.test_structured import Weather
from tests.api.test_tools import CALL, HERMES, LOOK, THINKS, asking
from tests.pipeline.scripted_asker import ScriptedAsker

pytestmark = SHARED_LOOP

ASK: list[Any] = [{"role": "user", "content": "How warm is it?"}]
BODY: dict[str, Any] = {"model": "echo", "max_tokens": 50, "messages": ASK}
LOOKS: Any = {
    "name": "look", "description": "Looks it up.",
    "input_schema": LOOK["function"]["parameters"],
}  # fmt: skip
GREEDY: Any = {"extra_body": {"temperature": 0}}
"""Anthropic's client knows no temperatures any more, its API does."""
SWITCHED = THINKS + "{% if enable_thinking is false %}no thoughts{% endif %}"


@asynccontextmanager
async def client_of(url: str, key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        yield client


@asynccontextmanager
async def asked_of(
    template: str, says: str
) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, ScriptedAsker]]:
    """Anthropic's client of a model with this template that answers so."""
    async with (
        asking(template, says) as (client, asker),
        client_of(str(client.base_url).removesuffix("/v1/")) as other,
    ):
        yield other, asker


async def told(http: httpx.AsyncClient, model: str, **more: Any) -> list[Any]:
    """The data of each event of a stream."""
    response = await http.post("/v1/messages", json={**BODY, "model": model, "stream": True} | more)
    assert response.status_code == 200
    return typed_events(response)


async def test_the_answer_is_whole_as_anthropics_types_have_it(http: httpx.AsyncClient) -> None:
    body = {**BODY, "messages": [{"role": "user", "content": "hello big world"}]}
    answer = (await http.post("/v1/messages", json=body)).json()
    Message.model_validate(answer)
    assert answer["content"] == [{"type": "text", "text": "hello big world"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"] == {
        "input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2,
        "output_tokens": 3,
    }  # fmt: skip
    assert answer["hearthnet"]["route"][0]["node"] == "attic"


async def test_a_stream_tells_each_block_from_its_beginning_to_its_end(
    http: httpx.AsyncClient, api: Served
) -> None:
    events = await told(http, "thinks")
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start", *["content_block_delta"] * 3, "content_block_stop",
        "content_block_start", *["content_block_delta"] * 2, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0]["message"]["usage"]["input_tokens"] == 5
    async with (
        client_of(api.url) as client,
        client.messages.stream(**{**BODY, "model": "thinks"}) as stream,
    ):
        thought, said = (await stream.get_final_message()).content
    assert (thought.type, said.type) == ("thinking", "text")
    assert thought.type == "thinking"
    assert thought.thinking == "first this,\nthen that."
    assert said.type == "text"
    assert said.text == "so it is"
    hidden = {"type": "adaptive", "display": "omitted"}
    events = await told(http, "thinks", thinking=hidden, workspace_id="w")
    thoughts = [event for event in events if event.get("index") == 0]
    assert [each["type"] for each in thoughts] == ["content_block_start", "content_block_stop"]
    assert "so it is" in "".join(e["delta"].get("text", "") for e in events if "delta" in e)


async def test_what_ends_a_call_and_what_follows_it_are_told_apart(
    http: httpx.AsyncClient,
) -> None:
    events = await told(http, "calls")
    blocks: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append("")
        elif event["type"] == "content_block_delta":
            blocks[event["index"]] += event["delta"].get("text") or event["delta"]["partial_json"]
    assert blocks == ["I look.", '{"a": 1}', "Again.", "{}"]


async def test_what_happens_to_the_route_is_told_between(http: httpx.AsyncClient) -> None:
    events = await told(http, "failover")
    pings = [event for event in events if event["type"] == "ping"]
    news = [event["hearthnet"]["event"]["type"] for event in pings]
    assert news == ["shard_status", "shard_failover"]
    assert events[-2]["hearthnet"]["failovers"] == 1


@pytest.mark.parametrize(
    ("model", "code"), [("breaks", "pipeline_stalled"), ("late-bug", "internal")]
)
async def test_a_stream_that_fails_ends_as_anthropics_do(
    http: httpx.AsyncClient, api: Served, model: str, code: str
) -> None:
    last = (await told(http, model))[-1]
    assert (last["type"], last["error"]["code"]) == ("error", code)
    async with client_of(api.url) as client:
        with pytest.raises(anthropic.APIStatusError) as raised:
            async with client.messages.stream(**{**BODY, "model": model}) as stream:
                await stream.until_done()
        assert raised.value.body == last


async def test_errors_before_the_first_token_have_their_status_and_kind(
    http: httpx.AsyncClient, api: Served
) -> None:
    for model, status, kind in (
        ("nobody", 404, "not_found_error"),
        ("busy", 429, "rate_limit_error"),
        ("no-route", 503, "overloaded_error"),
        ("killed", 503, "overloaded_error"),
        ("unfinished", 500, "api_error"),
    ):
        for streams in {False, status < 500}:
            body = {**BODY, "model": model, "stream": streams}
            answer = await http.post("/v1/messages", json=body)
            said = answer.json()
            assert (answer.status_code, said["type"]) == (status, "error")
            assert said["error"]["type"] == kind
    async with client_of(api.url) as client:
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.create(**{**BODY, "model": "busy"})


@pytest.mark.parametrize(("model", "sign"), [("silent", ": ping"), ("endless", "data: ")])
async def test_who_leaves_ends_the_generation(
    http: httpx.AsyncClient, api: Served, model: str, sign: str
) -> None:
    body = {**BODY, "model": model, "stream": True}
    async with http.stream("POST", "/v1/messages", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith(sign):
                break
    async with asyncio.timeout(10):
        await api.generations.ended[model].wait()


async def test_what_claude_code_sends_reaches_the_generation(
    http: httpx.AsyncClient, api: Served
) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"city": "Köln"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [_text("21")], **cached}
    body = {
        "model": "echo", "max_tokens": 32000, "temperature": 0.5, "top_k": 4, "top_p": 0.5,
        "system": [_text("Be brief."), {**_text("No lies."), **cached}],
        "messages": [
            {"role": "user", "content": [_text("a"), {**_text("b"), **cached}]},
            {"role": "system", "content": "There are agents."},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                _text("I look."), call,
            ]},
            {"role": "user", "content": [{**result, "is_error": False}, _text("Well?")]},
        ],
        "tools": [{**LOOKS, **cached, "eager_input_streaming": True}, {**LOOKS, "name": "x" * 128}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "metadata": {"user_id": "me"}, "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"}, "stop_sequences": ["END"], "stream": True,
    }  # fmt: skip
    answer = await http.post("/v1/messages?beta=true", json=body)
    assert answer.status_code == 200, answer.text
    asked = api.generations.requests[-1]
    assert [(m["role"], m["content"]) for m in asked.messages or ()] == [
        ("system", "Be brief.\nNo lies."),
        ("user", "a\nb\nThere are agents."),
        ("assistant", "I look."),
        ("tool", "21"),
        ("user", "Well?"),
    ]
    _, _, spoken, found, _ = asked.messages or ()
    assert spoken["reasoning_content"] == "hm"
    assert spoken["tool_calls"][0]["function"] == {"name": "look", "arguments": {"city": "Köln"}}
    assert (found["tool_call_id"], found["name"]) == ("t1", "look")
    assert asked.tools is not None
    assert [tool["function"]["name"] for tool in asked.tools.tools] == ["look", "x" * 128]
    assert not asked.tools.parallel
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 4, 0.5)
    assert (sampling.max_tokens, sampling.fits_context, sampling.stop) == (32000, True, ("END",))
    assert (asked.think, asked.begun) == (None, "")


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


async def test_models_hear_nothing_of_billing(http: httpx.AsyncClient, api: Served) -> None:
    system = [_text("x-anthropic-billing-header: cc_version=2; cch=1f;"), _text("Be brief.")]
    await http.post("/v1/messages", json={**BODY, "system": system})
    assert (api.generations.requests[-1].messages or ())[0]["content"] == "Be brief."


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "21"}


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"max_tokens": None}, "max_tokens", "integer"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "assistant", "content": "So"}]}, "messages", "nothing is asked"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0", "text"),
        ({"messages": [{"role": "user", "content": [RESULT]}]},
         "messages.0.content.0.tool_use_id", "no call before it"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}]},
         "messages.0", "tool_result is the user's"),
        ({"messages": [*ASK, {"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]},
         "messages.1", "thinking is the assistant's"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0", "custom"),
        ({"tools": [LOOKS, LOOKS]}, None, "two of them are called look"),
        ({"tool_choice": {"type": "any"}}, None, "no tools to call"),
        ({"tools": [LOOKS], "tool_choice": {"type": "tool", "name": "x"}}, None, "no tool 'x'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice", "name belongs"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "not supported"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "context_management.edits.0", "not supported"),
        ({"temperature": 1.5}, "temperature", "less than or equal to 1"),
        ({"seed": 7}, "seed", "Unknown field"),
        ({"thread": {"type": "create"}}, "thread", "nothing is stored here"),
    ],
)  # fmt: skip
async def test_what_is_not_done_here_is_refused_by_name(
    http: httpx.AsyncClient, more: dict[str, Any], param: str | None, said: str
) -> None:
    response = await http.post("/v1/messages", json={**BODY, **more})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert said in error["message"]


async def test_anthropics_runner_of_tools_does_without_a_thread() -> None:
    @anthropic.beta_async_tool
    async def look(city: str) -> str:
        """Looks it up."""
        asker.says("It is warm.")
        return f"21 in {city}"

    async with asked_of(HERMES, CALL) as (client, asker):
        runner = client.beta.messages.tool_runner(
            model="toy", max_tokens=200, messages=ASK, tools=[look], **GREEDY
        )
        assert [message.stop_reason async for message in runner] == ["tool_use", "end_turn"]
        assert "21 in Köln" in asker.prompt()


async def test_calls_and_their_results_go_round_through_anthropics_client() -> None:
    says = f"<think>\nhow?</think>\n\nI look.\n{CALL}\n{CALL}"
    async with asked_of(THINKS, says) as (client, asker):
        asked: Any = {"model": "toy", "max_tokens": 900, "tools": [LOOKS], **GREEDY}
        asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        answer = await client.messages.create(messages=ASK, **asked)
        async with client.messages.stream(messages=ASK, **asked) as stream:
            pieces = [e.partial_json async for e in stream if e.type == "input_json"]
            streamed = await stream.get_final_message()
        for each in (answer, streamed):
            kinds = [block.type for block in each.content]
            assert kinds == ["thinking", "text", "tool_use", "tool_use"]
            assert each.stop_reason == "tool_use"
            calls = [block for block in each.content if block.type == "tool_use"]
            assert [call.input for call in calls] == [{"city": "Köln"}] * 2
        assert len(pieces) > 6
        asker.says("It is 21 degrees.")
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "21"} for call in calls
        ]
        said = [block.model_dump() for block in streamed.content]  # with all that a client knows
        assert None in said[-1].values()
        turns = [{"role": "assistant", "content": said},
                 {"role": "user", "content": results}]  # fmt: skip
        again = await client.messages.create(messages=[*ASK, *turns], **asked)
        assert again.content[0].type == "text"
        assert again.content[0].text == "It is 21 degrees."
        assert asker.prompt().count("<|turn|>tool: 21(look ") == 2
        counted = await client.messages.count_tokens(
            model="toy", messages=[*ASK, *turns], tools=[LOOKS], thinking=asked["thinking"]
        )
        usage = again.usage
        assert usage.cache_read_input_tokens
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


async def test_an_answer_goes_on_with_what_it_began_with() -> None:
    async with asked_of(HERMES, "21 degrees. END And so on.") as (client, asker):
        begun = {"role": "assistant", "content": "It is "}
        answer = await client.messages.create(
            model="toy", max_tokens=99, messages=[*ASK, begun], stop_sequences=["END"], **GREEDY
        )
        assert asker.prompt().endswith("<|turn|>assistant: It is ")
        (said,) = answer.content
        assert said.type == "text"
        assert said.text == "21 degrees. "
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")


async def test_as_many_tokens_as_the_context_has_room_for() -> None:
    async with asked_of(HERMES, "so " * 3000) as (client, _):
        short = await client.messages.create(model="toy", max_tokens=7, messages=ASK)
        assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 7)
        long = [{"role": "user", "content": "x" * 4000}]
        async with client.messages.stream(
            model="toy", max_tokens=32000, messages=long, extra_body={"temperature": 0}
        ) as stream:
            full = await stream.get_final_message()
        assert full.stop_reason == "model_context_window_exceeded"
        assert full.usage.input_tokens + full.usage.output_tokens == 4096
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* 4096 tokens"):
            await client.messages.create(
                model="toy", max_tokens=1, messages=[{"role": "user", "content": "x" * 5000}]
            )


async def test_a_prompt_is_computed_for_what_follows_it_without_an_answer() -> None:
    async with asked_of(HERMES, "21 degrees.") as (client, _):
        asked: Any = {"model": "toy", "system": "Be brief. " * 50, **GREEDY}
        warm = [{"role": "user", "content": "."}]
        warmed = await client.messages.create(max_tokens=0, messages=warm, **asked)
        assert (warmed.content, warmed.stop_reason) == ([], "max_tokens")
        assert warmed.usage.output_tokens == 0
        answer = await client.messages.create(max_tokens=9, messages=ASK, **asked)
        assert answer.usage.cache_read_input_tokens
        assert answer.usage.cache_read_input_tokens > answer.usage.input_tokens
        async with client.messages.stream(max_tokens=0, messages=warm, **asked) as stream:
            begun = await anext(stream)
        assert begun.type == "message_start"
        assert begun.message.usage.input_tokens == warmed.usage.input_tokens  # as quotas count it


async def test_a_model_thinks_where_that_is_asked_for() -> None:
    async with asked_of(SWITCHED, "So.") as (client, asker):
        for thinking, is_off in (
            (anthropic.NOT_GIVEN, True),
            ({"type": "disabled"}, True),
            ({"type": "enabled", "budget_tokens": 2000}, False),
        ):
            asked: Any = {"model": "toy", "max_tokens": 9, "messages": ASK, "thinking": thinking}
            await client.messages.create(**asked)
            assert asker.prompt().endswith("no thoughts") is is_off


async def test_an_answer_is_bound_to_a_schema_and_a_refusal_of_one_names_its_field() -> None:
    async with asked_of(HERMES, "Well, I think it is fine.") as (client, _):
        asked: Any = {"model": "toy", "max_tokens": 900, "messages": ASK, **GREEDY}
        form: Any = {"format": {"type": "json_schema", "schema": Weather.model_json_schema()}}
        answer = await client.messages.create(**asked, output_config=form)
        assert answer.content[0].type == "text"
        assert Weather.model_validate_json(answer.content[0].text)
        odd: Any = {"not": {"type": "string"}}
        for more, param in (
            ({"output_config": {"format": {**form["format"], "schema": odd}}},
             "output_config.format.schema"),
            ({"tools": [{**LOOKS, "strict": True, "input_schema": odd}]}, "tools.0.input_schema"),
        ):  # fmt: skip
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.messages.create(**asked, **more)
            assert refused.value.body["error"]["param"] == param  # type: ignore[index]


async def test_models_are_listed_in_the_form_that_the_client_reads(
    http: httpx.AsyncClient, api: Served
) -> None:
    async with client_of(api.url) as client:
        (model,) = [each async for each in client.models.list()]
        assert (model.id, model.type) == ("echo", "model")
        assert (await client.models.retrieve("echo")).id == "echo"
        # as Ollama's list has it, by which messages are answered too
        assert (await client.models.retrieve("echo:latest")).id == "echo"
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.models.retrieve("nope")
        assert kind_of(unknown.value) == "not_found_error"
    assert (await http.get("/v1/models")).json()["object"] == "list"
    assert "fix" in (await http.get("/v1/models/nope")).json()["error"], "as OpenAI's have it"


def kind_of(refused: anthropic.APIStatusError) -> str:
    """The type in the body of an error that has Anthropic's form."""
    body: Any = refused.body
    assert body["type"] == "error"
    kind: str = body["error"]["type"]
    return kind


async def test_a_wrong_key_for_the_list_is_refused_in_the_form_that_the_client_reads() -> None:
    async with serving(with_key("hn_owner")) as served, client_of(served.url, "wrong") as client:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await client.models.list()
        assert kind_of(refused.value) == "authentication_error"


async def test_a_key_comes_in_anthropics_header_and_pays() -> None:
    async with serving(with_key("hn_owner")) as served:
        async with client_of(served.url) as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(**BODY)
        secret = make(served, Scope.CHAT, quota=Quota(tokens_per_day=9))
        async with client_of(served.url, secret) as client:
            await client.messages.create(**BODY)
            with pytest.raises(anthropic.RateLimitError):
                await client.messages.create(**BODY)
