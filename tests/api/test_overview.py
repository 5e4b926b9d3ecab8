"""What a node says of its models and why one cannot be asked: real askers, a real directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from mesh.api.overview import NodeParts, Overview
from mesh.api.services import Lack, LackKind
from mesh.clock import SystemClock
from mesh.config import Config
from mesh.discovery.directory import NodeInfo, Offering, ShardStore
from mesh.discovery.sightings import PeerState, PeerView
from mesh.discovery.weights import Arriving, HeldWeights
from mesh.errors import NotEnoughMemory
from mesh.health.detector import Verdict
from mesh.health.eventstream import EventFeed
from mesh.health.metrics import Metrics
from mesh.identity.tls import TlsMaterial
from mesh.models.builtin import checkpoint_dir
from mesh.models.local import LocalModel
from mesh.node.wiring import start_asker
from mesh.pipeline.commands import AskerReport, LiveGeneration
from mesh.pipeline.live import LiveCounts
from mesh.pipeline.supervisor import AskerSupervisor
from mesh.shard.supervisor import ShardSupervisor
from mesh.transfers.supervisor import FetcherSupervisor
from mesh.types import Endpoint, GenerationRequest, LayerRange, ModelId, shown_id
from tests import secure
from tests.checkpoints import make_checkpoint, make_embedding_model
from tests.discovery.network import advertised, new_id
from tests.pipeline.test_supervisor import Owner

LAYERS = 8
PEER = new_id()
WEIGHTS = "a" * 64
TLS = TlsMaterial.of(secure.KEY, [])
Rows = dict[str, dict[str, Any]]


@dataclass
class Household:
    """The parts of an overview, and askers that end with the test."""

    directory: Path
    models: list[LocalModel] = field(default_factory=list)
    askers: dict[ModelId, AskerSupervisor] = field(default_factory=dict)
    store: ShardStore = field(default_factory=lambda: ShardStore(SystemClock(), expiry_s=600))
    host: ShardSupervisor = field(default_factory=lambda: ShardSupervisor(None, (), lambda: None))
    lacking: list[Lack] = field(default_factory=list)
    peers: list[PeerView] = field(default_factory=list)
    verdict: Verdict = Verdict.HEALTHY
    counts: LiveCounts = field(default_factory=lambda: LiveCounts(SystemClock(), lambda: None))
    events: EventFeed = field(default_factory=lambda: EventFeed(SystemClock()))

    def hold(self, name: str, directory: Path, layers: LayerRange | None = None) -> AskerSupervisor:
        """A model of which this node has the files; its asker is not started."""
        model = LocalModel(ModelId(name), str(directory), WEIGHTS, LAYERS, None, layers)
        config = Config(state_dir=self.directory, threads=1)
        start = start_asker(config, secure.KEY, model, TLS)
        options = replace(start.options, cache_dir=self.directory)
        settings = replace(start.settings, cache_dir=str(self.directory))
        start = structs.replace(start, options=options, settings=settings)
        self.models.append(model)
        asker = self.askers[model.model_id] = AskerSupervisor(start, Owner())
        return asker

    def heard(self, kv_tokens: int = 0, **layers: str) -> None:
        """A peer serves these layers of these models, and nothing else."""
        shards = [advertised(PEER, span, name, WEIGHTS) for name, span in layers.items()]
        facts = {"total_layers": LAYERS, "kv_tokens": kv_tokens}
        own = [replace(s, descriptor=replace(s.descriptor, **facts)) for s in shards]
        self.store.update(NodeInfo(PEER, "kitchen", "192.168.1.2:7700", "0.1"), Offering(own))

    @property
    def overview(self) -> Overview:
        return Overview(
            NodeParts(
                node=dict, models={m.model_id: m for m in self.models}, store=self.store,
                peers=lambda: self.peers, askers=self.askers,
                host=self.host, events=self.events, metrics=Metrics(),
                verdict=lambda _: self.verdict, privacy=dict, lacking=lambda: self.lacking,
                processes=lambda: [self.host],
                accounts=list, deployments=list, counts=self.counts,
                weights=FetcherSupervisor(None), software="hearthnet/0.2.0",
            )
        )  # fmt: skip

    def why(self, name: str) -> Any:
        """The reason of the model's row, which is None for what can be asked alone."""
        (row,) = (row for row in self.overview.models() if row["id"] == name)
        assert row["runnable"] is (row["reason"] is None)
        return row["reason"]


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[Household]:
    household = await asyncio.to_thread(Household, tmp_path)
    yield household
    await asyncio.gather(*(asker.stop() for asker in household.askers.values()))


