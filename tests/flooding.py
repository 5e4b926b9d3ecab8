"""A child process that has much to say."""

import asyncio
import logging

from mesh.processes.child import attach_to_parent


async def _main() -> None:
    await attach_to_parent(print)
    for number in range(20_000):
        logging.getLogger("mesh.there").warning("hop=%d failed: %s", number, "There is no hop." * 9)


def main() -> None:
    """Be the process."""
    asyncio.run(_main())
