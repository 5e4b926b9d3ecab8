"""A house on a disk that has no room for the model: run by `test_hub_passing`.

``python -m tests.transfers.small_disk DISK CHECKPOINT``. Prints what was seen, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from mesh.errors import DiskFull
from mesh.models.manifest import read_manifest
from mesh.transfers.hub import HubSettings
from mesh.types import LayerRange
from tests.transfers.house import MODEL, house, up
from tests.transfers.hub_standin import HubStandin
from tests.transfers.test_fetcher import right


def stage(disk: Path, hub: HubStandin, weights: str) -> Path:
    """What an earlier pull of all of it has left."""
    part = disk / f"one/models/.hub/org--toy@{hub.commit[:12]}/{weights}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes((hub.directory / weights).read_bytes()[: 10 << 20])
    return part


async def main(disk: Path, checkpoint: Path) -> dict[str, Any]:
    whole = await asyncio.to_thread(read_manifest, checkpoint, model_id=MODEL)
    weights = "model.safetensors"
    with HubStandin(checkpoint) as hub:
        async with house(disk, "one", "two") as made:
            made.hub = HubSettings(hub.url)
            one, two = made.start("one"), made.start("two")
            await up(one, two)
            seen: dict[str, Any] = {}
            staged = await asyncio.to_thread(stage, disk, hub, weights)
            try:
                await one.supervisor.pull("org/toy")
            except DiskFull as error:
                seen["refused"] = error.message
            seen["before_refusal"] = hub.sent[weights]
            seen["staged"] = await asyncio.to_thread(lambda: staged.stat().st_size)
            directory = await one.supervisor.pull("org/toy", [LayerRange(0, 2)], ends=False)
            seen["made_way"] = not await asyncio.to_thread(staged.exists)
            seen["passed"] = hub.sent[weights] - seen["before_refusal"]
            seen["kept"] = sorted(await asyncio.to_thread(right, directory, whole))
            (held,) = one.supervisor.holdings
            seen["is_known"] = held.weights_sha256 == whole.weights_sha256
            made.introduce()
            before = hub.sent[weights]
            sha = whole.weights_sha256
            part = await two.supervisor.ensure(MODEL, sha, [LayerRange(1, 3)], ends=False)
            seen["fetched"] = sorted(await asyncio.to_thread(right, part, whole))
            await asyncio.sleep(0.3)  # what was given is counted a moment after
            seen["ranged"] = hub.sent[weights] - before
            return seen


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))))
