"""Ollama's API over a real socket, with httpx and with Ollama's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import ollama
import pytest

from mesh.api.ollama.messages import OllamaMessage, to_turns
from mesh.identity.api_keys import Quota, Scope
from tests.api.conftest import SHARED_LOOP, Served, serving, with_key
from tests.api.test_keys import bearer, make
from tests.api.test_structured import SCHEMA, Weather
from tests.api.test_tools import CALL, HERMES, LOOK, THINKS, asking
from tests.fakes import MOMENT
from tests.pipeline.scripted_asker import ScriptedAsker

pytestmark = SHARED_LOOP

HELLO = [{"role": "user", "content": "hello big world"}]
CHAT: dict[str, Any] = {"model": "echo", "messages": HELLO}
SWITCHED = THINKS + "{% if enable_thinking is false %}no thoughts{% endif %}"


@asynccontextmanager
async def client_of(url: str, **more: Any) -> AsyncIterator[ollama.AsyncClient]:
    client = ollama.AsyncClient(url, trust_env=False, **more)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def ollamas(
    template: str, says: str
) -> AsyncIterator[tuple[ollama.AsyncClient, ScriptedAsker]]:
    """Ollama's client of a model with this template that answers so."""
    async with asking(template, says) as (client, asker):
        host = str(client.base_url).removesuffix("/v1/")
        async with client_of(host) as other:
            yield other, asker


async def said(http: httpx.AsyncClient, path: str = "/api/chat", **body: Any) -> list[Any]:
    """The objects of a streamed answer."""
    response = await http.post(path, json={**CHAT, **body} if path == "/api/chat" else body)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


async def test_lists_say_what_is_known_of_the_models_that_can_be_asked(api: Served) -> None:
    async with client_of(api.url) as client:
        (listed,) = (await client.list()).models
        assert (listed.model, listed.digest, listed.size) == ("echo:latest", "ab" * 32, 700_000_000)
        assert listed.modified_at == MOMENT
        (running,) = (await client.ps()).models
        assert (running.name, running.context_length) == ("echo:latest", 2048)
        assert running.expires_at == MOMENT
        for name in ("echo", "echo:latest"):
            shown = await client.show(name)
            assert shown.capabilities == ["completion", "tools"]
            assert shown.modelinfo == {
                "general.basename": "echo", "general.architecture": "llama",
                "general.parameter_count": 1_234_000_000,
                "llama.context_length": 2048, "llama.block_count": 12,
            }  # fmt: skip
            for details in (listed.details, shown.details):
                assert details is not None
                assert (details.format, details.family) == ("gguf", "llama")
                assert (details.parameter_size, details.quantization_level) == ("1.2B", "Q4_K")
        with pytest.raises(ollama.ResponseError, match="'nobody'") as missing:
            await client.show("nobody:latest")
        assert missing.value.status_code == 404


async def test_clients_find_a_server_of_a_known_version(http: httpx.AsyncClient) -> None:
    version = (await http.get("/api/version")).json()["version"]
    assert all(part.isdecimal() for part in version.split("."))
    for path in ("/", "/api/version", "/api/tags"):
        assert (await http.head(path)).status_code == 200
    by_go = {"name": "", "system": "", "template": "", "verbose": False, "options": None}
    assert (await http.post("/api/show", json={"model": "echo", **by_go})).status_code == 200


async def test_an_answer_comes_in_lines_of_which_the_last_counts(http: httpx.AsyncClient) -> None:
    *pieces, last = await said(http, model="echo:latest")
    assert [each["message"]["content"] for each in pieces] == ["hello", " big", " world"]
    assert {each["model"] for each in (*pieces, last)} == {"echo:latest"}
    assert all(each["done"] is False for each in pieces)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert (last["prompt_eval_count"], last["eval_count"]) == (5, 3)
    parts = [last[f"{part}_duration"] for part in ("load", "prompt_eval", "eval")]
    assert min(parts) >= 0
    assert parts[-1] > 0  # by which clients divide
    assert sum(parts) == last["total_duration"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("chat/completions", {"messages": HELLO}),
        ("completions", {"prompt": "hello"}),
        ("responses", {"input": "hello"}),
        ("messages", {"messages": HELLO, "max_tokens": 9}),
        ("messages/count_tokens", {"messages": HELLO}),
    ],
)
async def test_what_is_listed_can_be_asked_over_the_other_apis(
    http: httpx.AsyncClient, api: Served, path: str, more: dict[str, Any]
) -> None:
    (listed,) = (await http.get("/api/tags")).json()["models"]
    answer = await http.post(f"/v1/{path}", json={"model": listed["model"], **more})
    assert answer.status_code == 200
    assert api.generations.requests[-1].model == "echo"


