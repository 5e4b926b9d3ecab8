"""The way of a token from the loop to the socket, as `mesh.pipeline.generation` draws it.

The asynchronous generators that it passes are counted while a stream is live.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import httpx
import pytest

from mesh.api.app import create_app
from mesh.api.server import serve_api
from mesh.api.services import ApiSettings
from mesh.clock import SystemClock
from mesh.pipeline.askers import Askers
from mesh.pipeline.entrance import Entrance
from mesh.pipeline.live import LiveCounts
from mesh.pipeline.supervisor import AskerSupervisor
from mesh.types import BringingUp, Done, GenerationRequest, ModelId, StreamFrame, TokenDelta
from tests.fakes import ScriptedView
from tests.health.watched import PROMPT, watched
from tests.pipeline.toy_mesh import ToyNetwork, toy_request

MODEL = ModelId("builtin")
TOKENS = 64
MOST_GENERATORS = 4


@contextmanager
def yields_counted() -> Iterator[Counter[str]]:
    """How often each asynchronous generator of ours yields meanwhile, on this thread.

    One that awaits returns a future to the profiler, one that yields a wrapped value.
    """
    counted: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if event != "return" or not code.co_flags & inspect.CO_ASYNC_GENERATOR:
            return
        ours = "/mesh/" in code.co_filename or code.co_filename == __file__
        if ours and type(value).__name__ == "async_generator_wrapped_value":
            counted[code.co_qualname] += 1

    sys.setprofile(profile)
    try:
        yield counted
    finally:
        sys.setprofile(None)


def passed(counted: Counter[str]) -> set[str]:
    """The generators that gave every token on."""
    return {name for name, count in counted.items() if count >= TOKENS}


async def in_the_askers_process() -> set[str]:
    network = ToyNetwork()
    network.add("0-3")
    network.add("4-7")
    with watched(network) as mesh, yields_counted() as counted:
        async for _ in mesh.engine.chat(toy_request(PROMPT, TOKENS)):
            pass
        await mesh.engine.close()
    return passed(counted)


class Process:
    """An asker's process, as far as `Askers` knows it: one generator."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[StreamFrame, None]:
        for _ in range(self._tokens):
            yield TokenDelta("a ", (1,))
        ids = (1,) * self._tokens
        yield Done("length", 1, 0, self._tokens, ids, (), 0, False, 0.0, 0.0, ())


async def as_it_is(request: GenerationRequest) -> GenerationRequest:
    return request


async def is_up(request: GenerationRequest) -> AsyncGenerator[BringingUp, None]:
    for _ in ():
        yield _


async def streamed(tokens: int, *, resumable: bool = False) -> str:
    """An answer of so many tokens, through everything of a daemon that is behind its process."""
    askers = Askers(
        {MODEL: cast("AskerSupervisor", Process(tokens))},
        entrance=Entrance(1, 0, 0),
        why_disabled=lambda model: None,
        prepared=as_it_is,
        counts=LiveCounts(SystemClock(), lambda: None),
        on_frame=lambda frame: None,
        bring_up=is_up,
    )
    server = await serve_api(
        create_app(askers, ScriptedView(), ApiSettings()), "127.0.0.1", 0, None
    )
    body = {"model": MODEL, "prompt": "a", "stream": True, "resumable": resumable}
    async with httpx.AsyncClient(base_url=server.url(), trust_env=False, timeout=30) as http:
        response = await http.post("/v1/completions", json=body)
    await server.close()
    return response.text


@pytest.mark.parametrize("resumable", [False, True])
async def test_a_token_passes_at_most_four_generators(resumable: bool) -> None:
    asker = await in_the_askers_process()
    with yields_counted() as counted:
        text = await streamed(TOKENS, resumable=resumable)
    assert text.count('"a "') == TOKENS
    daemon = passed(counted)
    assert asker == {"PipelineOrchestrator.chat"}
    assert daemon == {"Process.generate", "Askers.generate", "events"}
    assert len(asker | daemon) <= MOST_GENERATORS


@pytest.mark.parametrize("resumable", [False, True])
async def test_no_task_is_made_for_a_token(resumable: bool) -> None:
    made = 0

    def counting(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        nonlocal made
        made += 1
        return asyncio.Task(work, loop=loop, **options)

    counts = []
    for tokens in (1, TOKENS):
        asyncio.get_running_loop().set_task_factory(counting)
        made = 0
        await streamed(tokens, resumable=resumable)
        counts.append(made)
    assert counts[1] - counts[0] < TOKENS // 4, counts
