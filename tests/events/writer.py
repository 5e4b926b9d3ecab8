"""A process that appends to a log and says so, until it is killed.

Prints the sequence number of each event after `append` has returned: acknowledged.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from mesh.events.types import MODEL_PUBLISHED
from tests.events.support import found, open_node


async def main(path: Path, snapshot_every: int) -> None:
    node = await open_node(path, snapshot_every=snapshot_every)
    if not len(node.log.docket.graph):
        await found(node)
    while True:
        event = await node.log.append(MODEL_PUBLISHED, {"model_id": "m", "fill": "x" * 500})
        os.write(1, b"%d\n" % event.seq)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
