"""A host that is about to stop is left for whoever takes the session, not only for the best."""

from __future__ import annotations

import asyncio

from mesh.types import Done, ShardStatus
from tests.health.watched import PROMPT, halves, tokens_of, watched
from tests.pipeline.toy_mesh import expected_tokens, toy_request
from tests.simulation.virtual_loop import run_virtually


def test_a_replacement_that_is_gone_does_not_keep_a_session_on_a_stopping_host() -> None:
    async def main() -> None:
        network, back = halves("a", "b", "c")
        with watched(network) as mesh:
            frames = []
            async for frame in mesh.engine.chat(toy_request(PROMPT, 30)):
                frames.append(frame)
                if len(frames) == 5:
                    (serving,) = [shard for shard in back if shard.sessions]
                    best, free = [shard for shard in back if shard is not serving]
                    serving.drain()
                    best.kill()
                await asyncio.sleep(0.05)
            assert tokens_of(frames) == expected_tokens(PROMPT, 30)
            assert [f.status for f in frames if isinstance(f, ShardStatus)] == ["draining"]
            done = frames[-1]
            assert isinstance(done, Done)
            assert (done.route[-1].shard.host, done.failovers) == (free.descriptor.host, 0)
            await mesh.engine.close()

    run_virtually(main)
