"""`/v1/embeddings`, `/api/embed` and `/api/embeddings`, as their own clients ask them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from mesh.api.openai.several import AT_ONCE
from mesh.api.text_embedding import MAX_TEXTS
from tests.api.conftest import SHARED_LOOP, Served
from tests.api.test_ollama import client_of

TEXTS = ["one", "two words", "and three words"]


def vector(text: str) -> list[float]:
    """What the scripted model makes of a text: how many words and letters it has, one long."""
    made = np.array([len(text.split(" ")), len(text), 0, 0], np.float32)
    return [float(x) for x in made / np.linalg.norm(made)]


@asynccontextmanager
async def openai_of(api: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx.AsyncClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{api.url}/v1", api_key="unused", http_client=http
    ) as client:
        yield client


async def test_openais_client_gets_vectors_in_either_form(api: Served) -> None:
    async with openai_of(api) as client:
        for how in ({}, {"encoding_format": "float"}):  # base64 where nothing is said
            found = await client.embeddings.create(model="echo", input=TEXTS, **how)
            assert [each.index for each in found.data] == [0, 1, 2]
            for each, text in zip(found.data, TEXTS, strict=True):
                assert each.embedding == pytest.approx(vector(text))
            assert (found.usage.prompt_tokens, found.usage.total_tokens) == (6, 6)
            assert (found.model, found.object) == ("echo", "list")
        one = await client.embeddings.create(model="echo", input=[5, 6], dimensions=1)
        assert [each.embedding for each in one.data] == [[1.0]]
    assert api.generations.requests[-1].prompt_ids == (5, 6)
    assert api.generations.most_under_way <= AT_ONCE
    assert all(each.embeds and not each.truncates for each in api.generations.requests)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": []}, "input"),
        ({"input": ["a"] * (MAX_TEXTS + 1)}, "input"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({}, "input"),
    ],
)
@SHARED_LOOP
async def test_what_cannot_be_embedded_is_refused_by_name(
    http: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    response = await http.post("/v1/embeddings", json={"model": "echo", **body})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "bad_request", param)


@SHARED_LOOP
async def test_a_caller_pays_for_its_tokens_and_hears_what_is_wrong(
    http: httpx.AsyncClient,
) -> None:
    response = await http.post("/v1/embeddings", json={"model": "nobody", "input": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_ollamas_client_gets_them_too(api: Served) -> None:
    async with client_of(api.url) as client:
        found = await client.embed("echo:latest", TEXTS, options={"num_ctx": 4096})
        assert (found.model, found.prompt_eval_count) == ("echo:latest", 6)
        for made, text in zip(found.embeddings, TEXTS, strict=True):
            assert list(made) == pytest.approx(vector(text))
        assert all(each.truncates for each in api.generations.requests)
        short = await client.embed("echo", "two words", truncate=False, dimensions=2)
        assert list(short.embeddings[0]) == pytest.approx(vector("two words")[:2])
        assert not api.generations.requests[-1].truncates
        loaded = await client.embed("echo", "")
        assert not loaded.embeddings
        assert loaded.load_duration == loaded.total_duration  # which is all that it was for
        one = await client.embeddings("echo", "one")
        assert list(one.embedding) == pytest.approx(vector("one"))
