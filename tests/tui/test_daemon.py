"""The feed of a real daemon, and the dashboard over it: a generation as it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from mesh.cli.local_node import LocalNode
from mesh.client import Client, client_of
from mesh.units import memory_size
from tests.checkpoints import make_checkpoint
from tests.tui.conftest import running
from tests.waiting import wait_until
from tests.warm.daemons import WarmNode

pytestmark = pytest.mark.slow
LOADING_S = 150.0


@pytest.fixture(scope="module")
def sofa(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNode]:
    """One daemon with the built-in model, and a checkpoint on its disk, for the module."""
    root = tmp_path_factory.mktemp("feed")
    make_checkpoint(root / "models" / "toy", "llama", layers=4)
    environment = {"OMP_NUM_THREADS": "1", "HEARTHNET_MODELS_DIR": str(root / "models")}
    with WarmNode("sofa", root, ("--threads", "1"), environment) as node:
        node.wait_ready()
        yield node


async def generate(client: Client, tokens: int) -> None:
    options = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    async with aclosing(client.complete("builtin", "Once", **options)) as chunks:
        async for _ in chunks:
            pass


async def test_a_generation_is_seen_as_it_runs_and_when_it_has_ended(sofa: LocalNode) -> None:
    seen: list[dict[str, Any]] = []
    updates_while_running = 0
    async with client_of(sofa.record) as client, asyncio.timeout(60):
        work = asyncio.create_task(generate(client, 200), name="generate")
        loop = asyncio.get_running_loop()
        async with aclosing(client.follow(0)) as updates:
            begun = loop.time()
            async for update in updates:
                rows = update["status"].get("generations", [])
                seen += rows
                updates_while_running += bool(rows)
                if seen and rows == [] and "generations" in update["status"]:
                    break
            assert updates_while_running <= (loop.time() - begun) * 10 + 2
        await work
    last = seen[-1]
    counted = [row["tokens"] for row in seen]
    assert counted == sorted(counted)
    assert 1 < last["tokens"] <= 200
    assert last["prompt_tokens"] > 0
    assert last["first_token_ms"] > 0
    assert last["tokens_per_second"] > 0
    (hop,) = last["route"]
    assert (hop["node"], hop["layers"]) == ("sofa", "0-7")
    assert hop["p50_ms"] >= hop["compute_p50_ms"] > 0


async def test_events_come_again_by_their_ids(sofa: LocalNode) -> None:
    async with client_of(sofa.record) as client, asyncio.timeout(20):
        async with aclosing(client.follow(0)) as updates:
            first = await anext(updates)
        assert {"node", "models", "jobs"} <= set(first["status"])
        async with aclosing(client.follow(first["last_id"])) as updates:
            again = await anext(updates)
        assert all(event["id"] > (first["last_id"] or 0) for event in again["events"])


async def test_the_signed_log_is_listed(sofa: LocalNode) -> None:
    async with client_of(sofa.record) as client, asyncio.timeout(20):
        page = await client.log(type="hearth")
        assert [row["type"] for row in page["decisions"]][-1] == "hearth.founded"
        assert page["facts"] == []
        everything = await client.log()
        assert {row["author_name"] for row in everything["decisions"]} == {"sofa"}


async def test_the_dashboard_shows_it(sofa: LocalNode) -> None:
    def connect() -> Client:
        return client_of(sofa.record)

    async with running(connect, (120, 40)) as top, connect() as client:
        await top.until("working · builtin")
        work = asyncio.create_task(generate(client, 3000), name="generate")
        text = await top.until("sofa 0-7 ")
        assert "A ● sofa" in text
        await top.until("▲ ")
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await top.until("none runs")
        await top.press("7")
        await top.until("ready for requests")
        await top.press("6", "s")
        await top.until("hearth.founded")


async def test_a_model_is_deployed_and_evicted_from_the_dashboard(sofa: LocalNode) -> None:
    def estimated() -> object:
        return sofa.post("/mesh/v1/plan", {"model": "toy"}).json()["replicas"]

    # Until a machine has measured itself it is said that nothing fits, and not looked at again.
    await asyncio.to_thread(wait_until, estimated, "sofa is measured", limit_s=LOADING_S)
    async with running(lambda: client_of(sofa.record), (120, 40)) as top:
        await top.until("working · builtin")
        await top.press("3", "n")
        await top.until("Deploy a model")
        await top.press(*"toy", "enter")
        text = await top.until("replica 1: about", LOADING_S)
        assert "sofa 0-3: needs" in text
        await top.press("enter")
        await top.until("toy is wished for")
        text = await top.until("● sofa 0-3 · ready", LOADING_S)
        assert "toy       1 of 1    ● ready" in text
        await top.press("e")
        assert "Unloaded: 0-3 on sofa." in await top.until("Evict toy?")
        await top.press("y")
        await top.until("toy is evicted.")
        await top.until(lambda: "1 of 1" not in top.text())


async def test_a_deployment_is_scaled_from_the_dashboard_as_it_was_wished(sofa: LocalNode) -> None:
    async with client_of(sofa.record) as client, asyncio.timeout(3 * LOADING_S):
        own = (await client.status())["node"]["id"]
        wish = {"quant": "none", "context": 1 << 16, "nodes": [own], "layers": [f"{own}=0-3"]}
        plain = await need_of(client)
        row = await client.deploy("toy", **wish)
        assert {name: row[name] for name in wish} == wish
        async with running(lambda: client_of(sofa.record), (120, 40)) as top:
            await top.until("working · builtin")
            await top.press("3")
            await top.until("● sofa 0-3 · ready", LOADING_S)
            await top.press("s")
            await top.until("Scale toy")
            await top.press("backspace", "0", "enter")
            await top.until("No replica stays loaded")
            await top.press("enter")
            await top.until("0 of 0", LOADING_S)
            await top.press("s")
            await top.until("Scale toy")
            await top.press("backspace", "1", "enter")
            need = await need_of(client, **wish)
            assert need != plain
            assert f"sofa 0-3: needs {need}" in await top.until("replica 1: about")
            await top.press("enter")
            await top.until("● sofa 0-3 · ready", LOADING_S)
            assert "1 of 1" in top.text()
        await client.evict("toy")


async def need_of(client: Client, **settings: Any) -> str:
    """What all of the checkpoint takes of the machine."""
    plan = await client.plan("toy", **settings)
    (shard,) = plan["replicas"][0]["shards"]
    return memory_size(shard["need"]["total"])