async def test_whole_and_generated_answers(http: httpx.AsyncClient, api: Served) -> None:
    whole = (await http.post("/api/chat", json={**CHAT, "stream": False})).json()
    assert whole["message"] == {"role": "assistant", "content": "hello big world"}
    assert (whole["done"], whole["eval_count"]) == (True, 3)
    asked = {"model": "echo", "prompt": "a b", "system": "be brief"}
    *pieces, last = await said(http, "/api/generate", **asked)
    assert [each["response"] for each in pieces] == ["a", " b"]
    assert (last["response"], last["done_reason"]) == ("", "stop")
    system, user = api.generations.requests[-1].messages or ()
    assert (system["content"], user["content"]) == ("be brief", "a b")
    await said(http, "/api/generate", model="echo", prompt="a b", raw=True, suffix="", context=[])
    assert api.generations.requests[-1].prompt == "a b"
    assert api.generations.requests[-1].messages is None
    (thought, *_), answer = await said(http, model="thinks"), (
        await http.post("/api/chat", json={**CHAT, "model": "thinks", "stream": False})
    ).json()["message"]  # fmt: skip
    assert thought["message"] == {
        "role": "assistant", "content": "", "thinking": "first this,\n"
    }  # fmt: skip
    assert answer["thinking"] == "first this,\nthen that."
    assert answer["content"] == "so it is"


async def test_an_answer_that_was_begun_goes_on(http: httpx.AsyncClient, api: Served) -> None:
    asked = {"role": "user", "content": "Is it warm?"}
    begun = {"role": "assistant", "content": "It is ", "thinking": "hm"}
    await said(http, messages=[asked, begun])
    request = api.generations.requests[-1]
    assert (request.messages, request.begun) == ((asked,), "It is ")
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]}
    for whole in ([begun, asked], [asked, called], [begun]):
        await said(http, messages=whole)
        request = api.generations.requests[-1]
        assert (len(request.messages or ()), request.begun) == (len(whole), "")


async def test_options_reach_the_generation(http: httpx.AsyncClient, api: Served) -> None:
    await said(http)
    sampling = api.generations.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.8, 40, 0.9)
    assert (sampling.seed, sampling.max_tokens, sampling.repetition_penalty) == (None, None, 1.0)
    options = {
        "temperature": 0, "top_k": -1, "top_p": 0.5, "min_p": 0.1, "seed": 7, "num_predict": 9,
        "stop": ["a", "b"], "repeat_penalty": 1.2, "num_ctx": 1 << 20, "num_gpu": 99,
        "num_thread": 4, "num_batch": 512, "use_mmap": True, "presence_penalty": 1.5, "mirostat": 0,
    }  # fmt: skip
    await said(
        http, options=options, keep_alive=-1, think=False, tools=[], format="", logprobs=True
    )
    request = api.generations.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0, 0, 0.5)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0.1, 1.2, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0)
    assert (sampling.stop, sampling.max_tokens, sampling.logprobs) == (("a", "b"), 9, 0)
    assert (request.think, request.tools, request.schema) == (False, None, None)
    first, *_ = await said(http, options={"num_predict": -1, "seed": -1}, logprobs=True)
    assert api.generations.requests[-1].sampling.max_tokens is None
    assert api.generations.requests[-1].sampling.seed is None
    harmless = {"repeat_last_n": 64, "logits_all": False, "vocab_only": False, "top_p": 0}
    await said(http, options=harmless)
    assert 0 < api.generations.requests[-1].sampling.top_p < 1e-5
    # Open WebUI's, of a title, and its system prompt, once more.
    await said(http, num_predict=50, system="be brief")
    await said(http, system="twice", messages=list(api.generations.requests[-1].messages or ()))
    *_, once, twice = api.generations.requests
    assert once.sampling.max_tokens == 50
    assert once.messages == twice.messages == ({"role": "system", "content": "be brief"}, *HELLO)
    assert first["logprobs"][0]["token"] == "hello"  # noqa: S105 - no secret
    # Of a provider of Vercel's AI SDK, beside the options.
    beside = {"temperature": 0.25, "top_p": 0.75, "max_output_tokens": 30}
    for chosen in ({}, {"temperature": 0, "num_predict": 9}):
        await said(http, **beside, options=chosen)
        sampling = api.generations.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p) == (chosen.get("temperature", 0.25), 0.75)
        assert sampling.max_tokens == chosen.get("num_predict", 30)


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ("auto", (False, "")),
        ("required", (True, "")),
        ({"type": "function", "function": {"name": "look"}}, (True, "look")),
        ({"type": "function", "name": "look"}, (True, "look")),
    ],
)
async def test_a_choice_of_functions_is_heeded(
    http: httpx.AsyncClient, api: Served, choice: Any, told: tuple[bool, str]
) -> None:
    await said(http, tools=[LOOK], tool_choice=choice)
    use = api.generations.requests[-1].tools
    assert use is not None
    assert (use.required, use.named) == told
    await said(http, tools=[LOOK], tool_choice="none")
    assert api.generations.requests[-1].tools is None


