"""What cannot be served is refused with a status, a code and the name of the field."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import time
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import SETTINGS, SHARED_LOOP, Served, serving

CHAT: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}

MANY = 40_000
STRANGERS = {f"x{number}": 0 for number in range(MANY)}


def _message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, fields]}


def _tools(*names: str, **function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, **function}} for name in names]


def _schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


def _nested(depth: int) -> dict[str, Any]:
    return {"a": _nested(depth - 1)} if depth else {}


DEEP = _nested(70)
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TEXT = {"type": "text", "text": ""}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"temprature": 1}, "temprature", "Unknown field: temprature."),
        ({"resumable": True}, None, "needs stream"),
        ({"\u0000x": 1}, "\u0000x", "Unknown field"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "missing"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type", "'function'"),
        ({"tools": _tools("a b")}, "tools.0.function.name", "match pattern"),
        ({"tools": _tools("a", "a")}, None, "two of them are called a"),
        ({"tools": _tools("a") * 129}, "tools", "at most 128"),
        ({"tools": _tools("a", parameters=DEEP)}, "tools.0.function.parameters", "nested more"),
        (
            {"tools": _tools("a", parameters={"a": [1 << 64]})},
            "tools.0.function.parameters",
            "64 bits",
        ),
        ({"tools": _tools("a", parameters="{}")}, "tools.0.function.parameters", "dictionary"),
        ({"tool_choice": "sometimes"}, "tool_choice", "'none'"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "valid boolean"),
        ({"tool_choice": "required"}, None, "tool_choice: there are no tools"),
        ({"tools": _tools("a"), "tool_choice": _tools("b")[0]}, None, "there is no tool 'b'"),
        ({"response_format": {"type": "grammar"}}, "response_format", "'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        (_schema(name="a"), "response_format.json_schema.schema", "missing"),
        (_schema(name="a b", schema={}), "response_format.json_schema.name", "match pattern"),
        (_schema(name="a", schema=DEEP), "response_format.json_schema.schema", "nested more"),
        ({"n": 129}, "n", "128"),
        ({"n": True}, "n", "integer"),
        ({"audio": {"voice": "x"}}, "audio", "not supported"),
        ({"modalities": ["audio"]}, "modalities", "not supported"),
        ({"logit_bias": {"five": 1}}, "logit_bias.five", "match pattern"),
        ({"logit_bias": {"5": -101}}, "logit_bias.5", "greater than or equal to -100"),
        ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        ({"reasoning_effort": "minimal"}, "reasoning_effort", "'none', 'low'"),
        ({"verbosity": "low"}, "verbosity", "other than 'medium'"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages", "Unknown"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 10**30}, "max_tokens", "less than 2147483648"),
        ({"max_completion_tokens": 2**31}, "max_completion_tokens", "less than 2147483648"),
        ({"top_k": 10**30}, "top_k", "less than 2147483648"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"n": 10**30}, "n", "128"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, None, "differ"),
        ({"top_logprobs": 2}, None, "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"stop": ["a", ""]}, "stop", "none of them empty"),
        ({"stop": ["a", 3]}, "stop.1", "valid string"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"wire_dtype": "int8"}, "wire_dtype", "'fp16', 'bf16' or 'fp32'"),
        ({"model": 3}, "model", "valid string"),
        ({"messages": []}, "messages", "at least 1"),
        (_message(role="stranger", content="x"), "messages.1.role", "'user'"),
        (_message(role="tool", content="x"), "messages.1", "tool_call_id"),
        (_message(role="user", content="x", tool_call_id="c"), "messages.1", "role tool"),
        (_message(role="user", tool_calls=[CALL]), "messages.1", "the assistant's"),
        (
            _message(role="tool", content="x", tool_call_id="c1"),
            "messages.1.tool_call_id",
            "no call before it has the id 'c1'",
        ),
        (_message(role="user", content=[IMAGE]), "messages.1.content.0", "'image_url' are not"),
        (_message(role="assistant"), "messages.1", "content is missing"),
        (_message(role="user", content="x", nmae="y"), "messages.1.nmae", "Unknown field"),
        (_message(content="x"), "messages.1.role", "missing"),
    ],
)
@SHARED_LOOP
async def test_fields_are_refused_by_name(
    api: Served, http: httpx.AsyncClient, change: dict[str, Any], param: str | None, said: str
) -> None:
    before = len(api.generations.requests)
    response = await http.post("/v1/chat/completions", json={**CHAT, **change})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert said in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "bad_request")
    unsupported = "not supported" in error["message"]
    assert error["fix"] == "Leave it out." if unsupported else error["fix"]
    assert len(api.generations.requests) == before


async def test_unknown_fields_that_are_null_are_none(http: httpx.AsyncClient) -> None:
    strange = dict.fromkeys(("of", "times", "to", "come"))
    message = {"role": "user", "content": "x", **strange}
    answer = await http.post(
        "/v1/chat/completions", json={**CHAT, "messages": [message], **strange}
    )
    assert answer.status_code == 200
    bad = await http.post("/v1/chat/completions", json={"x": None, **CHAT, **strange, "y": 0})
    assert bad.json()["error"]["param"] == "y"


async def test_misspelt_field_gets_the_nearest(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/chat/completions", json={**CHAT, "temprature": 1})
    assert response.json()["error"]["fix"] == "Did you mean temperature?"


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("number", ["1e400", "-1e400"])
@SHARED_LOOP
async def test_infinite_numbers_are_refused_by_name(
    http: httpx.AsyncClient, name: str, number: str
) -> None:
    raw = json.dumps({**CHAT, name: 7}).replace("7", number)
    response = await http.post("/v1/chat/completions", content=raw)
    assert response.status_code == 400
    said = f"{name}: Input should be a finite number. Correct the request."
    assert response.json()["error"]["message"] == said


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("completions", {"prompt": [0] * MANY + [-1]}, f"prompt.{MANY}", "greater than or equal"),
        ("completions", {"prompt": [[0] * MANY + [-1]]}, f"prompt.0.{MANY}", "greater than or"),
        ("completions", {"prompt": [None] * MANY}, "prompt.0", "valid integer"),
        ("completions", {"prompt": [[]] * MANY}, "prompt", f"{MANY} prompts"),
        ("completions", {"prompt": "a", "stop": [0] * MANY}, "stop.0", "valid string"),
        ("chat/completions", {"messages": [0] * MANY}, "messages.0", "valid dictionary"),
        ("chat/completions", _message(role="user", content=[{}] * MANY),
         "messages.1.content.0.type", "missing"),
        ("chat/completions", _message(role="user", content=[TEXT] * 5000),
         "messages.1.content", "at most 4096"),
        ("chat/completions", {"messages": [{}] * 4096}, "messages.0.role", "missing"),
        ("chat/completions", {**CHAT, **STRANGERS}, "x0", "Unknown field"),
        ("chat/completions", _message(**STRANGERS), "messages.1.x0", "Unknown field"),
        ("chat/completions", {**CHAT, "x" * 2_000_000: 0}, "x" * 100, "Unknown field"),
        ("responses", {"input": [0] * MANY}, "input.0", "an object with a type"),
        ("responses", {"input": [{"type": "x" * 99}] * 30_000}, "input.0", "not supported"),
        ("responses", {"input": [{"role": "user", "content": [{}] * MANY}]},
         "input.0.content.0.type", "missing"),
        ("responses", {"input": [{"type": "reasoning", "summary": [0] * MANY}]},
         "input.0.summary.0", "valid dictionary"),
        ("responses", {"input": "a", "tools": [{"type": "x"}] * MANY}, "tools.0", "not supported"),
        ("responses", {"input": "a", "include": [0] * MANY}, "include.0", "Input should be"),
        ("responses", {"input": "a", "metadata": STRANGERS}, "metadata", "at most 16"),
    ],
    ids=range(19),
)  # fmt: skip
async def test_one_problem_of_many_costs_little(
    path: str, body: dict[str, Any], param: str, said: str
) -> None:
    raw = json.dumps({"model": "echo", **body}).encode()
    async with (
        serving(replace(SETTINGS, max_body_bytes=4 << 20)) as api,
        httpx.AsyncClient(trust_env=False, timeout=60) as http,
    ):
        await http.get(f"{api.url}/healthz")
        tracemalloc.start()
        try:
            response = await http.post(f"{api.url}/v1/{path}", content=raw)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert said in error["message"]
    assert peak < 32 << 20


async def test_prompt_longer_than_any_context_is_refused_with_both_numbers() -> None:
    async with (
        serving(replace(SETTINGS, max_body_bytes=4 << 20)) as api,
        httpx.AsyncClient(trust_env=False, timeout=60) as http,
    ):
        body = {"model": "echo", "prompt": [0] * (2**20 + 1)}
        raw = json.dumps(body, separators=(",", ":"))
        response = await http.post(f"{api.url}/v1/completions", content=raw)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "prompt"
    assert "1048576" in error["message"]
    assert "1048577" in error["message"]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not valid JSON"),
        (b'{"model": "echo",', "not valid JSON"),
        (b'{"model": "\xff"}', "not valid JSON"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'["model"]', "not a JSON object"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b'{"\\udfff": 1}', "not valid JSON"),
        (b'{"user": "\\uD83D\\uD83D\\uDE00"}', "half a surrogate"),
        (b'{"user": "\\uD83D\\uDE00\\uDE00"}', "half a surrogate"),
        (rb'{"user": "\\ud83d\ude00"}', "half a surrogate"),
        (b'{"user": "\xed\xa0\x80"}', "not valid JSON"),
        ('{"user": "\ud800"}'.encode("utf-16", "surrogatepass"), "not valid JSON"),
    ],
)
@SHARED_LOOP
async def test_malformed_json_is_refused(http: httpx.AsyncClient, raw: bytes, said: str) -> None:
    response = await http.post("/v1/chat/completions", content=raw)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


@pytest.mark.parametrize("text", ["\U0001f600", "\\ud800", "\\\U0001f600", "é\\\\udc00", "\ufeff"])
@SHARED_LOOP
async def test_escapes_of_whole_characters_are_taken(
    api: Served, http: httpx.AsyncClient, text: str
) -> None:
    for raw in (json.dumps(text), json.dumps(text, ensure_ascii=False)):
        body = b'\xef\xbb\xbf{"model": "echo", "prompt": %s}' % raw.encode()
        response = await http.post("/v1/completions", content=body)
        assert response.status_code == 200, response.text
        assert api.generations.requests[-1].prompt == text


async def test_the_collector_rests_while_a_body_is_parsed() -> None:
    """It would look again and again at the lists that a body can hold."""
    raw = b'{"model": "echo", "prompt": "a", "metadata": [' + b"[]," * 99_000 + b"0]}"
    begun: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            begun.append(1)

    async with (
        serving(replace(SETTINGS, max_body_bytes=4 << 20)) as api,
        httpx.AsyncClient(base_url=api.url, trust_env=False, timeout=60) as http,
    ):
        gc.callbacks.append(note)
        try:
            response = await http.post("/v1/completions", content=raw)
        finally:
            gc.callbacks.remove(note)
    assert response.status_code == 200
    assert len(begun) <= 1
    assert gc.isenabled()


async def test_others_are_served_while_a_long_body_is_read() -> None:
    parts = b'{"type": "text", "text": ""},' * 7 + b'{"type": "text", "text": ""}'
    messages = b",".join([b'{"role": "user", "content": [%s]}' % parts] * 3_500)
    body = b'{"model": "echo", "messages": [%s]}' % messages
    loop = asyncio.get_running_loop()

    async def longest_share(http: httpx.AsyncClient) -> float:
        """Of the time that the body takes, how much the loop once stood still."""
        turns: list[float] = []

        async def turn() -> None:
            while True:
                turns.append(loop.time())
                await asyncio.sleep(0.001)

        turning = asyncio.create_task(turn())
        assert (await http.post("/v1/chat/completions", content=body)).status_code == 200
        turning.cancel()
        return max(b - a for a, b in pairwise(turns)) / (turns[-1] - turns[0])

    async with (
        serving(replace(SETTINGS, max_body_bytes=4 << 20)) as api,
        httpx.AsyncClient(base_url=api.url, trust_env=False, timeout=60) as http,
    ):
        # A busy machine may stop everything once. Read on the loop it is 0.94 and more each time.
        assert min([await longest_share(http) for _ in range(3)]) < 0.8


@pytest.mark.parametrize("depth", [5_000, 50_000, 500_000])
async def test_a_body_that_is_nested_deep_is_refused(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    async with (
        serving(replace(SETTINGS, max_body_bytes=4 << 20)) as api,
        httpx.AsyncClient(base_url=api.url, trust_env=False, timeout=60) as http,
    ):
        for body in (nested, b'{"model": "echo", "messages": [%s]}' % nested):
            response = await http.post("/v1/chat/completions", content=body)
            assert response.status_code == 400
            assert len(response.content) < 1000
            assert depth < 500_000 or "more than 100000 lists" in response.text


@pytest.mark.parametrize("inner", ["[]", '{"":0}', '"a]":{}', '"{":0', '[{"b":["\\""]}]'])
async def test_a_body_of_very_many_small_parts_is_refused_before_they_are_made(inner: str) -> None:
    """Nothing else would run meanwhile."""
    opens, closes = "{}" if inner.startswith('"') else "[]"
    of_many = '{"model":"echo","prompt":"a","metadata":%s}'
    async with (
        serving(replace(SETTINGS, max_body_bytes=4 << 20)) as api,
        httpx.AsyncClient(base_url=api.url, trust_env=False, timeout=60) as http,
    ):
        body = of_many % f"{opens}{','.join([inner] * 100_000)}{closes}"
        response = await http.post("/v1/completions", content=body.encode())
        assert response.status_code == 400
        assert "more than 100000 lists, objects and names" in response.text
        # As text they are no more than that.
        body = of_many % json.dumps(body)
        assert (await http.post("/v1/completions", content=body.encode())).status_code == 200


async def test_large_bodies_are_refused_with_and_without_a_length(
    http: httpx.AsyncClient,
) -> None:
    async def chunked() -> Any:
        for _ in range(21):
            yield b" " * 1000

    at_limit = json.dumps(CHAT).encode().ljust(SETTINGS.max_body_bytes)
    assert (await http.post("/v1/chat/completions", content=at_limit)).status_code == 200
    for content in (at_limit + b" ", chunked()):
        response = await http.post("/v1/chat/completions", content=content)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"


async def test_compressed_bodies_are_refused_by_that(http: httpx.AsyncClient) -> None:
    raw, named = gzip.compress(json.dumps(CHAT).encode()), {"Content-Encoding": "gzip"}
    response = await http.post("/v1/chat/completions", content=raw, headers=named)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "Content-Encoding")
    assert error["fix"] == "Switch off the client's compression of requests."
    named = {"Content-Encoding": "identity"}
    taken = await http.post("/v1/chat/completions", json=CHAT, headers=named)
    assert taken.status_code == 200


async def test_body_that_does_not_arrive_is_given_up_and_why_is_said() -> None:
    """Also where this machine stood still when it was time to say it."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n"
    async with serving(replace(SETTINGS, body_timeout_s=0.3)) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
        writer.write(head + b"{")
        await asyncio.sleep(0.1)
        time.sleep(2.5)  # noqa: ASYNC251 - it does
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 20)
        assert answer == b"HTTP/1.1 400 Bad Request\r\n"
        writer.close()
        await writer.wait_closed()


