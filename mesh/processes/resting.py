"""The daemon's side of a process that runs only while somebody needs it.

It ends when `rest` is called, and the next starts on `wake`, or when somebody knocks: connects to
the `listener` that the daemon keeps open meanwhile. Whoever knocked is answered by that process.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any

from mesh.processes.lifecycle import ChildEnding, ProcessState
from mesh.processes.supervisor import Supervisor


class RestingSupervisor(Supervisor):
    """See the module; its first process starts without being needed."""

    def __init__(self, *args: Any, **named: Any) -> None:
        """As `Supervisor`."""
        super().__init__(*args, **named)
        self._needed = asyncio.Event()
        self._needed.set()
        self._is_watching = False
        self._at_will = False

    @property
    def ended_at_will(self) -> bool:
        return self._at_will

    @property
    def is_resting(self) -> bool:
        """Whether none is to run until somebody needs one."""
        return not self._needed.is_set() and not self.is_stopping

    @property
    def state(self) -> ProcessState:
        """See `ProcessState`."""
        if self.is_resting and self._child is None and self.is_to_run:
            return ProcessState.RESTING
        return super().state

    def rest(self) -> None:
        """End the process until one is needed."""
        if self.is_to_run:
            self._at_will = True
            self._needed.clear()
            self._lose()

    def wake(self) -> None:
        """One is needed."""
        self._watch(False)
        self._needed.set()

    @abstractmethod
    def on_ended(self, ending: ChildEnding) -> None:
        """See `Supervisor`; a subclass says first that nobody is there to answer who knocks."""
        if self.is_resting:
            self._watch(True)

    # Private

    async def _gets_leave(self) -> bool:
        while True:
            await self._until_needed()
            if not await super()._gets_leave():
                return False
            if self._needed.is_set():  # nobody has had it rest meanwhile
                return True

    async def _until_needed(self) -> None:
        waits = [asyncio.ensure_future(each.wait()) for each in (self._needed, self._stopping)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            self._watch(False)
        self._at_will = False

    def _watch(self, is_on: bool) -> None:
        """Look whether somebody knocks, or leave that to the process."""
        if self.listener is None or is_on == self._is_watching:
            return
        self._is_watching = is_on
        loop = asyncio.get_running_loop()
        if is_on:
            loop.add_reader(self.listener, self.wake)
        else:
            loop.remove_reader(self.listener)
