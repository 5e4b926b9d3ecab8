"""`/v1/completions`: prompts as text and as ids, and the older form of log-probabilities."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from mesh.api.openai.schemas import MAX_LOGPROBS
from mesh.api.openai.several import AT_ONCE
from mesh.pipeline.entrance import Entrance
from mesh.types import BringingUp, ModelId
from tests.api.conftest import SHARED_LOOP, Served


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [("a b", "a b", None), (["a b"], "a b", None), ([1, 2], None, (1, 2)), ([[7]], None, (7,))],
)
@SHARED_LOOP
async def test_prompt_forms(
    api: Served, http: httpx.AsyncClient, prompt: Any, text: str | None, ids: tuple[int, ...] | None
) -> None:
    response = await http.post("/v1/completions", json={"model": "echo", "prompt": prompt})
    assert response.status_code == 200
    request = api.generations.requests[-1]
    assert (request.prompt, request.prompt_ids, request.messages) == (text, ids, None)
    assert (request.sampling.max_tokens, request.sampling.fits_context) == (16, True)
    choice = response.json()["choices"][0]
    assert choice == {
        "index": 0,
        "text": text or " ".join(map(str, ids or ())),
        "logprobs": None,
        "finish_reason": "stop",
    }


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], ["a", ""], ["a"] * 129, [1, "a"], [-1], [True], [2**31], 3]
)
@SHARED_LOOP
async def test_other_prompts_are_refused_by_name(http: httpx.AsyncClient, prompt: Any) -> None:
    response = await http.post("/v1/completions", json={"model": "echo", "prompt": prompt})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"].split(".")[0] == "prompt"
    assert error["code"] == "bad_request"


@pytest.mark.parametrize(
    ("prompt", "param", "message"),
    [
        ([1, "a"], "prompt.1", "prompt.1: Input should be a valid integer."),
        ([[1, -1]], "prompt.0.1", "prompt.0.1: Input should be greater than or equal to 0."),
        (
            {"text": "a"},
            "prompt",
            "prompt: Input should be a text, a list of token ids, or a list of either.",
        ),
        ([[1], []], "prompt.1", "prompt.1: it is empty."),
    ],
)
@SHARED_LOOP
async def test_refusals_speak_of_the_form_that_the_prompt_has(
    http: httpx.AsyncClient, prompt: Any, param: str, message: str
) -> None:
    response = await http.post("/v1/completions", json={"model": "echo", "prompt": prompt})
    error = response.json()["error"]
    assert (error["param"], error["message"]) == (param, f"{message} {error['fix']}")


async def test_logprobs_streamed_equal_the_whole(http: httpx.AsyncClient) -> None:
    payload = {"model": "echo", "prompt": "ab cd", "logprobs": 2}
    whole = (await http.post("/v1/completions", json=payload)).json()["choices"][0]["logprobs"]
    assert whole == {
        "tokens": ["ab", " cd"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"ab": -0.5, "ö": -9999.0}, {" cd": -0.5, "ö": -9999.0}],
        "text_offset": [0, 2],
    }
    response = await http.post("/v1/completions", json=payload | {"stream": True})
    *events, end = [e[6:] for e in response.text.split("\n\n") if e.startswith("data: ")]
    assert end == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == "ab cd"
    assert choices[-1]["finish_reason"] == "stop"
    joined: dict[str, list[Any]] = {key: [] for key in whole}
    for choice in choices:
        for key, values in (choice["logprobs"] or {}).items():
            joined[key] += values
    assert joined == whole


async def test_offsets_count_the_characters_of_the_text(http: httpx.AsyncClient) -> None:
    payload = {"model": "halves", "prompt": "x", "logprobs": 0}
    (choice,) = (await http.post("/v1/completions", json=payload)).json()["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1]
    assert choice["text"][1:] == " sings"


async def test_stream_has_no_opening(http: httpx.AsyncClient) -> None:
    response = await http.post(
        "/v1/completions", json={"model": "echo", "prompt": "ab", "stream": True}
    )
    first = json.loads(response.text.partition("\n\n")[0][6:])
    assert first["object"] == "text_completion"
    assert first["choices"][0]["text"] == "ab"


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    *events, end = [e[6:] for e in response.text.split("\n\n") if e.startswith("data: ")]
    assert end == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("prompts", [["ab", "c d", "e f g"], [[1], [2, 3], [4, 5, 6]]])
@SHARED_LOOP
async def test_each_prompt_has_a_choice(
    api: Served, http: httpx.AsyncClient, prompts: list[Any]
) -> None:
    body = {"model": "echo", "prompt": prompts, "hearthnet": {"draft": False}, "seed": 5}
    answer = (await http.post("/v1/completions", json=body)).json()
    texts = [each if isinstance(each, str) else " ".join(map(str, each)) for each in prompts]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert answer["usage"]["completion_tokens"] == 1 + 2 + 3
    assert answer["usage"]["total_tokens"] == 3 * 5 + 6
    assert [len(each["token_ids"]) for each in answer["hearthnet"]["choices"]] == [1, 2, 3]
    asked = api.generations.requests[-3:]
    assert len({request.request_id for request in asked}) == 3
    assert all(request.sampling.seed == 5 and not request.draft for request in asked)


@SHARED_LOOP
async def test_the_choices_of_a_stream_are_told_apart(http: httpx.AsyncClient) -> None:
    prompts = [f"{word} {word}" for word in "abcdefg"]
    body = {
        "model": "echo", "prompt": prompts, "stream": True, "logprobs": 1, "echo": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    *events, end = events_of(await http.post("/v1/completions", json=body))
    assert (end["choices"], end["usage"]["completion_tokens"]) == ([], 14)
    texts, ends, offsets = [""] * 7, [""] * 7, [list[int]() for _ in prompts]
    for (choice,) in (event["choices"] for event in events):
        assert not ends[choice["index"]]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"] or ""
        offsets[choice["index"]] += (choice["logprobs"] or {}).get("text_offset", [])
    assert texts == [2 * prompt for prompt in prompts]
    assert ends == ["stop"] * 7
    assert offsets == [[0, 1, 3, 4]] * 7


@SHARED_LOOP
async def test_a_prompt_is_given_back_with_its_log_probabilities(http: httpx.AsyncClient) -> None:
    body = {"model": "echo", "prompt": "ab cd", "echo": True, "logprobs": 1}
    whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    assert whole["text"] == "ab cdab cd"
    assert whole["logprobs"] == {
        "tokens": ["ab", " cd", "ab", " cd"],
        "token_logprobs": [None, -0.25, -0.5, -0.5],
        "top_logprobs": [None, {" cd": -0.25}, {"ab": -0.5}, {" cd": -0.5}],
        "text_offset": [0, 2, 5, 7],
    }
    plain = {"model": "echo", "prompt": "ab cd", "echo": True}
    (choice,) = (await http.post("/v1/completions", json=plain)).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("ab cdab cd", None)


@SHARED_LOOP
async def test_only_what_is_given_back_may_end_at_once(http: httpx.AsyncClient) -> None:
    body = {"model": "echo", "prompt": "ab cd", "max_tokens": 0}
    refused = await http.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert "echo" in refused.json()["error"]["message"]
    body |= {"echo": True, "logprobs": 1}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"] == "ab cd"
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.25]
    assert answer["usage"]["completion_tokens"] == 0


@SHARED_LOOP
async def test_halves_of_characters_are_no_key_of_each_other(http: httpx.AsyncClient) -> None:
    body = {"model": "halves", "prompt": "x", "logprobs": 0}
    (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
    first, second, _ = choice["logprobs"]["tokens"]
    assert (first, second) == ("bytes:\\xf0\\x9f", "bytes:\\x90\\x88")


@pytest.mark.parametrize("coming", [(), (BringingUp(ModelId("stuck"), "DEPLOYING", 50),)])
async def test_few_prompts_run_at_a_time_and_fewer_where_there_is_no_place(
    api: Served, http: httpx.AsyncClient, coming: tuple[BringingUp, ...]
) -> None:
    """`stuck` says a word and waits; the others have no place but theirs, also once a model that
    they waited for is up."""
    api.generations.coming = coming
    api.generations.entrance = Entrance(2, wait_s=5.0, places=0)
    body = {"model": "stuck", "prompt": ["a"] * (2 * AT_ONCE)}
    asking = asyncio.create_task(http.post("/v1/completions", json=body))
    await api.generations.started.wait()
    api.generations.proceed.set()
    answer = await asking
    assert answer.status_code == 200, answer.text
    assert [choice["text"] for choice in answer.json()["choices"]] == ["one two"] * 2 * AT_ONCE
    assert api.generations.most_under_way == 2
    api.generations.entrance, api.generations.coming = None, ()
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert api.generations.most_under_way == AT_ONCE


async def test_who_leaves_ends_all_prompts(api: Served, http: httpx.AsyncClient) -> None:
    body = {"model": "endless", "prompt": ["a", "b"], "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            break
    async with asyncio.timeout(5):
        await api.generations.idle.wait()


@SHARED_LOOP
async def test_one_prompt_that_fails_fails_all(http: httpx.AsyncClient) -> None:
    body = {"model": "breaks", "prompt": ["a", "b"]}
    response = await http.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "pipeline_stalled")


@SHARED_LOOP
async def test_more_log_probabilities_than_an_answer_takes_are_refused(
    api: Served, http: httpx.AsyncClient
) -> None:
    api.generations.repeated = 3000
    try:
        body = {"model": "echo", "prompt": ["a"] * 128, "max_tokens": 0, "echo": True}
        refused = await http.post("/v1/completions", json=body | {"logprobs": 1})
    finally:
        api.generations.repeated = 1
    assert MAX_LOGPROBS < 3000 * 2 * 128
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")


@SHARED_LOOP
async def test_a_prompt_has_as_many_answers_as_are_wanted(
    api: Served, http: httpx.AsyncClient
) -> None:
    client = openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": "echo", "n": 2, "seed": 7}
    async with client:
        both = await client.completions.create(prompt=["ab", "c d"], **asked)
        assert [each.text for each in both.choices] == ["ab", "ab", "c d", "c d"]
        assert both.usage is not None
        assert (both.usage.prompt_tokens, both.usage.completion_tokens) == (2 * 5, 2 + 4)
        messages: Any = [{"role": "user", "content": "hello big"}]
        whole = await client.chat.completions.create(messages=messages, **asked)
        assert [each.message.content for each in whole.choices] == ["hello big"] * 2
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 4)
        texts, ends = ["", ""], ["", ""]
        async for chunk in await client.chat.completions.create(
            messages=messages, stream=True, **asked
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends[choice.index] += choice.finish_reason or ""
    assert (texts, ends) == (["hello big"] * 2, ["stop"] * 2)
    assert [each.sampling.seed for each in api.generations.requests[-2:]] == [7, 8]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"resumable": True, "stream": True}, "resumable is for one answer, and there are 2"),
        ({"n": 65}, "130 answers are too many; one request takes 128"),
        ({"logprobs": 20, "max_tokens": 20_000}, "logprobs of 2 answers of 20000 tokens"),
    ],
)
@SHARED_LOOP
async def test_what_several_answers_would_keep_is_bounded_before(
    http: httpx.AsyncClient, more: dict[str, Any], says: str
) -> None:
    body = {"model": "echo", "prompt": ["a", "b"], **more}
    refused = await http.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert says in refused.json()["error"]["message"]
    body["prompt"] = ["a"]
    assert (await http.post("/v1/completions", json=body)).status_code == 200