def _told(**fields: Any) -> dict[str, Any]:
    return {"messages": [{**HELLO[0], **fields}]}


@pytest.mark.parametrize(
    ("path", "change", "said"),
    [
        ("chat", {"optoins": {}}, "Did you mean options"),
        ("chat", {"options": {"temprature": 1}}, "Unknown field: options.temprature"),
        ("chat", {"options": {"num_predict": 0}}, "options.num_predict: 0 tokens are no answer"),
        ("chat", {"options": {"mirostat": 2}}, "options.mirostat"),
        (
            "chat",
            {"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}},
            "repeat_last_n: values other than -1",
        ),
        ("chat", {"think": "max"}, "think"),
        ("chat", {"format": "xml"}, "format"),
        ("generate", {"prompt": "a", "truncate": True}, "truncate"),
        ("chat", _told(images=["aGk="]), "messages.0.images"),
        ("chat", _told(content=None), "content is missing"),
        ("chat", _told(tool_name="look"), "role tool"),
        ("chat", _told(name="look"), "role tool"),
        ("chat", {"tools": [LOOK, LOOK]}, "two of them are called look"),
        ("chat", {"tool_choice": {"type": "function", "name": "hear"}}, "there is no tool 'hear'"),
        ("chat", {"top_logprobs": 2}, "logprobs to be true"),
        ("generate", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("generate", {"prompt": "a", "template": "b"}, "template"),
        ("generate", {"prompt": "a", "context": [1]}, "context"),
        ("generate", {"prompt": "a", "images": ["aGk="]}, "images"),
        ("generate", {"prompt": "a", "raw": True, "system": "b"}, "system"),
        ("show", {"model": ""}, "model: it is missing"),
    ],
)
async def test_what_is_not_done_here_is_refused_by_name(
    http: httpx.AsyncClient, path: str, change: dict[str, Any], said: str
) -> None:
    base = CHAT if path == "chat" else {"model": "echo"}
    response = await http.post(f"/api/{path}", json={**base, **change})
    assert response.status_code == 400
    assert said in response.json()["error"]


async def test_errors_have_ollamas_form(api: Served, http: httpx.AsyncClient) -> None:
    *_, last = await said(http, model="breaks")
    assert last == {"error": "No progress for 30 s. Try again.", "code": "pipeline_stalled"}
    assert (await said(http, model="unfinished"))[-1]["code"] == "internal"
    async with client_of(api.url) as client:
        for model, status in (("nobody", 404), ("busy", 429), ("no-route", 503), ("bug", 500)):
            with pytest.raises(ollama.ResponseError) as refused:
                await client.chat(model, HELLO)
            assert refused.value.status_code == status
        for instead, call in (
            ("hearthnet pull", client.pull("llama3.2")),
            ("hearthnet rm", client.delete("echo")),
            ("hearthnet deploy", client.create("a", from_="b")),
        ):
            with pytest.raises(ollama.ResponseError, match=instead) as elsewhere:
                await call
            assert elsewhere.value.status_code == 400
    unknown = (await http.get("/api/nowhere")).json()["error"]
    assert "/api/chat" in unknown
    assert "/api/pull" not in unknown
    assert isinstance((await http.get("/api/chat")).json()["error"], str)


async def test_an_empty_request_waits_for_the_model_and_unloads_none() -> None:
    async with serving() as api, client_of(api.url) as client:
        loaded = await client.generate("echo:latest")
        assert (loaded.response, loaded.done, loaded.done_reason) == ("", True, "load")
        assert (await client.chat("echo", keep_alive="5m")).done_reason == "load"
        loading = asyncio.create_task(client.generate("silent"))
        await asyncio.sleep(0.05)
        assert not loading.done()
        api.generations.proceed.set()
        assert (await loading).done_reason == "load"
        for model, keep_alive, said in (
            ("echo", 0, "hearthnet evict echo"), ("echo", "0s", "hearthnet evict"),
            ("org/half", None, "missing layers 8-11"), ("missing", None, "no such model"),
        ):  # fmt: skip
            with pytest.raises(ollama.ResponseError, match=said):
                await client.generate(model, keep_alive=keep_alive)
        assert (await client.chat("echo", HELLO, keep_alive=0)).done_reason == "stop"


async def test_keys_and_quotas_count_as_for_every_chat() -> None:
    async with serving(with_key("owner's")) as api:
        key = make(api, Scope.CHAT, quota=Quota(tokens_per_day=9))
        async with httpx.AsyncClient(base_url=api.url, trust_env=False) as http:
            refused = await http.get("/api/tags")
            assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
        async with client_of(api.url, headers=bearer(key)) as client:
            async for _ in await client.chat("echo", HELLO, stream=True):
                pass
            await client.chat("echo", HELLO)  # 5 of the prompt, 3 more, twice
            with pytest.raises(ollama.ResponseError) as over:
                await client.chat("echo", HELLO)
            assert over.value.status_code == 429


@pytest.mark.parametrize("stream", [True, False])
async def test_a_generation_ends_with_its_client(stream: bool) -> None:
    async with serving() as api, httpx.AsyncClient(base_url=api.url, trust_env=False) as http:
        body = {**CHAT, "model": "silent", "stream": stream}
        asked = asyncio.create_task(http.post("/api/chat", json=body))
        await api.generations.started.wait()
        asked.cancel()
        await asyncio.wait_for(api.generations.ended["silent"].wait(), 5)


async def test_calls_and_their_results_go_round_by_name_and_by_order() -> None:
    async with ollamas(HERMES, f"I look.\n{CALL}\n{CALL}") as (client, asker):
        asked: list[Any] = [{"role": "user", "content": "How warm is it?"}]
        answer = await client.chat("toy", asked, tools=[LOOK], options={"temperature": 0})
        assert (answer.message.content, answer.done_reason) == ("I look.", "stop")
        calls = answer.message.tool_calls or []
        assert [(c.function.name, c.function.arguments) for c in calls] == [
            ("look", {"city": "Köln"})
        ] * 2
        streamed = [
            (call.function.name, call.function.arguments)
            async for part in await client.chat("toy", asked, tools=[LOOK], stream=True)
            for call in part.message.tool_calls or ()
        ]
        assert streamed == [("look", {"city": "Köln"})] * 2
        asker.says("It is 21 degrees.")
        results = [
            {"role": "tool", "content": "21"},  # as Home Assistant sends them
            {"role": "tool", "tool_name": "look", "content": "22"},
            {"role": "tool", "content": "of a call that was cut off"},
        ]
        again = [*asked, answer.message, *results]
        told = await client.chat("toy", again, tools=[LOOK], options={"temperature": 0})
        assert told.message.content == "It is 21 degrees."
        prompt = asker.prompt()
        first, second = prompt.index("tool: 21(look "), prompt.index("tool: 22(look ")
        ids = {prompt[at:].split("look ")[1].split(")")[0] for at in (first, second)}
        assert len(ids) == 2
        assert all(len(each) == 9 and each.isalnum() for each in ids)  # as Mistral's wants them
        assert "tool: of a call that was cut off(" in prompt


@pytest.mark.parametrize("whose", ["tool_name", "name"])
async def test_a_result_goes_to_the_call_of_its_function(whose: str) -> None:
    functions = [{"function": {"name": name, "arguments": {}}} for name in ("look", "hear")]
    told = [
        {"role": "assistant", "tool_calls": functions},
        {"role": "tool", whose: "hear", "content": "a bell"},
    ]
    (asked, result), _ = to_turns(list(map(OllamaMessage.model_validate, told)))
    assert result["tool_call_id"] == asked["tool_calls"][1]["id"]


async def test_a_format_is_followed() -> None:
    async with ollamas(HERMES, "Well, I think it is fine.") as (client, _):
        asked: Any = {"messages": HELLO, "options": {"temperature": 0}}
        answer = await client.chat("toy", **asked, format=SCHEMA["schema"])
        Weather.model_validate_json(answer.message.content or "")
        text = await client.generate("toy", "a", format=SCHEMA["schema"], options={"top_k": 1})
        Weather.model_validate_json(text.response)


async def test_a_model_is_told_whether_to_think_where_it_can() -> None:
    async with ollamas(SWITCHED, "<think>\nhow?</think>\n\nso.") as (client, asker):
        for think, told in ((True, False), (False, True), (None, False)):
            answer = await client.chat("toy", HELLO, think=think, options={"temperature": 0})
            assert (answer.message.thinking, answer.message.content) == ("how?", "so.")
            assert asker.prompt().endswith("no thoughts") is told
    async with ollamas(HERMES, "so.") as (client, _):
        assert (await client.chat("toy", HELLO, think=False)).message.content == "so."
        with pytest.raises(ollama.ResponseError, match="does not support thinking"):
            await client.generate("toy", "a", think=True)