async def test_headers_without_end_are_refused(api: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 40_000)
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"headers_too_large"' in await reader.read()
    writer.close()
    await writer.wait_closed()


CHUNKED = b"%s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n%s\r\n"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"\x16\x03\x01\0\r\n\r\n", "illegal request line"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "Host"),
        (CHUNKED % (b"GET /v1/models", b"Content-Length: 5\r\n") + b"0\r\n\r\n", "both"),
        (CHUNKED % (b"POST /v1/completions", b"") + b"1\r\n{\r\nzz\r\n", "illegal chunk"),
    ],
)
@SHARED_LOOP
async def test_what_is_no_http_is_told_why_and_ends(api: Served, raw: bytes, said: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
    writer.write(raw)
    head, body = (await asyncio.wait_for(reader.read(), 5)).split(b"\r\n\r\n", 1)
    writer.close()
    await writer.wait_closed()
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"Connection: close" in head
    error = json.loads(body)["error"]
    assert error["code"] == "bad_request"
    assert said in error["message"]


@SHARED_LOOP
async def test_a_body_that_breaks_behind_its_answer_just_ends_the_connection(
    api: Served, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
    writer.write(CHUNKED % (b"POST /v1/models", b""))
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert head.startswith(b"HTTP/1.1 405")
    writer.write(b"zz\r\n")
    assert b"method_not_allowed" in await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await writer.wait_closed()
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("model", "status", "code", "retry"),
    [
        ("nobody", 404, "model_not_found", None),
        ("too-long", 400, "context_length_exceeded", None),
        ("no-route", 503, "shard_unavailable", "5"),
        ("busy", 429, "busy", "1"),
        ("killed", 503, "process_lost", "5"),
        ("bug", 500, "internal", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@SHARED_LOOP
async def test_errors_before_the_first_token_have_their_status(
    http: httpx.AsyncClient, model: str, status: int, code: str, retry: str | None, stream: bool
) -> None:
    response = await http.post(
        "/v1/chat/completions", json={**CHAT, "model": model, "stream": stream}
    )
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.headers.get("retry-after") == retry
    assert "secret" not in response.text


async def test_unforeseen_error_in_mid_stream_is_told_without_details(
    http: httpx.AsyncClient,
) -> None:
    response = await http.post(
        "/v1/chat/completions", json={**CHAT, "model": "late-bug", "stream": True}
    )
    last = response.text.strip().split("\n\n")[-1]
    assert json.loads(last[6:])["error"]["code"] == "internal"
    assert "secret" not in response.text


async def test_unknown_paths_and_methods(http: httpx.AsyncClient) -> None:
    missing = await http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    there = (
        "Use one of: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/responses,"
        " /v1/responses/input_tokens, /v1/messages, /v1/messages/count_tokens, /v1/models."
    )
    assert missing.json()["error"]["fix"] == there
    assert (await http.get("/v1")).json()["error"]["fix"] == there
    assert (await http.get("/mesh/v2")).json()["error"]["fix"] == "Check the path's spelling."
    for path in ("/chat/completions", "/completions", "/models/"):
        misled = await http.post(path, json=CHAT)
        assert misled.status_code == 404
        assert "base URL in /v1" in misled.json()["error"]["fix"]
    for path in ("/v1/v1/chat/completions", "/v1/v1/messages", "/v1/v1/models"):
        assert "adds /v1 by itself" in (await http.post(path, json=CHAT)).text
    wrong = await http.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["fix"] == "Use POST."
    unknown = await http.get("/v1/models/org/half")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/responses/resp_1/cancel", "POST /v1/responses"),
        ("/v1/conversations", "POST /v1/responses"),
        ("/v1/complete", "/v1/messages"),
    ],
)
async def test_paths_of_other_servers_say_what_to_use_instead(
    http: httpx.AsyncClient, path: str, instead: str
) -> None:
    answer = await http.post(path, content=b"whatever it is")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "not_supported"), "not asked for again"
    assert instead in error["message"]
    assert error["message"].endswith(error["fix"]), "what most clients show is all"


async def test_openais_client_gives_up_at_once(api: Served) -> None:
    asked = []

    async def note(request: httpx.Request) -> None:
        asked.append(request.url.path)

    http = httpx.AsyncClient(trust_env=False, event_hooks={"request": [note]})
    url = f"{api.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", http_client=http) as client:
        with pytest.raises(openai.BadRequestError, match="POST /v1/responses"):
            await client.responses.retrieve("resp_1")
    assert asked == ["/v1/responses/resp_1"]


@SHARED_LOOP
async def test_a_refusal_does_not_repeat_all_that_was_sent(http: httpx.AsyncClient) -> None:
    answer = await http.post(
        "/v1/chat/completions", json={**CHAT, "response_format": {"type": "x" * 9000}}
    )
    assert answer.status_code == 400
    assert len(answer.content) < 3000