async def started(askers: Sequence[AskerSupervisor]) -> None:
    for asker in askers:
        asker.start()
    await asyncio.gather(*(asker.wait_ready() for asker in askers), return_exceptions=True)


async def test_what_others_fetch_is_told_of_those_that_are_there(home: Household) -> None:
    held = HeldWeights(ModelId("phi"), WEIGHTS, LAYERS, (), ends=False, endpoint=Endpoint(""))
    arriving = replace(held, arriving=Arriving(600, 2000, 100))
    home.store.update(
        NodeInfo(PEER, "kitchen", "192.168.1.2:7700", "0.1"), Offering(weights=(arriving,))
    )
    idle = NodeInfo(new_id(), "attic", "192.168.1.3:7700", "0.1")
    home.store.update(idle, Offering(weights=(held,)))
    assert home.overview.status()["weights"]["elsewhere"] == [
        {"node_id": PEER, "node": "kitchen", "model_id": "phi", "weights_sha256": WEIGHTS,
         "done_bytes": 600, "total_bytes": 2000, "bytes_per_s": 100, "eta_s": 14.0}
    ]  # fmt: skip
    home.store.offline(PEER)
    assert home.overview.status()["weights"]["elsewhere"] == []


async def test_a_warning_stays_while_the_nodes_of_a_large_house_come_and_go(
    home: Household,
) -> None:
    home.events.emit("warning", code="log_repaired")
    for number in range(1000):
        home.events.emit("peer_up", name=f"n{number % 40}")
    (warning,) = home.overview.status()["warnings"]
    assert warning["code"] == "log_repaired"
    for number in range(30):
        home.events.emit("warning", code=str(number))
    codes = [row["code"] for row in home.overview.status()["warnings"]]
    assert codes == [str(number) for number in range(10, 30)]


async def test_nodes_of_other_hearths_are_no_peers_that_are_down(home: Household) -> None:
    away = PeerView(PEER, "attic", "192.168.1.2:7700", PeerState.UNREACHABLE, "", None)
    home.peers = [
        away,
        replace(away, name="next-door", node_id=new_id(), state=PeerState.OTHER_HEARTH),
        replace(away, name="here", state=PeerState.SELF),
    ]
    lines = home.overview.metrics().decode().splitlines()
    told = [line for line in lines if line.startswith("hearthnet_peer_up{")]
    assert told == ['hearthnet_peer_up{peer="attic"} 0.0']


async def test_a_peer_that_is_gone_serves_nothing(home: Household) -> None:
    linked = PeerView(PEER, "kitchen", "192.168.1.2:7700", PeerState.UP, "", 0.7)
    home.peers = [linked]
    home.heard(good="0-7")
    (row,) = home.overview.peers()
    assert [(each["layers"], each["online"]) for each in row["shards"]] == [("0-7", True)]
    home.store.offline(PEER)
    home.peers = [replace(linked, state=PeerState.UNREACHABLE, rtt_ms=None)]
    (row,) = home.overview.peers()
    assert row["shards"] == []


async def test_a_peer_that_is_silent_serves_nothing_before_its_link_is_given_up(
    home: Household,
) -> None:
    home.heard(far="0-7")
    for home.verdict, missing in (
        (Verdict.HEALTHY, []), (Verdict.SUSPECT, []), (Verdict.LOST, ["0-7"]),
    ):  # fmt: skip
        (row,) = home.overview.models()
        assert row["missing"] == missing
        assert row["nodes"] == ([] if missing else ["kitchen"])


