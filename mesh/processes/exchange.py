"""One side of a channel: what it understands, what it has asked, what it works on for the other.

Both sides have one, and either may ask. A request that is cancelled where it was asked is given up
where it is worked on. Knows no channel and no process.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from mesh.errors import (
    BadRequest,
    InternalError,
    LinkLost,
    MeshError,
    ProcessLost,
    as_mesh_error,
)
from mesh.processes.messages import Answer, Cancel, Handlers, ProcessMessage, Request, reader
from mesh.processes.tasks import spawn

A = TypeVar("A")

_Work = Callable[[Any], Awaitable[object]]

MAX_AT_ONCE = 2048
"""Requests that are worked on at the same time; more are refused."""


@dataclass(frozen=True, slots=True)
class _Asked:
    request: Request[Any]
    answer: asyncio.Future[Any]
    then: Callable[[asyncio.Future[Any]], object] | None


class Exchange:
    """See the module; `end` it when the other side is gone."""

    def __init__(
        self,
        handlers: Handlers,
        send: Callable[[ProcessMessage], object],
        unforeseen: Callable[[Exception], MeshError] | None = None,
        most: int = MAX_AT_ONCE,
    ) -> None:
        """`send` raises LinkLost when nobody is there. `unforeseen` makes an answer of an error of
        the work that is no MeshError, see `as_mesh_error`."""
        self._send = send
        self._unforeseen = unforeseen
        self._most = most
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._working: dict[int, tuple[type[Request[Any]], asyncio.Task[None]]] = {}
        self._handlers: Handlers = {Answer: self._answered, Cancel: self._cancel}
        for kind, handler in handlers.items():
            is_request = issubclass(kind, Request)
            self._handlers[kind] = partial(self._begin, handler) if is_request else handler
        self._read = reader(self._handlers)

    def read(self, body: bytes) -> None:
        """Handle a message. Raises BadRequest for one that is not understood."""
        message = self._read(body)
        self._handlers[type(message)](message)

    def take(self, message: ProcessMessage) -> None:
        """Handle a message that was read."""
        self._handlers[type(message)](message)

    # What this side asks

    @property
    def asked(self) -> list[Request[Any]]:
        """What the other side has not answered yet."""
        return [asked.request for asked in self._asked.values()]

    def ask(
        self, request: Request[A], then: Callable[[asyncio.Future[A]], object] | None = None
    ) -> asyncio.Future[A]:
        """What is answered; cancelling it gives the request up. Raises, when it is awaited, the
        error that is answered, and ProcessLost.

        `then` is called with it before anything is handled that comes behind the answer.
        """
        number = next(self._numbers)
        request = structs.replace(request, number=number)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[A] = loop.create_future()
        answer.add_done_callback(lambda _: self._given_up(number))
        try:
            self._send(request)
        except LinkLost as error:
            lost = ProcessLost(error.message, fix="Ask again; it starts anew.")
            loop.call_soon(self._settle, number, None, lost)
        self._asked[number] = _Asked(request, answer, then)
        return answer

    def give_up(self, answer: asyncio.Future[Any]) -> None:
        """Have a request ended without cancelling `answer`, which says when it is."""
        for number, asked in self._asked.items():
            if asked.answer is answer:
                self._tell(Cancel(number))

    # What it works on

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """That work on what the other side has asked, one each."""
        return [task for _, task in self._working.values()]

    def drop(self, kind: type[Request[Any]]) -> None:
        """Work no longer on requests of this kind; they stay without an answer."""
        for each, task in self._working.values():
            if each is kind:
                task.cancel()

    def end(self, error: MeshError) -> None:
        """The other side is gone: what was asked has failed with this, and nothing is worked on any
        more."""
        for number in list(self._asked):
            self._settle(number, None, error)
        for task in self.tasks:
            task.cancel()

    # Private

    def _answered(self, answer: Answer) -> None:
        asked = self._asked.get(answer.number)
        if asked is None:
            return  # it was given up meanwhile
        result = None if answer.error is not None else answer.result_of(asked.request)
        self._settle(answer.number, result, answer.error)

    def _settle(self, number: int, result: object, error: MeshError | None) -> None:
        asked = self._asked.pop(number, None)
        if asked is None or asked.answer.done():
            return
        if error is None:
            asked.answer.set_result(result)
        else:
            asked.answer.set_exception(error)
            asked.answer.exception()  # who asked may be gone, which is no error of its own
        if asked.then is not None:
            asked.then(asked.answer)

    def _given_up(self, number: int) -> None:
        if self._asked.pop(number, None) is not None:  # nobody has settled it
            self._tell(Cancel(number))

    def _begin(self, work: _Work, request: Request[Any]) -> None:
        if len(self._working) >= self._most:
            error = BadRequest("Too much is asked of this process at once.", fix="Wait for some.")
            self._tell(Answer(request.number, error=error))
            return
        kind = type(request)
        task = spawn(self._work(work, request), f"{kind.__name__} {request.number}")
        self._working[request.number] = (kind, task)
        # Not at the end of the work: a task that is cancelled before its first step has none.
        task.add_done_callback(lambda _: self._working.pop(request.number))

    async def _work(self, work: _Work, request: Request[Any]) -> None:
        doing = type(request).__name__
        try:
            result = await as_mesh_error(work(request), doing, self._unforeseen)
            self._tell(Answer.to(request, result))
        except MeshError as error:  # also where the result is too large to be told
            self._tell(Answer(request.number, error=error))

    def _cancel(self, command: Cancel) -> None:
        """Whoever gave it up may wait until it is over."""
        _, task = self._working.get(command.number, (None, None))
        if task is not None:
            over = Answer(command.number, error=InternalError("It was given up.", fix="Ask again."))
            task.add_done_callback(lambda _: self._tell(over))
            task.cancel()

    def _tell(self, message: ProcessMessage) -> None:
        with suppress(LinkLost):
            self._send(message)
