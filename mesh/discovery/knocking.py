"""Whether something listens at a TCP port: the connection is opened, and closed without a word."""

from __future__ import annotations

import asyncio
import contextlib

from mesh.wire.unreached import why_unreached

TIMED_OUT = "timed out"
"""Nothing came back: a packet filter drops what is sent there, or the machine is off."""
REFUSED = "refused"
"""The machine is there and nothing listens, or a packet filter says no."""


async def knock(host: str, port: int, timeout_s: float) -> str:
    """Why no connection could be opened in time, one of those above or the system's words; empty
    where one could."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return TIMED_OUT
    except ConnectionRefusedError:
        return REFUSED
    except (OSError, ValueError, OverflowError) as error:  # no address, or no port
        return why_unreached(error)
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            await writer.wait_closed()
    return ""