async def test_a_peer_of_another_version_is_said_to_be_one(home: Household) -> None:
    home.peers = [PeerView(PEER, "kitchen", "192.168.1.2:7700", PeerState.UP, "", 0.7)]
    for software, said in (
        ("hearthnet/0.2.0", None), ("hearthnet/0.1.9", "older"), ("hearthnet/0.10.0", "newer"),
        ("hearthnet/0.2.0.dev1", "another"), ("else/9", "another"),
    ):  # fmt: skip
        home.store.update(NodeInfo(PEER, "kitchen", "192.168.1.2:7700", software), Offering())
        (row,) = home.overview.peers()
        assert (row["software"], row["skew"]) == (software, said)


async def test_a_generation_that_has_ended_is_not_shown_without_its_counts(home: Household) -> None:
    asker = await asyncio.to_thread(home.hold, "good", checkpoint_dir())
    request = GenerationRequest("a", ModelId("good"), prompt="x")
    asker.report = AskerReport((LiveGeneration(shown_id("a"), ModelId("good"), (), 0),))
    with home.counts.counting(request):
        (row,) = home.overview.status()["generations"]
        assert (row["id"], row["tokens"], row["first_token_ms"]) == (shown_id("a"), 0, None)
    assert home.overview.status()["generations"] == []


@pytest.mark.slow
async def test_a_model_is_ready_or_its_row_says_why_not(home: Household, tmp_path: Path) -> None:
    toy = await asyncio.to_thread(make_checkpoint, tmp_path / "toy", "llama", layers=LAYERS)
    await asyncio.to_thread(make_embedding_model, toy)
    vectors = await asyncio.to_thread(home.hold, "vectors", toy)
    good = await asyncio.to_thread(home.hold, "good", checkpoint_dir())
    bad = await asyncio.to_thread(home.hold, "bad", tmp_path / "gone")
    home.heard(good="0-7", bad="0-7", vectors="0-7")
    assert [home.why("good"), home.why("bad")] == ["loading", "loading"]
    await started([good, bad, vectors])
    assert [row["id"] for row in home.overview.models()] == ["good", "bad", "vectors"]
    assert home.why("good") is None
    assert bad.error is not None
    assert home.why("bad") == f"failed: {bad.error.message}"
    said = home.overview.status()["reasons"]
    assert said[-1] == f"the ends of bad did not load: {bad.error}"
    home.heard(good="0-3")
    assert home.why("good") == "missing layers 4-7"


async def test_a_context_is_no_longer_than_the_caches_of_those_who_serve_it(
    home: Household,
) -> None:
    await asyncio.to_thread(home.hold, "good", checkpoint_dir())
    home.models = [replace(model, context=4096) for model in home.models]
    for positions, context in ((0, 4096), (8192, 4096), (512, 512)):  # 0: it does not say
        home.heard(positions, good="0-7")
        assert [row["context"] for row in home.overview.models()] == [context]


async def test_a_model_of_others_is_not_held_here(home: Household) -> None:
    home.heard(whole="0-7", half="0-3")
    assert home.why("whole") == "not held here (--model)"
    assert home.why("half") == "missing layers 4-7"


@pytest.mark.slow
async def test_layers_that_are_to_be_held_here_are_loading_or_have_failed(home: Household) -> None:
    asker = await asyncio.to_thread(home.hold, "good", checkpoint_dir(), LayerRange(4, 8))
    shard = secure.request(directory=".", model_id="good", layers="4-7")
    home.host = ShardSupervisor(None, (shard,), lambda: None)
    home.heard(good="0-3")
    await started([asker])
    assert home.why("good") == "loading"
    (name,) = home.host.wanted
    home.host.on_failed(error := NotEnoughMemory("no room.", fix="Free some."))
    home.lacking = [Lack(LackKind.LOADING, "good:0-1 has to run on this machine and is loading")]
    assert home.why("good") == "missing layers 4-7; failed: no room."
    said = home.overview.status()["reasons"]
    assert said[-2:] == [f"{name} did not load: {error}", home.lacking[0].said]
    codes = {said: code for code, said in home.overview.readiness()}
    assert codes[f"{name} did not load: {error}"] == LackKind.FAILED
    assert codes["no node serves layers 4-7 of good"] == LackKind.LAYERS
    home.heard(good="0-7")
    assert home.why("good") is None
