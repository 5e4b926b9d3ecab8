"""A member back from a backup: what it waits for, what is asked about it, how that is settled."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from mesh.cli import members
from mesh.clock import SystemClock
from mesh.discovery.sightings import PeerView
from mesh.errors import BadRequest, LogForked, LogRefused, UntrustedPeer
from mesh.events.intake import Report
from mesh.events.messages import LogMessage, Pull, from_dict, to_dict
from mesh.hearth.control import Control
from mesh.hearth.founding import found
from mesh.hearth.hearth import Hearth, Waits
from mesh.hearth.network import Network
from mesh.hearth.presence import Away, Presence
from mesh.hearth.record import HearthRecord
from mesh.identity.certificates import make_certificate
from mesh.identity.decisions import Added, Decision, LevelChanged, Readmitted
from mesh.identity.keys import NodeKey
from mesh.identity.recovery import new_code
from mesh.identity.roster import TrustLevel
from tests.discovery.network import new_key
from tests.waiting import until

CLOCK = SystemClock()


class InHearth:
    """What `Control` asks of the network."""

    name = "attic"

    def __init__(self, hearth: Hearth) -> None:
        self._hearth = hearth

    def require_hearth(self) -> Hearth:
        return self._hearth

    def peers(self) -> list[PeerView]:
        return []

    def away(self) -> list[Away]:
        return Presence(SystemClock()).away(self._hearth.roster, {self._hearth.key.node_id})


def control(hearth: Hearth) -> Control:
    return Control(cast("Network", InHearth(hearth)))


def added(key: NodeKey, name: str, level: TrustLevel = TrustLevel.TRUSTED) -> Added:
    return Added(make_certificate(key), name, level)


def unheard(report: Report) -> None:
    """Reports are shown, and looked at elsewhere."""


@asynccontextmanager
async def opened(
    key: NodeKey, record: HearthRecord, logs: Path, waits: Waits | None
) -> AsyncIterator[Hearth]:
    hearth = await Hearth.open(key, record, logs, CLOCK, unheard, waits=waits)
    try:
        yield hearth
    finally:
        await hearth.close()


def link(*hearths: Hearth) -> None:
    """Let these gossip as linked nodes do."""
    by_id = {hearth.key.node_id: hearth for hearth in hearths}
    loop = asyncio.get_running_loop()
    for own in hearths:

        def send(peer: Any, message: LogMessage, own: Hearth = own) -> None:
            wire = to_dict(from_dict(to_dict(message)))
            loop.call_soon(by_id[peer].receive, own.key.node_id, wire)

        own.start_gossip(send)
    for own in hearths:
        for other in hearths:
            if other is not own:
                own.peer_up(other.key.node_id)


class Household:
    """Attic founded it; barn is an anchor as well, and more if told so."""

    def __init__(self, tmp_path: Path) -> None:
        self.keys = {name: new_key() for name in ("attic", "barn", "cellar", "shed")}
        self.root = tmp_path
        self.record: HearthRecord
        self.code = ""

    def logs(self, name: str) -> Path:
        path = self.root / name
        path.mkdir(exist_ok=True)
        return path

    def open(self, name: str, logs: str = "", waits: Waits | None = None) -> Any:
        return opened(self.keys[name], self.record, self.logs(logs or name), waits)

    def key(self, name: str) -> Any:
        return self.keys[name].node_id


@pytest.fixture
async def household(tmp_path: Path) -> Household:
    home = Household(tmp_path)
    founding = await found(home.keys["attic"], "attic", home.logs("attic"), CLOCK, unheard)
    home.record, home.code = founding.record, founding.code
    async with home.open("attic") as attic, home.open("barn") as barn:
        await attic.decide(added(home.keys["barn"], "barn"))
        await attic.decide(LevelChanged(home.key("barn"), TrustLevel.ANCHOR))
        link(attic, barn)
        await until(lambda: home.key("barn") in barn.roster.anchors)
    return home


def back_up(home: Household, name: str) -> None:
    shutil.copytree(home.logs(name), home.root / f"{name}-backup")


async def test_a_node_signs_nothing_before_it_has_heard_from_a_member(
    household: Household,
) -> None:
    async with household.open("attic") as attic, household.open("barn") as barn:
        deciding = asyncio.create_task(attic.decide(added(household.keys["shed"], "shed")))
        publishing = asyncio.create_task(attic.publish("model.published", {"model_id": "m"}))
        await asyncio.sleep(0.2)
        assert not deciding.done()
        assert not publishing.done()
        link(attic, barn)
        await asyncio.wait_for(deciding, 10)
        await asyncio.wait_for(publishing, 10)
    # With nobody there, it waits for so long and goes on.
    async with household.open("attic", waits=Waits(alone_s=0.3)) as attic:
        waiting = asyncio.create_task(attic.heard())
        await asyncio.wait_for(attic.decide(added(household.keys["cellar"], "cellar")), 20)
        assert waiting.done()


async def test_a_restored_founder_that_hears_from_a_member_goes_on(household: Household) -> None:
    back_up(household, "attic")
    async with household.open("attic") as attic, household.open("barn") as barn:
        link(attic, barn)
        await attic.decide(added(household.keys["shed"], "shed"))
        await attic.publish("model.published", {"model_id": "m"})
        await until(lambda: "m" in barn.log.state.models() and len(barn.roster.members) == 3)
    async with (
        household.open("attic", "attic-backup") as attic,
        household.open("barn") as barn,
    ):
        link(attic, barn)
        await attic.decide(added(household.keys["cellar"], "cellar"))
        await attic.publish("model.published", {"model_id": "n"})
        await until(lambda: "n" in barn.log.state.models() and len(barn.roster.members) == 4)
        for hearth in (attic, barn):
            assert set(hearth.roster.anchors) == {household.key("attic"), household.key("barn")}
            assert set(hearth.log.state.models()) == {"m", "n"}


async def test_the_facts_of_both_histories_count_again(household: Household) -> None:
    """Of one only others know, each of them perhaps another part."""
    in_vain = Waits(alone_s=0.0)
    async with household.open("attic", waits=in_vain) as attic:
        await attic.decide(added(household.keys["shed"], "shed"))
    back_up(household, "attic")
    async with household.open("attic") as attic, household.open("barn") as barn:
        link(attic, barn)
        for model in ("before", "both"):
            await attic.publish("model.published", {"model_id": model})
        await attic.publish("token.revoked", {"token_id": "t"})
        await until(lambda: "t" in barn.revoked_tokens())
    async with household.open("attic", "attic-backup", in_vain) as attic:
        for model in ("since", "both"):
            await attic.publish("model.published", {"model_id": model})
        async with household.open("barn") as barn, household.open("shed") as shed:
            link(attic, shed, barn)
            await until(lambda: household.key("attic") in attic.log.state.frozen)
            await attic.publish("model.published", {"model_id": "now"})
            for hearth in (attic, barn, shed):
                await until(lambda hearth=hearth: len(hearth.log.state.models()) == 4)
                assert not hearth.log.state.frozen
                await until(lambda hearth=hearth: hearth.revoked_tokens() == {"t"})


async def fork(home: Household, stack: AsyncExitStack) -> tuple[Hearth, Hearth]:
    """Attic decides, is restored from before that, and decides again while all are off."""
    back_up(home, "attic")
    async with home.open("attic") as attic, home.open("barn") as barn:
        link(attic, barn)
        await attic.decide(added(home.keys["shed"], "shed"))
        await until(lambda: len(barn.roster.members) == 3)
    in_vain = Waits(alone_s=0.0)  # it waited for somebody
    attic = await stack.enter_async_context(home.open("attic", "attic-backup", in_vain))
    await attic.decide(added(home.keys["cellar"], "cellar"))
    barn = await stack.enter_async_context(home.open("barn"))
    link(attic, barn)
    await until(lambda: all(home.key("attic") in each.roster.forked for each in (attic, barn)))
    return attic, barn


async def test_an_accidental_fork_freezes_and_asks_and_loses_nobody(
    household: Household, capsys: pytest.CaptureFixture[str]
) -> None:
    async with AsyncExitStack() as stack:
        attic, barn = await fork(household, stack)
        assert barn.roster.anchors == (household.key("barn"),)
        assert {m.name for m in barn.roster.members.values()} == {"attic", "barn", "shed"}
        # It may still link, so that it learns of this, and no more.
        assert barn.roster.members[household.key("attic")].level is TrustLevel.MEMBER
        assert not barn.may_serve(household.key("attic"))
        with pytest.raises(LogForked, match="two different histories") as caught:
            await attic.decide(added(household.keys["cellar"], "cellar"))
        assert "readmit" in caught.value.fix

        view = control(barn).view()
        assert [m["name"] for m in view["members"] if m["forked"]] == ["attic"]
        assert view["out"] == []
        members.show(view)
        assert "members readmit attic" in capsys.readouterr().out

        outcome = await control(barn).readmit("attic")
        assert outcome["done"]
        with pytest.raises(BadRequest, match="not signed two"):
            await control(barn).readmit("attic")
        await until(lambda: household.key("attic") in attic.roster.anchors)
        # Nobody is lost, of neither history.
        for hearth in (attic, barn):
            names = {m.name for m in hearth.roster.members.values()}
            assert names == {"attic", "barn", "shed", "cellar"}
        await attic.decide(LevelChanged(household.key("shed"), TrustLevel.MEMBER))


async def test_evidence_of_a_fork_is_kept_and_handed_on(household: Household) -> None:
    async with AsyncExitStack() as stack:
        await fork(household, stack)
    async with household.open("barn") as barn, household.open("cellar") as newcomer:
        assert barn.roster.forked == {household.key("attic")}
        page = await barn.log.page(Pull(1, want=barn.log.docket.tips))
        await newcomer.log.ingest(page, household.key("barn"))
        await until(lambda: newcomer.roster.forked == {household.key("attic")})


async def test_the_recovery_code_takes_over_where_nobody_decides(household: Household) -> None:
    async with household.open("attic") as attic, household.open("barn") as barn:
        link(attic, barn)
        await attic.decide(added(household.keys["shed"], "shed"))
        await until(lambda: household.key("shed") in barn.roster.members)
    async with household.open("barn") as barn, household.open("shed") as shed:
        link(barn, shed)
        await until(lambda: household.key("shed") in shed.roster.members)
        with pytest.raises(UntrustedPeer):
            await shed.decide(added(household.keys["cellar"], "cellar"))
        with pytest.raises(LogRefused, match="unlawful"):
            await control(shed).recover(new_code())
        outcome = await control(shed).recover(household.code)
        assert sorted(outcome["demoted"]) == ["attic", "barn"]
        assert shed.roster.anchors == (household.key("shed"),)
        await until(lambda: barn.roster.anchors == (household.key("shed"),))
        await shed.decide(added(household.keys["cellar"], "cellar"))
        await until(lambda: household.key("cellar") in barn.roster.members)
        with pytest.raises(UntrustedPeer):
            await barn.decide(Readmitted(household.key("attic")))


async def test_anchors_say_what_they_have_seen_once(household: Household) -> None:
    soon = Waits(acknowledge_s=0.05)

    def said(hearth: Hearth) -> list[tuple[str, str]]:
        graph = hearth.log.docket.graph
        decided = [graph[at] for at in range(len(graph))]
        return [(d.author, d.type) for d in decided if d.type == "hearth.acknowledged"]

    async with (
        household.open("attic", waits=soon) as attic,
        household.open("barn", waits=soon) as barn,
    ):
        link(attic, barn)
        once = [(household.key("barn"), "hearth.acknowledged")]
        await until(lambda: said(attic) == said(barn) == once)  # what was decided before
        await attic.decide(added(household.keys["shed"], "shed"))
        await until(lambda: said(attic) == said(barn) == once * 2)
        await asyncio.sleep(0.3)  # an acknowledgement is not acknowledged
        assert said(attic) == said(barn) == once * 2


async def flood(hearth: Hearth, key: NodeKey, decisions: list[Decision]) -> Any:
    """Decisions by somebody who never was an anchor, each after all that it knows."""
    from mesh.events.decision import DecisionDraft, seal
    from mesh.events.intake import Received
    from mesh.identity.decisions import encode

    graph = hearth.log.docket.graph
    parents = hearth.log.docket.tips
    bodies = []
    for number, decision in enumerate(decisions):
        kind, payload = encode(decision)
        draft = DecisionDraft(
            hearth.id, key.node_id, graph.depth_after(parents), number, kind, payload, parents
        )
        sealed = seal(draft, key.sign)
        bodies.append((sealed.body, sealed.signature))
    return await hearth.log.ingest(Received(decisions=tuple(bodies)), key.node_id)


async def test_decisions_of_who_never_was_an_anchor_are_refused_at_the_door(
    household: Household,
) -> None:
    shed = household.keys["shed"]
    async with household.open("attic", waits=Waits(alone_s=0.0)) as attic:
        await attic.decide(added(shed, "shed", TrustLevel.MEMBER))
        before, length = attic.roster, len(attic.log.docket.graph)
        junk: list[Decision] = [
            LevelChanged(household.key("attic"), TrustLevel.MEMBER) for _ in range(300)
        ]
        outcome = await flood(attic, shed, junk)
        assert {verdict.value for verdict in outcome.verdicts} == {"unlawful"}
        # Nobody listens to it for a while, and nothing of it is stored.
        assert attic.log.muted(household.key("shed"))
        assert len(attic.log.docket.graph) == length
        assert attic.roster == before
