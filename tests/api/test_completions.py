"""`/v1/completions`: prompts as text and as ids, and the older form of log-probabilities."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.api.conftest import SHARED_LOOP, Shared


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [("a b", "a b", None), (["a b"], "a b", None), ([1, 2], None, (1, 2)), ([[7]], None, (7,))],
)
@SHARED_LOOP
async def test_prompt_forms(
    shared: Shared, prompt: Any, text: str | None, ids: tuple[int, ...] | None
) -> None:
    api, http = shared
    response = await http.post("/v1/completions", json={"model": "echo", "prompt": prompt})
    assert response.status_code == 200
    request = api.generations.requests[-1]
    assert (request.prompt, request.prompt_ids, request.messages) == (text, ids, None)
    assert request.sampling.max_tokens == 16
    choice = response.json()["choices"][0]
    assert choice == {
        "index": 0,
        "text": text or " ".join(map(str, ids or ())),
        "logprobs": None,
        "finish_reason": "stop",
    }


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", "b"], [1, "a"], [-1], [True], [2**31], 3])
@SHARED_LOOP
async def test_other_prompts_are_refused_by_name(shared: Shared, prompt: Any) -> None:
    response = await shared[1].post("/v1/completions", json={"model": "echo", "prompt": prompt})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"].split(".")[0] == "prompt"
    assert error["code"] == "bad_request"


@pytest.mark.parametrize(
    ("prompt", "param", "message"),
    [
        ([1, "a"], "prompt.1", "prompt.1: Input should be a valid integer."),
        ([[1, -1]], "prompt.0.1", "prompt.0.1: Input should be greater than or equal to 0."),
        ({"text": "a"}, "prompt", "prompt: Input should be a text or a list of token ids."),
        (
            ["a", "b"],
            "prompt",
            "prompt: 2 prompts in one request are not supported; send one in each.",
        ),
    ],
)
@SHARED_LOOP
async def test_refusals_speak_of_the_form_that_the_prompt_has(
    shared: Shared, prompt: Any, param: str, message: str
) -> None:
    response = await shared[1].post("/v1/completions", json={"model": "echo", "prompt": prompt})
    error = response.json()["error"]
    assert (error["param"], error["message"]) == (param, message)


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
