"""`X-Request-Id` on every answer, and in the log's lines about the request."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from mesh.logs import LineRates, LogHandler
from tests.api.conftest import SHARED_LOOP

CHAT = {"model": "echo", "messages": [{"role": "user", "content": "secret words"}]}


@contextmanager
def log_of(name: str) -> Iterator[io.StringIO]:
    """What the loggers below `name` write meanwhile, as a daemon's handler writes it."""
    stream, logger = io.StringIO(), logging.getLogger(name)
    handler, level = LogHandler(stream, LineRates()), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.parametrize("path", ["/healthz", "/v1/models", "/v1/nothing", "/metrics", "/"])
@pytest.mark.parametrize("given", ["family-7:b/3", "a" * 128])
@SHARED_LOOP
async def test_a_name_is_taken_over(http: httpx.AsyncClient, path: str, given: str) -> None:
    answer = await http.get(path, headers={"X-Request-Id": given})
    assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "a" * 129, "a b", 'x"y', "ä"])
@SHARED_LOOP
async def test_one_that_is_none_is_replaced(http: httpx.AsyncClient, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given.encode("latin-1")}
    names = {
        (await http.get("/healthz", headers=headers)).headers["x-request-id"] for _ in range(2)
    }
    assert len(names) == 2
    assert all(name.startswith("req-") and len(name) == 20 for name in names)


@pytest.mark.parametrize("model", ["echo", "bug", "no-route", "missing"])
@pytest.mark.parametrize("stream", [False, True])
@SHARED_LOOP
async def test_every_outcome_bears_it(http: httpx.AsyncClient, model: str, stream: bool) -> None:
    body = {**CHAT, "model": model, "stream": stream}
    with log_of("mesh.api") as log:
        answer = await post(http, body, "family-9")
    assert answer.headers["x-request-id"] == "family-9"
    (line,) = [each for each in log.getvalue().splitlines() if "POST /v1/chat" in each]
    assert f": {answer.status_code} in " in line
    assert line.endswith("[request family-9]")
    assert "secret" not in log.getvalue()


@SHARED_LOOP
@pytest.mark.parametrize("given", ["family-8", ""])
async def test_a_stream_to_resume_says_its_own_id_beside_that_of_the_log(
    http: httpx.AsyncClient, given: str
) -> None:
    body = {**CHAT, "stream": True, "resumable": True}
    with log_of("mesh.api") as log:
        answer = await post(http, body, given)
    name = answer.headers["x-request-id"]
    assert name == given or name.startswith("req-")
    assert f"[request {name}]" in log.getvalue()
    assert answer.headers["x-stream-id"] not in log.getvalue()
    rest = await http.get(f"/v1/streams/{answer.headers['x-stream-id']}")
    assert rest.text == answer.text


@SHARED_LOOP
async def test_failures_that_nobody_foresaw_are_logged_under_it(http: httpx.AsyncClient) -> None:
    with log_of("uvicorn.error") as log:
        await post(http, {**CHAT, "model": "bug"}, "family-6")
    (line,) = [each for each in log.getvalue().splitlines() if "Exception in ASGI" in each]
    assert line.endswith("[request family-6]")


async def post(http: httpx.AsyncClient, body: dict[str, object], name: str) -> httpx.Response:
    return await http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": name})
