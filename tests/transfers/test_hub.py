"""The hub, as a stand-in speaks for it: whatever it does, what is pulled is right or it is said."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.discovery.weights import Arriving, HeldWeights
from mesh.errors import Busy, HubRefused, MeshError, ModelNotFound, TransferFailed
from mesh.identity.api_certificate import keep_certificate
from mesh.models.in_use import use
from mesh.models.manifest import Manifest, read_manifest
from mesh.models.partial import read_record
from mesh.models.partial_writer import PartialWriter
from mesh.models.pooling import POOLING_CONFIG
from mesh.transfers.commands import PeerHolding
from mesh.transfers.hub import HubSettings
from mesh.types import Endpoint, LayerRange, ModelId
from tests.checkpoints import make_checkpoint, make_embedding_model
from tests.transfers.house import MODEL, Fetcher, house, hub_house, up
from tests.transfers.hub_standin import HubStandin
from tests.transfers.test_fetcher import progress, right, weights_bytes

TEMPLATE = "additional_chat_templates/tool_use.jinja"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    directory = make_checkpoint(
        tmp_path_factory.mktemp("whole"), "llama", layers=8, hidden=256, vocab=9000
    )
    make_embedding_model(directory)
    (directory / TEMPLATE).parent.mkdir()
    (directory / TEMPLATE).write_text("{{ tools }}")
    return read_manifest(directory, model_id=MODEL)


@pytest.fixture
def hub(whole: Manifest) -> Iterator[HubStandin]:
    with HubStandin(whole.directory) as standin:
        yield standin


def weights_sent(hub: HubStandin) -> int:
    return sum(count for name, count in hub.sent.items() if name.endswith(".safetensors"))


async def test_it_is_read_once_for_the_whole_house(
    tmp_path: Path, whole: Manifest, hub: HubStandin
) -> None:
    async with hub_house(tmp_path, hub.url, "one", "two", "three") as (_, (one, two, three)):
        # From two terminals at once on one of the machines.
        pulls = [fetcher.supervisor.pull("org/toy") for fetcher in (one, one, two)]
        for directory in await asyncio.gather(*pulls):
            assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)
            record = await asyncio.to_thread(read_record, directory)
            assert record.weights_sha256 == whole.weights_sha256
            assert record.origin == f"org/toy@{hub.commit}"
        part = await three.supervisor.pull("org/toy", [LayerRange(2, 4)], ends=False)
        names = {entry.name for entry in whole.layer_tensors(LayerRange(2, 4))}
        assert await asyncio.to_thread(right, part, whole) == names
        file_size = (
            await asyncio.to_thread(os.stat, whole.directory / "model.safetensors")
        ).st_size
        assert weights_sent(hub) == file_size


async def test_what_no_neighbour_kept_comes_by_ranges(
    tmp_path: Path, whole: Manifest, hub: HubStandin
) -> None:
    async with hub_house(tmp_path, hub.url, "one", "two") as (_, (one, two)):
        directory = await one.supervisor.pull("org/toy", [LayerRange(0, 4)], drop=True)
        kept = {entry.name for entry in whole.layer_tensors(LayerRange(0, 4))}
        kept |= {entry.name for entry in whole.ends_tensors()}
        assert await asyncio.to_thread(right, directory, whole) == kept
        before = weights_sent(hub)
        directory = await two.supervisor.pull("org/toy", [LayerRange(2, 6)], ends=False)
        wanted = whole.layer_tensors(LayerRange(2, 6))
        assert await asyncio.to_thread(right, directory, whole) == {e.name for e in wanted}
        for file in (POOLING_CONFIG, TEMPLATE):
            assert await asyncio.to_thread((directory / file).exists)
        assert weights_sent(hub) - before == sum(
            entry.nbytes for entry in whole.layer_tensors(LayerRange(4, 6))
        )


async def test_wrong_bytes_of_a_range_are_refused_and_not_kept(
    tmp_path: Path, whole: Manifest, hub: HubStandin
) -> None:
    async with hub_house(tmp_path, hub.url, "one", "two", patience_s=8.0) as (made, (one, two)):
        await one.supervisor.pull("org/toy", [LayerRange(0, 4)], drop=True)
        hub.mischief.wrong = 10**6
        with pytest.raises(TransferFailed, match="No node that is up has"):
            await two.supervisor.pull("org/toy", [LayerRange(4, 6)], ends=False)
        (directory,) = await asyncio.to_thread(lambda: list((made.root / "two/models").glob("*@*")))
        kept = await asyncio.to_thread(right, directory, whole)
        assert not kept & {
            e.name for e in whole.layer_tensors(LayerRange(4, 6)) if e.nbytes > 10_000
        }
        ((kind, fields), *_) = two.events
        assert (kind, fields["name"]) == ("weights_lied", "hub")
        hub.mischief.wrong = 0
        await two.supervisor.pull("org/toy", [LayerRange(4, 6)], ends=False)
        kept = await asyncio.to_thread(right, directory, whole)
        assert kept >= {e.name for e in whole.layer_tensors(LayerRange(4, 6))}


async def pulled(
    tmp_path: Path, whole: Manifest, hub: HubStandin, token: str | None = None
) -> Fetcher:
    async with house(tmp_path, "one") as made:
        made.hub = HubSettings(hub.url, token)
        one = made.start("one")
        await up(one)
        directory = await one.supervisor.pull("org/toy")
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)
        for file in (POOLING_CONFIG, TEMPLATE):
            assert await asyncio.to_thread((directory / file).exists)
        return one


async def test_it_is_patient(tmp_path: Path, whole: Manifest, hub: HubStandin) -> None:
    """With the listing and the small files."""
    hub.mischief.throttled = 2
    hub.mischief.cut = 3
    await pulled(tmp_path, whole, hub)


async def test_weights_go_on_when_the_hub_says_and_where_they_broke_off(
    tmp_path: Path, whole: Manifest, hub: HubStandin
) -> None:
    hub.mischief.suffix = ".safetensors"
    hub.mischief.cut, hub.mischief.throttled = 2, 1
    hub.mischief.throttled_after_bytes, hub.mischief.retry_after = 1, "3"
    await pulled(tmp_path, whole, hub)
    answers = [each for each in hub.given if each.name == "model.safetensors"]
    assert [each.status for each in answers] == [206, 429, 206, 206]
    assert answers[2].at - answers[1].at >= 2.9
    size = await asyncio.to_thread(lambda: (whole.directory / "model.safetensors").stat().st_size)
    # What came before it broke off is not asked for again: no byte is given twice.
    assert hub.sent["model.safetensors"] == size
    assert [each.start for each in answers if each.status == 206] == [
        0, size // 2, size // 2 + (size - size // 2) // 2
    ]  # fmt: skip


async def test_a_slow_hub_is_said_to_be_as_slow_as_it_is(
    tmp_path: Path, whole: Manifest, hub: HubStandin
) -> None:
    rate = hub.mischief.bytes_per_s = 2e6
    hub.mischief.suffix = ".safetensors"
    async with house(tmp_path, "one") as made:
        made.hub = HubSettings(hub.url)
        one = made.start("one")
        await up(one)
        pull = asyncio.create_task(one.supervisor.pull("org/toy"))
        await progress(one, 3.5 * rate / weights_bytes(whole))
        (row,) = one.supervisor.transfers
        assert row.bytes_per_s == pytest.approx(rate, rel=0.3)
        assert row.eta_s == pytest.approx((row.total_bytes - row.done_bytes) / rate, rel=0.4)
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull


async def test_without_ranges_it_goes_on_all_the_same(
    tmp_path: Path, whole: Manifest, hub: HubStandin
) -> None:
    hub.mischief.knows_ranges = False
    hub.mischief.cut = 3
    await pulled(tmp_path, whole, hub)


async def test_wrong_bytes_are_fetched_once_more_and_then_said(
    tmp_path: Path, whole: Manifest, hub: HubStandin
) -> None:
    hub.mischief.wrong = 1
    await pulled(tmp_path / "a", whole, hub)
    hub.mischief.wrong = 99
    with pytest.raises(TransferFailed, match="other bytes than the hub says, 2 times"):
        await pulled(tmp_path / "b", whole, hub)


@pytest.mark.parametrize(
    ("name", "gated", "kind", "words"),
    [
        ("org/toy", False, HubRefused, "does not give org/toy to you"),
        ("org/toy", True, HubRefused, "accepted its terms"),
        ("org/other", False, ModelNotFound, "The hub has no org/other"),
        ("../etc", False, ModelNotFound, "no repository's name"),
    ],
)
async def test_a_refusal_says_what_to_do(
    name: str, gated: bool, kind: type[MeshError], words: str, tmp_path: Path, hub: HubStandin
) -> None:
    hub.mischief.token, hub.mischief.gated = "secret" if kind is HubRefused else "", gated
    async with house(tmp_path, "one") as made:
        made.hub = HubSettings(hub.url)
        one = made.start("one")
        await up(one)
        with pytest.raises(kind, match=words):
            await one.supervisor.pull(name)


@pytest.mark.parametrize(
    ("portal", "endpoint", "words", "fix"),
    [
        (200, "", "not understood: it is not JSON", "log in first"),
        (302, "", "sends on and on", "log in first"),
        (0, "hub.local", "hub.local is no address of a hub", "another HF_ENDPOINT"),
    ],
)
async def test_what_is_no_hub_is_said_at_once(
    portal: int, endpoint: str, words: str, fix: str, tmp_path: Path, hub: HubStandin
) -> None:
    hub.mischief.portal = portal
    async with house(tmp_path, "one") as made:
        made.hub = HubSettings(endpoint or hub.url)
        one = made.start("one")
        await up(one)
        with pytest.raises(HubRefused, match=words) as refused:
            await one.supervisor.pull("org/toy")
        assert fix in str(refused.value.fix)


async def test_who_proves_to_be_another_is_no_matter_of_the_connection(tmp_path: Path) -> None:
    """A network that wants a login answers for every name; a clock at 1970 believes nobody."""
    files = tmp_path / "portal.pem", tmp_path / "portal.key"
    await asyncio.to_thread(keep_certificate, *files, ["127.0.0.1"])
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    await asyncio.to_thread(shown.load_cert_chain, *files)

    def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with (
        await asyncio.start_server(answer, "127.0.0.1", 0, ssl=shown) as portal,
        house(tmp_path, "one") as made,
    ):
        made.hub = HubSettings(f"https://127.0.0.1:{portal.sockets[0].getsockname()[1]}")
        one = made.start("one")
        await up(one)
        with pytest.raises(TransferFailed, match="CERTIFICATE_VERIFY_FAILED") as told:
            await one.supervisor.pull("org/toy")
    assert "clock" in told.value.fix
    assert "log in first" in told.value.fix


async def test_a_token_is_shown_and_offline_is_kept(
    tmp_path: Path, whole: Manifest, hub: HubStandin
) -> None:
    hub.mischief.token = "secret"  # noqa: S105 - a test's
    await pulled(tmp_path / "a", whole, hub, "secret")
    async with house(tmp_path / "b", "one") as made:
        made.hub = HubSettings(hub.url, "secret", offline=True)
        one = made.start("one")
        with pytest.raises(HubRefused, match="HF_HUB_OFFLINE is set"):
            await one.supervisor.pull("org/toy")


async def test_a_kill_costs_little(tmp_path: Path, whole: Manifest, hub: HubStandin) -> None:
    async with house(tmp_path, "one") as made:
        made.hub = HubSettings(hub.url)
        one = made.start("one", bytes_per_s=20e6)
        one.supervisor.restart_delays_s = (0.0,)
        await up(one)
        pull = asyncio.create_task(one.supervisor.pull("org/toy"))
        await progress(one, 0.4)
        assert one.supervisor.pid is not None
        os.kill(one.supervisor.pid, signal.SIGKILL)
        directory = await pull
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)
        assert weights_sent(hub) < 1.5 * weights_bytes(whole)


async def test_a_commit_that_leaves_the_weights_alone_is_read_once_more_at_most(
    tmp_path: Path,
) -> None:
    checkpoint = await asyncio.to_thread(
        make_checkpoint, tmp_path / "whole", "llama", layers=4, hidden=64, vocab=300
    )
    size = (await asyncio.to_thread(os.stat, checkpoint / "model.safetensors")).st_size
    with HubStandin(checkpoint) as hub:
        async with hub_house(tmp_path / "house", hub.url, "one") as (_, (one,)):
            layers = [LayerRange(0, 1)]
            first = await one.supervisor.pull("org/toy", layers, ends=False, drop=True)
            await asyncio.to_thread((checkpoint / "README.md").write_text, "edited")
            layers = [LayerRange(2, 4)]
            async with asyncio.timeout(30):
                second = await one.supervisor.pull("org/toy", layers, ends=False, drop=True)
            assert second == first
            (held,) = one.supervisor.holdings
            assert held.layers == (LayerRange(0, 1), LayerRange(2, 4))
        assert weights_sent(hub) < 4 * size


async def test_what_is_in_use_is_added_to_and_never_replaced(tmp_path: Path) -> None:
    checkpoint = await asyncio.to_thread(
        make_checkpoint, tmp_path / "whole", "llama", layers=4, hidden=64, vocab=300
    )
    with HubStandin(checkpoint) as hub:
        async with hub_house(tmp_path / "house", hub.url, "one") as (_, (one,)):
            layers = [LayerRange(0, 1)]
            first = await one.supervisor.pull("org/toy", layers, ends=False, drop=True)
            there = await asyncio.to_thread(os.stat, first)
            await asyncio.to_thread((checkpoint / "README.md").write_text, "edited")
            writer = await asyncio.to_thread(PartialWriter, first)
            with pytest.raises(Busy):
                await one.supervisor.pull("org/toy", hub_alone=True)
            await asyncio.to_thread(writer.close)
            await asyncio.to_thread(use, first)
            assert await one.supervisor.pull("org/toy", hub_alone=True) == first
        assert os.path.samestat(there, await asyncio.to_thread(os.stat, first))
        manifest = await asyncio.to_thread(read_manifest, checkpoint, model_id=MODEL)
        assert await asyncio.to_thread(right, first, manifest) == set(manifest.tensors)
        staging = first.parent / ".hub"
        assert not await asyncio.to_thread(lambda: list(staging.glob("org--*")))


async def test_nobody_is_believed_what_the_hub_has_where_it_says_something_else(
    tmp_path: Path, whole: Manifest, hub: HubStandin
) -> None:
    other = await asyncio.to_thread(
        make_checkpoint, tmp_path / "other", "llama", layers=8, hidden=64, vocab=300
    )
    async with house(tmp_path / "with a liar", "liar", "victim") as made:
        made.hub = HubSettings(hub.url)
        liar, victim = made.start("liar", other), made.start("victim", patience_s=4.0)
        await up(liar, victim)
        origin = f"org/toy@{hub.commit}"
        said = [replace(peer, held=replace(peer.held, origin=origin)) for peer in liar.holding()]
        victim.supervisor.hear(said, 1)
        with pytest.raises(TransferFailed, match=r"is not that of org/toy on the hub") as refused:
            await victim.supervisor.pull("org/toy")
        assert "--from hub" in refused.value.fix
        directory = await victim.supervisor.pull("org/toy", hub_alone=True)
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)
        # It has read it itself now, and believes nobody any more.
        assert await victim.supervisor.pull("org/toy") == directory


async def test_who_says_that_it_fetches_and_gets_nothing_is_not_waited_for(
    tmp_path: Path, whole: Manifest, hub: HubStandin
) -> None:
    async with house(tmp_path, "idler", "one") as made:
        made.hub = HubSettings(hub.url)
        one = made.start("one", patience_s=1.0)
        await up(one)
        held = HeldWeights(
            ModelId("org/toy"), "", 0, (), ends=False, endpoint=Endpoint("wss://127.0.0.1:9"),
            origin=f"org/toy@{hub.commit}", arriving=Arriving(0, 9, 0),
        )  # fmt: skip
        claim = PeerHolding(made.keys["idler"].node_id, "idler", held)
        one.supervisor.hear([claim], 1)
        pull = asyncio.create_task(one.supervisor.pull("org/toy"))
        for arrived in (1, 2, 3, 4, 5, 6, 7, 8):  # while something comes it is
            await asyncio.sleep(0.5)
            more = replace(held, arriving=Arriving(arrived, 9, 1))
            one.supervisor.hear([replace(claim, held=more)], 1)
        assert not pull.done()
        assert weights_sent(hub) == 0
        async with asyncio.timeout(30):
            directory = await pull
        assert await asyncio.to_thread(right, directory, whole) == set(whole.tensors)


async def test_what_the_hub_said_is_told_with_what_is_missing(
    tmp_path: Path, whole: Manifest, hub: HubStandin
) -> None:
    async with hub_house(tmp_path, hub.url, "one", patience_s=3.0) as (_, (one,)):
        await one.supervisor.pull("org/toy", [LayerRange(0, 1)], ends=False, drop=True)
        hub.mischief.token, hub.mischief.gated = "secret", True
        with pytest.raises(TransferFailed, match=r"accepted its terms.*hf auth login"):
            await one.supervisor.ensure(
                ModelId("org/toy"), whole.weights_sha256, [LayerRange(1, 2)], ends=False
            )
