"""Shards that come and go while their process runs, with a real one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mesh.shard.supervisor import ShardSupervisor
from mesh.types import Done, LayerRange, ShardFailover, ShardId, ShardStatus, StreamFrame
from tests import secure
from tests.interventions.worlds import checkpoint
from tests.mesh_e2e.spread import MODEL, asking, greedy, hugging_face, loads_of
from tests.waiting import until

pytestmark = pytest.mark.slow
PROMPT = list(range(5, 45))
TOKENS = 40


async def test_a_running_answer_moves_off_a_shard_that_is_unloaded(tmp_path: Path) -> None:
    manifest = await asyncio.to_thread(checkpoint, "llama")
    directory = Path(manifest.directory)
    expected, _ = await asyncio.to_thread(hugging_face, directory, PROMPT, TOKENS)
    total = manifest.total_layers
    first, second, spare = LayerRange(0, 2), LayerRange(2, total), LayerRange(1, total)
    async with secure.hosting(tmp_path, *loads_of(directory, [first])) as host:
        (load,) = loads_of(directory, [second])
        await host.serve(secure.request(tmp_path, **load))
        assert set(host.shards) == {f"{MODEL}:{first}", f"{MODEL}:{second}"}
        frames: list[StreamFrame] = []
        async with asking(host, directory, MODEL, tmp_path) as mesh:
            await mesh.use([first, second])
            (load,) = loads_of(directory, [spare])
            added = await host.serve(secure.request(tmp_path, **load))
            dropping: asyncio.Task[int] | None = None
            name = ShardId(f"{MODEL}:{second}")
            async for frame in mesh.chat(greedy(PROMPT, TOKENS)):
                frames.append(frame)
                if len(frames) == 4:
                    mesh.offer(added.descriptor)
                    dropping = asyncio.create_task(host.drop(name, 30.0))
                    await asyncio.sleep(0.3)  # the process has told the asker
            assert dropping is not None
            assert await dropping == 0, "nobody was cut off"
        done = frames[-1]
        assert isinstance(done, Done)
        assert list(done.token_ids) == expected
        assert [f.status for f in frames if isinstance(f, ShardStatus)] == ["draining"]
        assert [f.lost for f in frames if isinstance(f, ShardFailover)] == [name]
        assert name not in host.shards
        assert name not in host.wanted


async def test_what_nobody_wants_just_as_it_has_loaded_is_loaded_when_it_is_wanted_again(
    tmp_path: Path,
) -> None:
    manifest = await asyncio.to_thread(checkpoint, "llama")
    (load,) = loads_of(Path(manifest.directory), [LayerRange(0, 1)])
    request, tasks = secure.request(tmp_path, **load), list[asyncio.Task[object]]()

    def has_changed() -> None:
        if tasks and host.shards:
            tasks.pop().cancel()

    host = ShardSupervisor(secure.start_command(), [], has_changed)
    try:
        tasks.append(serving := asyncio.create_task(host.serve(request)))
        with pytest.raises(asyncio.CancelledError):
            await serving
        await host.serve(request)
        assert set(host.shards) == {request.shard_id}
        # Nor is it taken for one that is here where nobody wants it while it loads.
        await host.drop(request.shard_id, 0.0)
        serving = asyncio.create_task(host.serve(request))
        await asyncio.wait([serving], timeout=0.01)
        serving.cancel()
        await until(lambda: not host.has(request.shard_id))
        assert not host.private
    finally:
        await host.stop()


async def test_who_does_not_move_is_ended_after_the_grace_and_memory_comes_back(
    tmp_path: Path,
) -> None:
    manifest = await asyncio.to_thread(checkpoint, "llama")
    directory = Path(manifest.directory)
    whole = LayerRange(0, manifest.total_layers)
    async with secure.hosting(tmp_path, *loads_of(directory, [whole])) as host:
        name = ShardId(f"{MODEL}:{whole}")
        async with asking(host, directory, MODEL, tmp_path) as mesh:
            await mesh.use([whole])
            stream = mesh.chat(greedy(PROMPT, 900))
            await anext(stream)
            dropping = asyncio.create_task(host.drop(name, 0.5))
            await asyncio.sleep(0)
            request = secure.request(tmp_path, **loads_of(directory, [whole])[0])
            alone = asyncio.create_task(host.ensure(request))
            assert await dropping == 1
            await stream.aclose()  # type: ignore[attr-defined]
        assert await held(host) == set()
        await alone
        assert host.private.keys() == {name}
        assert await host.drop(name, 0.0) == 0
        await host.serve(request)
        assert await held(host) == {name}
        again = asyncio.create_task(host.drop(name, 0.0))
        await asyncio.sleep(0)
        await host.serve(request)
        assert await again == 0
        assert await held(host) == {name}
        assert await host.drop(ShardId("nothing:0-1"), 0.0) == 0


async def held(host: ShardSupervisor) -> set[ShardId]:
    """What the process itself says that it holds, heard anew."""
    said: set[ShardId] = set()
    for shard in host.shards.values():
        shard.report = None
    async with asyncio.timeout(20):
        while any(shard.report is None for shard in host.shards.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    for shard in host.shards.values():
        assert shard.report is not None
        if shard.report.load.loaded:
            said.add(shard.descriptor.shard_id)
    return said
