"""Runs what is missing of a harvest through a daemon, a few batches at a time.

Every batch that comes back is on the disk before another is asked for in its place; whoever is
interrupted and runs the same again goes on behind the last of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from mesh.client import Client
from mesh.errors import MeshError
from mesh.research.harvest.dataset import PromptBatch
from mesh.research.harvest.index import HarvestIndex

RETRY_DELAYS_S = (1.0, 5.0, 15.0)


async def run(
    client: Client,
    index: HarvestIndex,
    batches: Iterator[PromptBatch],
    *,
    parallel: int,
    on_batch: Callable[[dict[str, Any]], None],
) -> int:
    """Harvest every batch that is not there yet; how many there are in all.

    Raises what the daemon reports, and what reading the data set raises.
    """
    done = await asyncio.to_thread(index.done)
    reading = asyncio.Lock()
    count = 0

    async def work() -> None:
        nonlocal count
        while True:
            async with reading:  # one at a time, in order
                batch = await asyncio.to_thread(next, batches, None)
            if batch is None:
                return
            count += 1
            if batch.number not in done:
                result = await _ask(client, index, batch)
                await asyncio.to_thread(index.add, result)
                on_batch(result)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(parallel):
                group.create_task(work(), name=f"harvest {number}")
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return count


async def _ask(client: Client, index: HarvestIndex, batch: PromptBatch) -> dict[str, Any]:
    delays = iter(RETRY_DELAYS_S)
    plan = index.plan
    while True:
        try:
            result = await client.harvest(
                model=plan.model, run=plan.run, batch=batch.number, module=plan.module,
                texts=list(batch.texts), max_tokens=plan.max_tokens,
            )  # fmt: skip
        except MeshError as error:
            delay = next(delays, None)
            if delay is None or not error.retryable:
                raise
            await asyncio.sleep(delay)
        else:
            cut = set(result.pop("cut"))
            prompts = [
                {"line": line, "ids": ids, "cut": number in cut}
                for number, (line, ids) in enumerate(
                    zip(batch.lines, result["prompts"], strict=True)
                )
            ]
            return {**result, "prompts": prompts}
