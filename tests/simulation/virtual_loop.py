"""An event loop whose time jumps to the next timer: an hour of waiting takes no time at all.

Nothing from outside ever wakes it: no sockets, no threads, no signals. What runs on it is therefore
the same every time, down to the order of callbacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Everything waits and no timer is set: real time would wait for ever."""


class _Instant:
    """Stands where a loop's selector stands: instead of waiting it moves the clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Deadlock("nothing is ready and no timer is set")
        self.now += max(0.0, timeout)
        return []

    def close(self) -> None:
        """Nothing to free."""


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Instant()
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._selector.now

    def advance(self, seconds: float) -> None:
        """So much time passes while one callback runs, as when the processor is taken away."""
        self._selector.now += seconds

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody else could have woken us."""

    def run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """At once and on the spot: a thread's timing would not be ours."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whoever awaits it gets it
            future.set_exception(error)
        return future


def pass_time(seconds: float) -> None:
    """See `VirtualLoop.advance`, of the loop that runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.advance(seconds)


def run_virtually(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main()` to its end in virtual time. Raises Deadlock when it can never end."""
    with asyncio.Runner(loop_factory=VirtualLoop, debug=False) as runner:
        return runner.run(main())
