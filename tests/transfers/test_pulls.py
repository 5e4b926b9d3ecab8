"""The verbs about models on disk, over fetchers as they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh.errors import BadRequest, Busy, ModelNotFound
from mesh.identity.keys import short_id
from mesh.models.manifest import read_manifest
from mesh.transfers.begun import PullWish
from mesh.transfers.commands import PeerHolding
from mesh.transfers.pulls import PullContext, Pulls
from mesh.types import LayerRange
from tests.checkpoints import make_checkpoint
from tests.transfers.house import MODEL, Fetcher, house, hub_house, up
from tests.transfers.hub_standin import HubStandin
from tests.transfers.test_fetcher import sent


def pulls_of(taker: Fetcher, peers: Callable[[], Sequence[PeerHolding]], root: Path) -> Pulls:
    def ignore(kind: str, fields: dict[str, Any]) -> None:
        pass

    files = root / "cache", root / taker.name / "models", root / "pulls.json"
    return Pulls(taker.supervisor, PullContext(peers, tuple, ignore, *files))


async def test_each_of_two_pulls_of_a_model_says_how_far_it_is_itself(tmp_path: Path) -> None:
    directory = await asyncio.to_thread(
        make_checkpoint, tmp_path / "whole", "llama", layers=2, hidden=128, vocab=300
    )
    whole = await asyncio.to_thread(read_manifest, directory, model_id=MODEL)
    size = sum(entry.nbytes for entry in whole.layer_tensors(LayerRange(0, 1)))
    async with house(tmp_path, "giver", "taker") as made:
        giver = made.start("giver", directory, bytes_per_s=size / 30)
        taker = made.start("taker")
        await up(giver, taker)
        made.introduce()
        pulls = pulls_of(taker, giver.holding, tmp_path)
        first, second = (
            pulls.start(PullWish(MODEL, (LayerRange(layer, layer + 1),), ends=False))["pull"]
            for layer in (0, 1)
        )

        async def transfer(name: str) -> dict[str, Any]:
            found: dict[str, Any] = (await pulls.outcome(name, 0.0))["transfer"] or {}
            return found

        async with asyncio.timeout(20):
            while not (await transfer(first)).get("total_bytes"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await transfer(second))["state"] == "waiting"
        await pulls.close()


async def test_a_cancelled_pull_fetches_no_more_and_what_came_is_kept(tmp_path: Path) -> None:
    directory = await asyncio.to_thread(
        make_checkpoint, tmp_path / "whole", "llama", layers=4, hidden=128, vocab=300
    )
    whole = await asyncio.to_thread(read_manifest, directory, model_id=MODEL)
    size = sum(entry.nbytes for entry in whole.layer_tensors(LayerRange(0, 4)))
    async with house(tmp_path, "giver", "taker") as made:
        giver = made.start("giver", directory, bytes_per_s=size / 4)
        taker = made.start("taker")
        await up(giver, taker)
        made.introduce()
        pulls = pulls_of(taker, giver.holding, tmp_path)
        name = pulls.start(PullWish(MODEL, ends=False))["pull"]

        def come() -> int:
            return sum(row["done_bytes"] for row in pulls.view()["transfers"])

        async with asyncio.timeout(20):
            while not come():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        (row,) = pulls.view()["pulls"]
        assert (row["pull"], row["model"]) == (name, MODEL)
        assert row["transfer"] == pulls.view()["transfers"][0]["id"]
        ended = await pulls.cancel(name)
        assert (ended["state"], ended["error"]["message"]) == ("failed", "It was cancelled.")
        assert pulls.view()["pulls"] == []
        after = pulls_of(taker, giver.holding, tmp_path)
        await after.go_on()
        assert after.view()["pulls"] == []
        async with asyncio.timeout(20):
            while pulls.view()["transfers"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            while not pulls.view()["models"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        kept = pulls.view()["models"][0]
        assert 0 < kept["here_bytes"] < size
        await pulls.close()


async def test_what_is_pulled_from_one_node_comes_from_no_other(tmp_path: Path) -> None:
    directory = await asyncio.to_thread(
        make_checkpoint, tmp_path / "whole", "llama", layers=4, hidden=128, vocab=300
    )
    async with house(tmp_path, "one", "two", "taker") as made:
        one, two = made.start("one", directory), made.start("two", directory)
        taker = made.start("taker", patience_s=0.5)
        await up(one, two, taker)
        made.introduce()
        peers = [*one.holding(), *two.holding()]
        pulls = pulls_of(taker, lambda: peers, tmp_path)
        half = (LayerRange(0, 2),)
        for wish in (PullWish(MODEL, half, source="two"), PullWish(MODEL, source=two.key.node_id)):
            name = pulls.start(wish)["pull"]
            assert (await pulls.outcome(name, 20.0))["state"] == "done"
        assert (await sent(one), await sent(two)) == (0, pulls.view()["models"][0]["total_bytes"])
        await pulls.remove(MODEL)
        await two.supervisor.stop()
        name = pulls.start(PullWish(MODEL, source="two"))["pull"]
        outcome = await pulls.outcome(name, 30.0)
        assert outcome["error"]["code"] == "transfer_failed"
        assert await sent(one) == 0
        await pulls.close()


async def test_a_pull_goes_on_after_a_restart_though_nobody_is_found_yet(tmp_path: Path) -> None:
    directory = await asyncio.to_thread(make_checkpoint, tmp_path / "whole", "llama", layers=2)
    async with house(tmp_path, "giver", "taker") as made:
        giver, taker = made.start("giver", directory), made.start("taker")
        await up(giver, taker)
        before = pulls_of(taker, giver.holding, tmp_path)
        name = before.start(PullWish(MODEL, source="giver"))["pull"]
        async with asyncio.timeout(20):
            while not before.view()["transfers"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await before.close()
        await taker.supervisor.stop()

        taker = made.start("taker", patience_s=0.1)
        await up(taker)
        after = pulls_of(taker, tuple, tmp_path)
        after.go_on_s = 0.1
        await after.go_on()
        assert after.view()["pulls"] == [{"pull": name, "model": MODEL, "transfer": None}]
        async with asyncio.timeout(20):
            while after.view()["pulls"][0]["transfer"] in (None, "1"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        made.introduce()
        assert (await after.outcome(name, 20.0))["state"] == "done"
        await after.close()
        again = pulls_of(taker, tuple, tmp_path)
        await again.go_on()
        assert again.view()["pulls"] == []


async def test_a_directory_is_offered_again_after_a_restart_once_its_disk_is_there(
    tmp_path: Path,
) -> None:
    directory = await asyncio.to_thread(make_checkpoint, tmp_path / "whole", "llama", layers=1)
    async with house(tmp_path, "giver") as made:
        giver = made.start("giver")
        await up(giver)
        before = pulls_of(giver, tuple, tmp_path)
        for _ in range(2):
            name = before.start(PullWish(str(directory)))["pull"]
            assert (await before.outcome(name, 20.0))["state"] == "done"
        await before.close()
        await giver.supervisor.stop()

        away = directory.rename(tmp_path / "away")
        giver = made.start("giver")
        await up(giver)
        after = pulls_of(giver, tuple, tmp_path)
        after.go_on_s = 0.1
        await after.go_on()
        (row,) = after.view()["pulls"]
        assert row["model"] == str(directory)
        await asyncio.sleep(0.2)
        away.rename(directory)
        assert (await after.outcome(row["pull"], 20.0))["state"] == "done"
        async with asyncio.timeout(20):
            while not giver.supervisor.holdings:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert giver.supervisor.holdings[0].directory == directory
        (offer,) = after.view()["offers"]
        assert offer == {"pull": row["pull"], "directory": str(directory)}
        assert (await after.cancel(offer["pull"]))["state"] == "withdrawn"
        async with asyncio.timeout(20):
            while giver.supervisor.holdings:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert after.view()["offers"] == []
        await after.close()
        later = pulls_of(giver, tuple, tmp_path)
        await later.go_on()
        assert later.view()["pulls"] == [], "a restart would offer it again"


async def test_a_name_that_two_nodes_have_is_no_source(tmp_path: Path) -> None:
    directory = await asyncio.to_thread(make_checkpoint, tmp_path / "whole", "llama", layers=1)
    async with house(tmp_path, "one", "two") as made:
        one, two = made.start("one", directory), made.start("two")
        await up(one, two)
        (held,) = one.holding()
        peers = [held, replace(held, node=two.key.node_id)]
        pulls = pulls_of(two, lambda: peers, tmp_path)
        with pytest.raises(BadRequest, match="2 nodes are called 'one'") as refused:
            pulls.start(PullWish(MODEL, source="one"))
        assert all(short_id(peer.node) in str(refused.value.fix) for peer in peers)
        assert pulls.view()["pulls"] == []


async def test_a_revision_is_that_of_the_hub_also_where_the_model_is_here(tmp_path: Path) -> None:
    directory = tmp_path / "toy"
    await asyncio.to_thread(make_checkpoint, directory, "llama", layers=1)
    with HubStandin(directory) as hub:
        async with hub_house(tmp_path, hub.url, "one") as (_, (one,)):
            pulls = pulls_of(one, tuple, tmp_path)

            async def pulled(revision: str) -> dict[str, Any]:
                begun = pulls.start(PullWish("org/toy", revision=revision))
                return await pulls.outcome(begun["pull"], 30.0)

            first, at = await pulled("main"), hub.commit
            await asyncio.to_thread(make_checkpoint, directory, "llama", layers=1, seed=1)
            later = await pulled("v2.0")
            assert later["state"] == "done"
            assert later["directory"] != first["directory"]
            asked = hub.asked["api"]
            assert (await pulled(at))["directory"] == first["directory"]
            assert hub.asked["api"] == asked


async def test_what_came_of_the_hub_before_it_was_cancelled_is_said_and_removed(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "toy"
    await asyncio.to_thread(make_checkpoint, directory, "llama", layers=4, hidden=128, vocab=300)
    size = (directory / "model.safetensors").stat().st_size
    with HubStandin(directory) as hub:
        hub.mischief.suffix, hub.mischief.bytes_per_s = ".safetensors", size / 4
        async with hub_house(tmp_path, hub.url, "one") as (_, (one,)):
            pulls = pulls_of(one, tuple, tmp_path)
            name = pulls.start(PullWish("org/toy"))["pull"]
            async with asyncio.timeout(20):
                while not sum(row["done_bytes"] for row in pulls.view()["transfers"]):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            with pytest.raises(Busy):
                await pulls.remove("org/toy")
            await pulls.cancel(name)
            async with asyncio.timeout(20):
                while pulls.view()["transfers"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            (begun,) = await pulls.staged()
            assert (begun["model_id"], pulls.view()["models"]) == ("org/toy", [])
            gone = await pulls.remove("org/toy")
            assert gone == {"removed": "org/toy", "bytes": begun["bytes"]}
            assert await pulls.staged() == []
            with pytest.raises(ModelNotFound):
                await pulls.remove("org/toy")
