"""Fills a small disk with a log and looks what happens; run on a disk of its own."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from mesh.errors import LogFull
from mesh.events.messages import Pull
from mesh.events.types import MODEL_PUBLISHED
from tests.events.support import found, open_node


async def main(path: Path) -> None:
    # Something else takes up room, and goes away later.
    ballast = path.with_name("ballast")
    ballast.write_bytes(bytes(64 << 10))
    node = await open_node(path)
    await found(node)
    written = 0
    try:
        while True:
            await node.log.append(MODEL_PUBLISHED, {"model_id": "m", "fill": "x" * 2000})
            written += 1
    except LogFull:
        print("full")
    page = await node.log.page(Pull(1, ((node.author.id, 1, 1, written),)))
    if page.events and node.log.chains.stored(node.author.id) == written:
        print("readable")
    ballast.unlink()
    await node.log.append(MODEL_PUBLISHED, {"model_id": "m"})
    await node.log.close()
    node = await open_node(path)
    if node.log.chains.stored(node.author.id) == written + 1 and not node.reports:
        print("recovered")
    await node.log.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
