"""The wait for a hop's answer to what opens, resumes or seals a session. Knows no links."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from mesh.errors import MeshError
from mesh.wire.messages import Opened, Sealed


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds a hop may take to answer, and to load its weights when it says that it does."""

    answer_s: float = 10.0
    load_s: float = 300.0


class Opening:
    """One question and its answer. `limit_s` is how long that may take."""

    def __init__(self, patience: Patience) -> None:
        self.limit_s = patience.answer_s
        self._load_s = patience.load_s
        self._answer: asyncio.Future[Opened | Sealed] = asyncio.get_running_loop().create_future()
        self._deadline: asyncio.Timeout | None = None

    @property
    def is_settled(self) -> bool:
        """Whether there is an answer, or will never be one."""
        return self._answer.done()

    async def wait(self) -> Opened | Sealed:
        """The answer. Raises TimeoutError, and what `fail` was given."""
        async with asyncio.timeout(self.limit_s) as self._deadline:
            return await self._answer

    def answer(self, message: Opened | Sealed) -> None:
        """The hop has answered."""
        if not self._answer.done():
            self._answer.set_result(message)

    def fail(self, error: MeshError) -> None:
        """The hop refuses, or is gone."""
        self._answer.set_exception(error)

    def cancel(self) -> None:
        """Nobody wants the answer any more."""
        self._answer.cancel()

    def loading(self) -> None:
        """The hop reads its weights: give it time for that, once."""
        deadline, self._deadline = self._deadline, None
        if deadline is not None and not deadline.expired():
            self.limit_s = self._load_s
            deadline.reschedule(asyncio.get_running_loop().time() + self._load_s)
