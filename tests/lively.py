"""A child process for tests of who supervises it: does what it is told, and says its loop turns."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from mesh.channel import Channel, ChannelMessage
from mesh.errors import DeviceLost
from mesh.supervise import attach_to_parent, end_failed


def obey(loop: asyncio.AbstractEventLoop, said: asyncio.Queue[ChannelMessage]) -> None:
    """Do everything that was said so far."""
    while not said.empty():
        message = said.get_nowait()
        if message["op"] == "work beside the loop":
            loop.run_in_executor(None, time.sleep, message["s"])
        if message["op"] == "fail for good":
            end_failed(_channel[0], DeviceLost("The device fell off the bus.", fix="Look."))


_channel: list[Channel] = []


async def main() -> None:
    """Say that all is ready, then obey."""
    said: asyncio.Queue[ChannelMessage] = asyncio.Queue(16)
    loop = asyncio.get_running_loop()

    def take(message: ChannelMessage) -> None:
        said.put_nowait(message)
        loop.call_soon(partial(obey, loop, said))

    _channel.append(await attach_to_parent(take))
    _channel[0].send({"op": "ready"})
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
