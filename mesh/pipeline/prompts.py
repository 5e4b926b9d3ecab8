"""Turns what people ask into token ids without holding anybody up, on the account of who asks.

Texts are tokenised, and chats rendered, on threads of their own, long ones behind each other and
not before short ones; the tokenizer's own library lets the loop run meanwhile. Token ids that come
as such are only looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from mesh.accounts.ledger import Resource, ResourceLedger
from mesh.models.constraint import Constraint
from mesh.models.grammar import is_bound
from mesh.pipeline.model import Text
from mesh.pipeline.truncation import Prompt, truncated
from mesh.types import GenerationRequest

T = TypeVar("T")

_SHORT_CHARS = 16 << 10
"""A text of so many characters takes some 10 ms; one of the longest that are taken, seconds."""


class Prompts:
    """The prompts of one asker. Call `close` at the end."""

    def __init__(self, text: Text, accounts: ResourceLedger) -> None:
        self._text = text
        self._accounts = accounts
        self._short = ThreadPoolExecutor(1, thread_name_prefix="prompts-short")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="prompts-long")
        self._grammars = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    async def ids(self, request: GenerationRequest, most: int | None) -> list[int]:
        """The token ids a request stands for.

        Raises BadRequest, ContextTooLong beyond `most` tokens, and LimitReached for a principal
        that has used its seconds of processor time.
        """
        if request.prompt_ids is not None:
            return self._text.prompt_ids(request, most)
        return await self._read(request, lambda: self._text.prompt_ids(request, most))

    async def truncated(self, request: GenerationRequest, most: int) -> Prompt:
        """The token ids of a chat without those of its oldest messages that `most` tokens have no
        room for. Raises as `ids`."""
        return await self._read(request, lambda: truncated(request, most, self._text.prompt_ids))

    async def constraint(self, request: GenerationRequest) -> Constraint | None:
        """What the answer to a request is bound to; None where it may say anything.

        Raises BadRequest, and LimitReached as `ids`.
        """
        if not is_bound(request):
            return None
        return await self._charged(request, self._grammars, lambda: self._text.constraint(request))

    def close(self) -> None:
        """What waits is not done any more."""
        for threads in (self._short, self._long, self._grammars):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _read(self, request: GenerationRequest, work: Callable[[], T]) -> T:
        threads = self._short if _chars(request) <= _SHORT_CHARS else self._long
        return await self._charged(request, threads, work)

    async def _charged(
        self, request: GenerationRequest, threads: ThreadPoolExecutor, work: Callable[[], T]
    ) -> T:
        """What `work` gives on one of the `threads`; who asks pays for its time."""
        account = request.principal.account
        self._accounts.require(account, Resource.CPU_SECONDS_PER_MINUTE)
        loop = asyncio.get_running_loop()

        def charge(spent_s: float) -> None:
            self._accounts.charge(account, Resource.CPU_SECONDS_PER_MINUTE, spent_s)

        def timed() -> T:
            began = time.thread_time()
            try:
                return work()
            finally:
                # From here, as who asked may have hung up; the ledger is for the loop's thread.
                with suppress(RuntimeError):  # the loop has ended, and the ledger with it
                    loop.call_soon_threadsafe(charge, time.thread_time() - began)

        return await loop.run_in_executor(threads, timed)


def _chars(request: GenerationRequest) -> int:
    if request.messages is None:
        return len(request.prompt or "")
    tools = () if request.tools is None else request.tools.tools
    return _chars_in([*request.messages, *tools]) + len(request.begun)


def _chars_in(value: Any) -> int:
    if isinstance(value, dict):
        return sum(len(key) + _chars_in(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_chars_in, value))
    return len(value) if isinstance(value, str) else 1
