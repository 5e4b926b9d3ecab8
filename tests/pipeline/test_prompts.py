"""Texts become tokens beside the event loop, on the account of whoever sent them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.accounts.ledger import Limit, Resource, ResourceLedger
from mesh.clock import LoopClock
from mesh.errors import BadRequest, ContextTooLong, LimitReached
from mesh.models.constraint import Constraint
from mesh.models.tokenizer import Tokenizer
from mesh.pipeline.checkpoint import CheckpointText
from mesh.pipeline.prompts import Prompts
from mesh.types import GenerationRequest, ModelId, Principal, PrincipalKind, SamplingParams
from tests.checkpoints import make_tokenizer
from tests.pipeline.toy_mesh import ToyText

ANN = Principal(PrincipalKind.KEY, "ann")
BOB = Principal(PrincipalKind.LOCAL, "uid:1000")
LONG = "word " * 10_000
VOCAB = 384
LIMIT = "this model's maximum context length is 2048 tokens"
"""By these words of OpenAI's some clients know that a prompt is too long."""


def asked(prompt: str, who: Principal = ANN) -> GenerationRequest:
    return GenerationRequest("r", ModelId("m"), prompt=prompt, principal=who)


class Slow(ToyText):
    """Computes until it is told to stop, on whatever thread it is called."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.threads: set[str] = set()

    def prompt_ids(self, request: GenerationRequest, most: int | None) -> list[int]:
        self.threads.add(threading.current_thread().name)
        if len(request.prompt or "") > 1000:
            assert self.go_on.wait(30)
        return [1, 2]


@pytest.fixture
async def accounts() -> ResourceLedger:
    return ResourceLedger(LoopClock(), {Resource.CPU_SECONDS_PER_MINUTE: Limit(1)})


@pytest.fixture
async def slow(accounts: ResourceLedger) -> AsyncIterator[tuple[Slow, Prompts]]:
    text = Slow()
    prompts = Prompts(text, accounts)
    yield text, prompts
    text.go_on.set()
    prompts.close()


async def test_a_long_text_holds_up_neither_the_loop_nor_short_ones(
    slow: tuple[Slow, Prompts],
) -> None:
    text, prompts = slow
    long = [asyncio.create_task(prompts.ids(asked(LONG), 9)) for _ in range(3)]
    for _ in range(3):
        async with asyncio.timeout(20):
            assert await prompts.ids(asked("hello", BOB), 9) == [1, 2]
    assert not any(task.done() for task in long)
    text.go_on.set()
    assert await asyncio.gather(*long) == [[1, 2]] * 3
    assert all(name.startswith("prompts-") for name in text.threads)


async def test_ids_are_looked_at_where_they_are(slow: tuple[Slow, Prompts]) -> None:
    text, prompts = slow
    await prompts.ids(GenerationRequest("r", ModelId("m"), prompt_ids=(5, 6)), 9)
    assert text.threads == {threading.main_thread().name}


async def test_processor_time_is_on_the_account_of_who_asks(accounts: ResourceLedger) -> None:
    class Busy(ToyText):
        def prompt_ids(self, request: GenerationRequest, most: int | None) -> list[int]:
            end = time.thread_time() + 0.6
            while time.thread_time() < end:
                pass
            if request.prompt == "bad":
                raise BadRequest("No.", fix="Ask for something else.")
            return [1]

    prompts = Prompts(Busy(), accounts)
    await prompts.ids(asked("good"), 9)
    with pytest.raises(BadRequest):
        await prompts.ids(asked("bad"), 9)  # a refusal costs the same
    with pytest.raises(LimitReached, match="key:ann may use 1 cpu seconds per minute"):
        await prompts.ids(asked("good"), 9)
    assert await prompts.ids(asked("good", BOB), 9) == [1]
    used = {row["name"]: row["resources"] for row in accounts.snapshot()}
    assert 1.2 <= used["ann"]["cpu_seconds_per_minute"]["used"] < 3
    prompts.close()


async def test_the_time_that_a_grammar_takes_is_as_well(accounts: ResourceLedger) -> None:
    class Busy(ToyText):
        def constraint(self, request: GenerationRequest) -> Constraint | None:
            assert threading.current_thread() is not threading.main_thread()
            end = time.thread_time() + 1.1
            while time.thread_time() < end:
                pass
            return None

    prompts = Prompts(Busy(), accounts)
    free = asked("free")
    assert await prompts.constraint(free) is None  # nothing is done for it
    await prompts.constraint(replace(free, schema={}))
    with pytest.raises(LimitReached, match="key:ann may use 1 cpu seconds"):
        await prompts.constraint(replace(free, schema={}))
    prompts.close()


async def test_who_hangs_up_meanwhile_pays_for_what_was_computed(accounts: ResourceLedger) -> None:
    class Watched(ToyText):
        def __init__(self) -> None:
            self.began, self.go_on = threading.Event(), threading.Event()

        def prompt_ids(self, request: GenerationRequest, most: int | None) -> list[int]:
            self.began.set()
            assert self.go_on.wait(30)
            end = time.thread_time() + 1.1
            while time.thread_time() < end:
                pass
            return [1]

    text = Watched()
    prompts = Prompts(text, accounts)
    task = asyncio.create_task(prompts.ids(asked(LONG), 9))
    assert await asyncio.to_thread(text.began.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    text.go_on.set()
    await prompts.ids(asked(LONG, BOB), 9)  # behind the other one
    with pytest.raises(LimitReached, match="key:ann may use 1 cpu seconds"):
        await prompts.ids(asked("short"), 9)
    prompts.close()


async def test_the_tokenizers_library_lets_the_loop_run(
    accounts: ResourceLedger, tmp_path: Path
) -> None:
    text = CheckpointText(Tokenizer(make_tokenizer(VOCAB, sentencepiece=False), frozenset()), VOCAB)
    prompts = Prompts(text, accounts)
    task = asyncio.create_task(prompts.ids(asked(LONG * 20), None))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len(await task) > 100_000
    assert turns > 20, "as one call under Python's lock it would be one or two"
    prompts.close()


async def test_what_cannot_fit_by_its_bytes_is_refused_without_any_work(
    accounts: ResourceLedger,
) -> None:
    tokenizer = Tokenizer(make_tokenizer(VOCAB, sentencepiece=False), frozenset())
    text = CheckpointText(tokenizer, VOCAB)
    prompts = Prompts(text, accounts)
    for request in (
        asked("z" * 4_000_000),
        GenerationRequest(
            "r", ModelId("m"), messages=({"role": "user", "content": "z" * 4_000_000},)
        ),
    ):
        with pytest.raises(ContextTooLong, match=r"4000\d+ bytes, .*; " + LIMIT):
            await prompts.ids(request, 2048)
    assert accounts.snapshot()[0]["resources"]["cpu_seconds_per_minute"]["used"] < 0.5
    with pytest.raises(ContextTooLong, match="tokens; " + LIMIT):
        await prompts.ids(asked("z" * 6000), 2048)  # by its bytes it could fit
    with pytest.raises(ContextTooLong, match="the prompt has 2049 tokens; " + LIMIT):
        await prompts.ids(GenerationRequest("r", ModelId("m"), prompt_ids=(1,) * 2049), 2048)
    prompts.close()


async def test_a_token_that_the_model_has_no_embedding_of_is_refused(
    accounts: ResourceLedger,
) -> None:
    text = CheckpointText(Tokenizer(make_tokenizer(VOCAB, sentencepiece=False), frozenset()), 5)
    prompts = Prompts(text, accounts)
    biased = SamplingParams(logit_bias=((1, 1.0), (5, 1.0)))
    for request in (
        asked("short"),
        GenerationRequest("r", ModelId("m"), prompt_ids=(1, 5)),
        GenerationRequest("r", ModelId("m"), prompt_ids=(1,), sampling=biased),
    ):
        with pytest.raises(BadRequest, match="outside the vocabulary of 5"):
            await prompts.ids(request, None)
    prompts.close()
