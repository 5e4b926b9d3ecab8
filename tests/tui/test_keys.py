"""Every key, the palette, the mouse, losing and finding the daemon."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import cast

import pytest
from rich.cells import cell_len
from rich.color import Color
from rich.segment import Segment
from textual._compositor import LayoutUpdate
from textual.binding import Binding
from textual.events import Paste
from textual.widgets import Button, DataTable, Input, Markdown

from mesh.client import Client
from mesh.errors import NotRunning
from tests.tui.conftest import Daemon, running
from tests.tui.house import ATTIC, GAP, SOFA, STUDY, shard, whole
from tui.app import TopApp
from tui.commands import HERE
from tui.screens.chat import ChatScreen
from tui.screens.jobs import JobsScreen
from tui.screens.log import LogScreen
from tui.screens.models import ModelsScreen
from tui.screens.nodes import NodesScreen
from tui.screens.screen import TopScreen
from tui.widgets.people import People

MODES = ["overview", "nodes", "models", "chat", "jobs", "log", "doctor"]


def bound(owner: type[TopApp] | type[TopScreen]) -> set[str]:
    """The keys that an app or a screen binds itself."""
    bindings = [binding for binding in owner.BINDINGS if isinstance(binding, Binding)]
    return {key for binding in bindings for key in binding.key.split(",")}


def test_every_key_is_pressed_below() -> None:
    """A new key that nobody tries is found here."""
    assert bound(TopApp) == {
        *"1234567dq",
        *(f"f{n}" for n in range(1, 8)),
        "question_mark",
        "ctrl+q",
    }
    assert bound(NodesScreen) == {"i", "x"}
    assert bound(ModelsScreen) == {"n", "s", "e", "x"}
    assert bound(ChatScreen) == {"escape", "ctrl+t", "ctrl+n"}
    assert bound(JobsScreen) == {"k"}
    assert bound(LogScreen) == {"slash", "s", "escape"}


async def test_numbers_change_screens(daemon: Daemon) -> None:
    """As function keys do: see `tests.tui.test_screens`."""
    async with running(daemon.connect) as top:
        await top.until("working")
        for number, mode in enumerate(MODES, 1):
            await top.press(str(number))
            await top.until("working")
            assert top.app.current_mode == mode
            if mode == "chat":  # there, numbers are text; escape leaves the field
                await top.press("5", "escape")
                assert top.app.screen.query_one(Input).value == "5"


async def test_light_dark_keys_and_quit(daemon: Daemon) -> None:
    async with running(daemon.connect) as top:
        await top.until("working")
        assert top.app.current_theme.dark
        await top.press("d")
        assert not top.app.current_theme.dark
        await top.press("question_mark")
        await top.until(lambda: top.app.screen.query("HelpPanel"))
        await top.press("question_mark")
        await top.until(lambda: not top.app.screen.query("HelpPanel"))
        await top.press("q")
        await top.until(lambda: not top.app.is_running)
    async with running(daemon.connect) as top:
        await top.press("ctrl+q")
        await top.until(lambda: not top.app.is_running)


async def test_an_invitation_is_shown(daemon: Daemon) -> None:
    async with running(daemon.connect, (120, 40)) as top:
        await top.until("working")
        await top.press("2", "i")
        await top.until("hearthnet join 7-maple-river")


async def test_putting_a_node_out_asks_first(daemon: Daemon) -> None:
    async with running(daemon.connect) as top:
        await top.until("working")
        await top.press("2", "x")
        await top.until("cannot put itself out")
        await top.press("down")
        await top.until("attic · up")
        for no in ("n", "escape", "enter"):  # what has the focus is no
            await top.press("x")
            await top.until("Put attic")
            await top.press(no)
            await top.until("attic · up")
        assert daemon.hearth.out == []
        await top.press("x")
        await top.until("Put attic")
        await top.press("y")
        await top.until("It is out.")
        assert daemon.hearth.out == [ATTIC]
        attic, *others = whole()["peers"]
        daemon.house.change(peers=[*others, {**attic, "state": "other hearth"}])
        await top.until("attic · other hearth")
        await top.press("x")
        await top.until("attic is in another hearth.")


async def test_a_job_is_killed_by_mouse_and_only_after_a_yes(daemon: Daemon) -> None:
    async with running(daemon.connect) as top:
        await top.until("working")
        await top.press("5")
        await top.until("loss 0.25")
        await top.press("down", "k")
        await top.until("End the job 2e2e")
        await top.pilot.click("#no")
        await top.until(lambda: isinstance(top.app.screen, JobsScreen))
        assert daemon.jobs.killed == []
        await top.press("k")
        await top.until("End the job 2e2e")
        await top.pilot.click("#yes")
        await top.until("2e2e2e2e2e2e has ended: ERROR")
        assert daemon.jobs.killed == ["2e" * 16]


async def test_a_model_is_deployed_after_its_estimate_was_seen(daemon: Daemon) -> None:
    async with running(daemon.connect) as top:
        await top.until("working")
        await top.press("3", "n")
        await top.until("Deploy a model")
        await top.press("enter")
        await top.until("Name a model.")
        await top.press(*"mist")
        await top.pilot.click("#yes")  # nothing was estimated
        await top.press("enter")
        text = await top.until("about 18.5 tok/s")
        assert "attic 8-15: needs 3.8 GiB of 5.6 GiB free, fetches 3.9 GB" in text
        assert "would help: a cable to attic" in text
        await top.press(
            "shift+tab", "shift+tab", "shift+tab", "backspace", "3"
        )  # another wish: that estimate is not its
        assert top.app.screen.query_one("#yes", Button).disabled
        await top.press("enter")
        await top.until(lambda: top.app.screen.query_one("#yes").has_focus)
        assert daemon.deployments.wished == []
        await top.press("enter")
        await top.until("mist is wished for")
        assert daemon.deployments.wished == [("deploy", "mist", 3)]


@pytest.mark.parametrize(
    ("model", "said"),
    [("huge", "it does not fit: 96.0 GiB are missing."), ("secret", "no estimate: Nobody has")],
)
async def test_what_does_not_fit_is_not_deployed_by_a_second_enter(
    daemon: Daemon, model: str, said: str
) -> None:
    async with running(daemon.connect) as top:
        await top.until("working")
        await top.press("3", "n")
        await top.until("Deploy a model")
        await top.press(*model, "enter")
        await top.until(said)
        await top.press("enter")
        await top.until(lambda: isinstance(top.app.screen, ModelsScreen))
        assert daemon.deployments.wished == []
        await top.press("n")
        await top.until("Deploy a model")
        await top.press(*model, "enter")
        await top.until(said)
        await top.pilot.click("#yes")  # who asks for it all the same gets the daemon's word
        await top.until(f"{model} is wished for")


async def test_an_estimate_that_comes_late_is_not_taken_for_another_wishs(daemon: Daemon) -> None:
    async with running(daemon.connect) as top:
        await top.until("working")
        await top.press("3", "n")
        await top.until("Deploy a model")
        await top.press(*"slow", "enter")
        await asyncio.wait_for(daemon.plans.asked.wait(), 10)
        await top.press("e", "r")
        await top.until("slower")
        screen = top.app.screen
        daemon.plans.proceed.set()
        asking = [worker for worker in screen.workers if worker.group == "estimate"]
        await top.until(lambda: all(worker.is_finished for worker in asking))
        assert screen.query_one("#yes", Button).disabled
        assert "about 18.5 tok/s" not in top.text()
        await top.press("enter")
        await top.until("about 18.5 tok/s")
        assert not screen.query_one("#yes", Button).disabled


async def test_replicas_are_scaled_up_and_to_none(daemon: Daemon) -> None:
    async with running(daemon.connect) as top:
        await top.until("working")
        await top.press("3", "s")
        await top.until("Scale llama")
        await top.press("backspace", *"17", "enter")
        await top.until("Replicas: a number from 0 to 16.")
        await top.press("backspace", "backspace", "3", "enter")
        await top.until("replica 3: about")
        await top.press("escape", "s")
        await top.until(lambda: "replica 3: about" not in top.text())
        await top.press("backspace", "0", "enter")
        await top.until("No replica stays loaded")
        await top.press("enter")
        await top.until("0 replica(s) are wished for")
        assert daemon.deployments.wished == [("scale", "0" * 15 + "1", 0)]


async def test_who_scales_is_told_of_layers_that_nobody_serves_for_a_moment(daemon: Daemon) -> None:
    daemon.deployments.gaps = [GAP]
    async with running(daemon.connect) as top:
        await top.until("working")
        await top.press("3", "s")
        await top.until("Scale llama")
        await top.press("backspace", "3", "enter")
        await top.until(lambda: top.app.screen.query_one("#yes").has_focus)
        await top.press("enter")
        words = await top.until("away for a moment")
        assert "drops" in words
        assert "8-11." in words


async def test_an_estimate_is_of_the_settings_that_are_deployed(daemon: Daemon) -> None:
    wish = {"quant": "int8", "context": 8192, "dedicated": True, "nodes": [SOFA, ATTIC],
            "layers": [f"{SOFA}=0-7"]}  # fmt: skip
    llama, qwen = whole()["deployments"]
    daemon.house.change(deployments=[{**llama, **wish}, qwen])
    async with running(daemon.connect) as top:
        await top.until("working")
        await top.press("3", "s")
        await top.until("Scale llama")
        await top.press("backspace", "3", "enter")
        await top.until("replica 3: about")
        await top.press("escape", "n")
        await top.until("Deploy a model")
        await top.press(*"llama", "enter")
        await top.until("replica 1: about")
        await top.press("escape", "down", "s")
        await top.until("Scale qwen")
        await top.press("enter")
        await top.until("replica 2: about")
    assert daemon.plans.orders == [
        {"model": "llama", "replicas": 3, **wish},
        {"model": "llama", **wish},
        {"model": "qwen", "replicas": 2},
    ]


async def test_levels_and_what_others_fetch_are_shown(daemon: Daemon) -> None:
    llama, qwen = whole()["deployments"]
    cold = {**llama, "deployment": "0" * 15 + "3", "model_id": "phi", "state": "RESTING",
            "level": "COLD"}  # fmt: skip
    daemon.house.change(deployments=[llama, qwen, cold])
    async with running(daemon.connect, (120, 40)) as top:
        await top.until("working")
        there = "phi · 30 % (0.6 of 2.0 GB) · 10.0 MB/s · 2 min left · to attic"
        assert f"fetching {there}" in await top.until("to attic")
        await top.press("3")
        text = await top.until(there)
        assert [" ".join(line.split()) for line in text.splitlines()[2:5]] == [
            "llama 1 of 1 ● ready HOT, on a device",
            "qwen 0 of 2 ◌ fetching WARM, in memory",
            "phi 1 of 1 ○ resting COLD, on disk",
        ]
        daemon.house.change(weights={**whole()["weights"], "elsewhere": []})
        await top.until(lambda: "to attic" not in top.text())
        await top.press("1")
        assert "to attic" not in await top.until("working")


async def test_evicting_says_what_ends_and_asks_first(daemon: Daemon) -> None:
    async with running(daemon.connect, (120, 40)) as top:
        await top.until("working")
        await top.press("3", "e")
        text = await top.until("Evict llama?")
        assert "1 answer" in text
        await top.press("enter")  # what has the focus is no
        await top.until(lambda: isinstance(top.app.screen, ModelsScreen))
        await top.press("down", "e")
        await top.until("Evict qwen?")
        await top.press("y")
        await top.until("qwen is evicted.")
        assert daemon.deployments.wished == [("evict", "0" * 15 + "2")]


async def test_stopping_a_pull_asks_first(daemon: Daemon) -> None:
    async with running(daemon.connect, (120, 40)) as top:
        await top.until("working")
        await top.press("3", "x")
        await top.until("Stop fetching org/qwen? What has come is kept.")
        await top.press("n")
        await top.until(lambda: isinstance(top.app.screen, ModelsScreen))
        assert daemon.pulls.running
        await top.press("x")
        await top.until("Stop fetching org/qwen?")
        await top.press("y")
        await top.until("org/qwen is not fetched any more.")
        assert not daemon.pulls.running
        await top.press("x")
        await top.until("Nothing is pulled here")


async def test_with_nothing_deployed_there_is_nothing_to_scale(daemon: Daemon) -> None:
    daemon.house.change(deployments=[], weights={"models": [], "transfers": [], "sent_bytes": 0})
    async with running(daemon.connect) as top:
        await top.until("working")
        await top.press("3")
        text = await top.until("are free")
        assert "deployed" not in text
        assert "disk" not in text
        await top.press("s")
        await top.until("Nothing is deployed; n deploys.")
        daemon.house.change(deployments=whole()["deployments"])
        await top.until("1 of 1")
        await top.press("down")
        await top.until("kitchen 0-11 · ready")


async def test_the_cursor_stays_on_its_row(daemon: Daemon) -> None:
    async with running(daemon.connect) as top:
        await top.until("working")
        await top.press("2", "down", "down", "down")
        table = top.app.screen.query_one(DataTable)
        await top.until(lambda: table.cursor_row == 3)
        peers = [peer for peer in whole()["peers"] if peer["name"] != "attic"]
        daemon.house.change(peers=peers)
        await top.until(lambda: table.row_count == 3)
        assert table.cursor_row == 2
        assert "study · unreachable" in await top.until("study ·")
        assert STUDY[:6] in top.text()


async def test_the_log_is_filtered_as_one_types_and_shows_what_was_signed(daemon: Daemon) -> None:
    for number in range(6):
        daemon.house.stream.emit("peer_up" if number % 2 else "warning", name=f"n{number}")
    async with running(daemon.connect) as top:
        await top.until("working")
        await top.press("6")
        await top.until("name=n5")
        await top.press("slash", *"PEER")
        text = await top.until(lambda: "warning" not in top.text()) and top.text()
        assert all(f"name=n{number}" in text for number in (1, 3, 5))
        daemon.house.stream.emit("warning", name="n6")
        daemon.house.stream.emit("peer_up", name="n7")
        assert "name=n6" not in await top.until("name=n7")
        await top.press("escape", "s")
        await top.until("signed by the hearth's nodes")
        await top.press("slash", *("backspace" for _ in "PEER"))
        await top.until("sofa member.added name=attic")
        await top.press("enter", "s")
        await top.until("name=n6")
        daemon.house.stream.emit(
            "deployment_span", reason=None, shard_id="llama:0-3", phase="READY"
        )
        await top.until("deployment_span shard_id=llama:0-3 phase=READY")


async def test_an_answer_streams_with_its_route_beside_it(daemon: Daemon) -> None:
    models = [{**whole()["models"][0], "id": name} for name in ("failover", "stuck", "busy")]
    daemon.house.change(models=models)
    async with running(daemon.connect, (120, 40)) as top:
        await top.until("working")
        await top.press("4")
        await top.until("Ask failover")
        await top.press(*"hello", "enter")
        text = await top.until("kitchen 6-11 1.0 ms")
        assert "one two" in text
        assert "▸ hello" in text
        assert "⚠ layers 6-11 are asked" in text
        assert "first token 12 ms" in text
        await top.press("ctrl+t")
        await top.until("Ask stuck")
        await top.press(*"go", "enter")
        await asyncio.wait_for(daemon.generations.started.wait(), 10)
        chat = cast("ChatScreen", top.app.screen)
        await top.until(lambda: chat.turns[-1]["content"] == "go" and "▸ go" in top.text())
        await top.press("escape")  # stops the answer, everywhere
        await asyncio.wait_for(daemon.generations.ended["stuck"].wait(), 10)
        await top.press("ctrl+t")
        await top.until("Ask busy")
        await top.press(*"x", "enter")
        await top.until("✖ 4 generations run already.")
        assert {"role": "user", "content": "x"} not in chat.turns
        await top.press("ctrl+n")
        await top.until(lambda: "▸ hello" not in top.text())
        assert chat.turns == []


async def test_nothing_of_an_answer_is_lost_for_being_markdown(daemon: Daemon) -> None:
    daemon.house.change(models=[{**whole()["models"][0], "id": "poem"}])
    async with running(daemon.connect, (120, 40)) as top:
        await top.until("working")
        await top.press("4")
        await top.until("Ask poem")
        await top.press(*"say", "enter")
        text = await top.until("(https://example.org/sky).")
    first, second = (line.split("│")[0].strip() for line in text.splitlines() if " are " in line)
    assert first == "Roses are <b>red</b>,"
    assert second == "violets are blue (https://example.org/sky)."


async def test_what_is_drawn_of_a_long_answer_while_it_comes_stays_short(daemon: Daemon) -> None:
    daemon.house.change(models=[{**whole()["models"][0], "id": "steps"}])
    async with running(daemon.connect, (120, 40)) as top:
        await top.until("working")
        await top.press("4")
        await top.until("Ask steps")
        await top.press(*"how", "enter")
        text = await top.until("60. step 60")
        pieces = [
            piece.source for piece in top.app.screen.query("Streamed > Markdown").results(Markdown)
        ]
    assert [line.split("│")[0].strip() for line in text.splitlines() if ". step" in line][-20:] == [
        f"{number}. step {number}" for number in range(41, 61)
    ], "nothing stands between its pieces"
    assert "".join(pieces) == "".join(f"{n}. step **{n}**\n" for n in range(1, 61))
    assert pieces[-1].count("step") <= 12


async def test_an_answer_that_is_cut_off_says_so_and_what_got_none_can_be_asked_again(
    daemon: Daemon,
) -> None:
    models = [{**whole()["models"][0], "id": name} for name in ("narrow", "busy")]
    daemon.house.change(models=models)
    async with running(daemon.connect, (120, 40)) as top:
        await top.until("working")
        await top.press("4")
        await top.until("Ask narrow")
        await top.press(*"more", "enter")
        await top.until("⚠ cut off: attic has no room")
        await top.press("ctrl+t")
        await top.until("Ask busy")
        await top.press(*"why", "enter")
        await top.until("✖ 4 generations run already.")
        field = top.app.screen.query_one(Input)
        await top.until(lambda: field.value == "why")
        asked = len(daemon.generations.requests)
        await daemon.stop()
        await top.until("not connected")
        await top.press("enter")
        await top.until("no daemon can be asked now")
        assert field.value == "why"
        await top.press(*("backspace" for _ in "why"))
        await top.until(lambda: field.placeholder == "no daemon can be asked now")
    assert len(daemon.generations.requests) == asked


async def test_who_was_chosen_stays_chosen_while_it_cannot_be_asked(daemon: Daemon) -> None:
    echo, other = ({**whole()["models"][0], "id": name} for name in ("echo", "other"))
    daemon.house.change(models=[other, echo])
    async with running(daemon.connect) as top:
        await top.until("working")
        await top.press("4")
        await top.until("Ask other")
        await top.press("ctrl+t")
        await top.until("Ask echo")
        daemon.house.change(models=[other, {**echo, "runnable": False, "reason": "loading"}])
        await top.until("echo cannot be asked now: loading")
        await top.press(*"hi", "enter")
        await top.until(lambda: top.text().count("echo cannot be asked now: loading") == 1)
        daemon.house.change(models=[other, echo])
        await top.until(lambda: "working · other, echo" in top.text())
        await top.press("enter")
        await top.until("▸ hi")
        daemon.house.change(models=[other])
        await top.until("Ask other")
    assert [each.model for each in daemon.generations.requests] == ["echo"]


async def test_a_model_at_rest_is_asked_last_and_woken_by_that(daemon: Daemon) -> None:
    echo = {**whole()["models"][0], "id": "echo"}
    cold = {**whole()["deployments"][0], "model_id": "phi", "state": "RESTING", "resting": True}
    daemon.house.change(models=[echo], deployments=[cold])
    async with running(daemon.connect) as top:
        await top.until("working")
        await top.press("4")
        await top.until("Ask echo …")
        await top.press("ctrl+t")
        await top.until("Ask phi, which loads first …")
        await top.press(*"hi", "enter")
        await top.until("▸ hi")
    assert [each.model for each in daemon.generations.requests] == ["phi"]


async def test_what_a_model_thinks_is_shown_above_its_answer_and_not_said_again(
    daemon: Daemon,
) -> None:
    daemon.house.change(models=[{**whole()["models"][0], "id": "thinks"}])
    async with running(daemon.connect) as top:
        await top.until("working")
        await top.press("4")
        await top.until("Ask thinks")
        await top.press(*"why", "enter")
        text = await top.until("so it is")
        assert text.index("first this,") < text.index("then that.") < text.index("so it is")
        chat = cast("ChatScreen", top.app.screen)
        await top.until(lambda: len(chat.turns) == 2)
        assert chat.turns[-1] == {"role": "assistant", "content": "so it is"}


async def test_a_new_conversation_keeps_nothing_of_the_answer_that_ran(daemon: Daemon) -> None:
    stuck = {**whole()["models"][0], "id": "stuck"}
    daemon.house.change(models=[stuck])
    async with running(daemon.connect) as top:
        await top.until("working")
        await top.press("4")
        await top.until("Ask stuck")
        await top.press(*"old", "enter")
        await top.until("one")
        await top.press("ctrl+n")
        await asyncio.wait_for(daemon.generations.ended["stuck"].wait(), 10)
        daemon.generations.proceed.set()
        await top.press(*"new", "enter")
        await top.until("one two")
    last = daemon.generations.requests[-1]
    assert last.messages == ({"role": "user", "content": "new"},)


async def test_all_lines_of_a_pasted_text_are_asked(daemon: Daemon) -> None:
    daemon.house.change(models=[{**whole()["models"][0], "id": "echo"}])
    async with running(daemon.connect) as top:
        await top.until("working")
        await top.press("4")
        await top.until("Ask echo")
        await top.press("a", "b", "left")
        top.app.screen.query_one(Input).post_message(Paste("one\r\ntwo\n\nthree\n"))
        await top.until("aone two  threeb")
        await top.press("enter")
        await top.until("▸ aone two")
    assert daemon.generations.requests[-1].messages == (
        {"role": "user", "content": "aone two  threeb"},
    )


async def test_who_is_away_stands_below_the_nodes(daemon: Daemon) -> None:
    picture = whole()
    missing = [{"id": "p" * 52, "name": "phone", "last_seen": None}]
    daemon.house.change(node={**picture["node"], "away": missing}, peers=[])
    async with running(daemon.connect) as top:
        shown = await top.until("away: phone")
        assert "hearthnet invite" not in shown


async def test_names_with_brackets_are_shown_as_they_are(daemon: Daemon) -> None:
    odd = "[/b]l[red]"
    peers = [{**peer, "shards": [shard(odd, "0-3")]} for peer in whole()["peers"]]
    daemon.house.change(peers=peers)
    async with running(daemon.connect, (120, 40)) as top:
        await top.until("working")
        await top.press("2")
        await top.until(f"B  attic    ● up           0.7 ms  {odd} 0-3")


async def test_long_names_leave_room_for_what_is_said_of_them(daemon: Daemon) -> None:
    attic, *others = whole()["peers"]
    peers = [{**attic, "name": "屋根裏部屋"}, *({**each, "name": "x" * 64} for each in others)]
    rows = [{**row, "model_id": "org/" + "y" * 64} for row in whole()["deployments"]]
    daemon.house.change(peers=peers, deployments=rows)
    async with running(daemon.connect) as top:
        lines = (await top.until("working")).splitlines()
        ends = [cell_len(line.partition(" ms  llama")[0]) for line in lines if " ms  llama" in line]
        assert len(ends) == 2
        assert len(set(ends)) == 1
        await top.press("2")
        await top.until(f"…  ✖ unreachable  -                               {STUDY[:6]}")
        await top.press("3")
        await top.until("…  0 of 2    ◌ fetching  WARM, in memory")
        await top.pilot.resize_terminal(120, 30)
        await top.until("y" * 64 + "  0 of 2")


async def test_the_palette_has_every_verb(daemon: Daemon) -> None:
    async with running(daemon.connect, (120, 40)) as top:
        await top.until("working")
        await top.press("ctrl+p", *"peers")
        await top.until("List the nodes.")
        await top.press("down", "enter")
        await top.until(lambda: top.app.current_mode == "nodes")
        await top.press("ctrl+p", *"up (in")
        await top.until("Start this machine's node.")
        await top.press("down", "enter")
        await top.until("In a terminal: hearthnet up")
        await top.press("ctrl+p", *"invite")
        await top.until("Let one in.")
        await top.press("down", "enter")
        await top.until("7-maple-river")
        await top.press("ctrl+p", *"deploy")
        await top.until("Load a model.")
        await top.press("down", "enter")
        await top.until("Deploy a model")


def test_the_palettes_verbs_are_those_of_the_command_line() -> None:
    script = (
        "import typer.main; from mesh.cli.main import app;"
        "print(*typer.main.get_command(app).commands)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                         timeout=60, check=True)  # fmt: skip
    verbs = set(run.stdout.split())
    assert set(HERE) <= verbs
    assert {"top", "up", "log"} <= verbs


async def test_a_lost_daemon_is_a_banner_over_the_last_picture(daemon: Daemon) -> None:
    async with running(daemon.connect) as top:
        await top.until("working")
        await daemon.stop()
        text = await top.until("✖ not connected · trying again in")
        assert "kitchen 16-23" in text
        assert top.app.screen.has_class("stale")
        people = top.app.screen.query_one(People)
        await top.until(lambda: people.styles.opacity == 0.5)
        await top.press("2", "i")
        await top.until("No daemon answers.")
        await daemon.start()  # on another port
        daemon.house.stream.emit("peer_up", name="again")
        await top.until(lambda: "not connected" not in top.text())
        await top.press("6")
        await top.until("name=again")


async def test_without_any_daemon_it_waits_for_one(daemon: Daemon) -> None:
    found: list[Client] = []

    def connect() -> Client:
        if not found:
            raise NotRunning("No hearthnet daemon runs here.", fix="Start one.")
        return found.pop()

    async with running(connect) as top:
        await top.until("No hearthnet daemon runs here.")
        await top.until("looking for the daemon")
        found.append(daemon.connect())
        await top.until("working")


async def test_another_size_is_drawn_anew(daemon: Daemon) -> None:
    async with running(daemon.connect, (120, 40)) as top:
        await top.until("A" * 32)
        await top.pilot.resize_terminal(60, 20)
        text = await top.until(lambda: "A" * 32 not in top.text()) and top.text()
        assert "A" * 16 in text
        assert max(map(len, text.splitlines())) <= 60


async def test_on_a_small_screen_what_stands_beside_gives_way(daemon: Daemon) -> None:
    async with running(daemon.connect, (40, 12)) as top:
        await top.until("working")
        await top.pilot.press("2")
        await top.until("attic")
        await top.pilot.press("4")
        await top.until("Ask llama")
        assert "ask something" not in top.text()
        await top.pilot.resize_terminal(80, 24)
        await top.until("ask something")


async def test_keys_are_all_there_on_a_narrow_screen(daemon: Daemon) -> None:
    """Also after another size; where numbers are typed, the keys that change screens are others."""
    async with running(daemon.connect, (80, 24)) as top:
        await top.until("working")
        for key in ("f2", "f3", "f5", "f6", "f7"):
            await top.press(key)
            await top.until(lambda: top.text().splitlines()[-1].endswith("? Keys"))
        await top.until("1 Home 2 Nodes")
        await top.pilot.resize_terminal(60, 20)
        await top.until("r Look again 1 2 3 4 5 6 7 ? Keys")
        await top.press("f4")
        await top.until("f1 f2 f3 f4 f5 f6 f7")


async def test_names_cannot_act_on_the_terminal(daemon: Daemon) -> None:
    peers = [{**whole()["peers"][0], "name": "\x1b[2Jat\u202etic\n"}]
    daemon.house.change(peers=peers)
    daemon.house.stream.emit("peer_up", name="\x1b]0;x\x07\x9b2J")
    async with running(daemon.connect) as top:
        text = await top.until("[2Jattic")
        assert not set("\x1b\x07\x9b\u202e") & set(text)


async def test_without_colours_everything_is_still_said(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(daemon.connect) as top:
        text = await top.until("working")
        assert not all(map(is_grey, colours(top.app)))
    monkeypatch.setenv("NO_COLOR", "1")
    async with running(daemon.connect) as top:
        assert await top.until("working") == text
        assert all(map(is_grey, colours(top.app)))
    for word in ("working", "unreachable", "ready", "missing layers 12-15", "▲", "A ●", "D ✖"):
        assert word in text


@pytest.mark.parametrize("no_color", [False, True])
@pytest.mark.parametrize("key", ["", "d"])
async def test_marks_stand_out_from_their_ground(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, key: str, no_color: bool
) -> None:
    """In both themes, also without colours; 3 is what WCAG 2.1 asks of what is no running text."""
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    async with running(daemon.connect) as top:
        await top.until("working")
        if key:
            await top.press(key)
        await top.until(lambda: {"✖", "◌", "▲", "A", "D"} <= set(contrasts(top.app)))
        assert min(contrasts(top.app)[mark] for mark in ("✖", "◌", "▲", "A", "D")) >= 3


def contrasts(app: TopApp) -> dict[str, float]:
    """What texts begin with, and the contrast of that to its ground, the least where several do."""
    found: dict[str, float] = {}
    for segment in segments(app):
        style, text = segment.style, segment.text.strip()
        if text and style and style.color and style.bgcolor:
            dark, bright = sorted((luminance(style.color), luminance(style.bgcolor)))
            mark = text.removeprefix("· ")[0]
            found[mark] = min((bright + 0.05) / (dark + 0.05), found.get(mark, 21))
    return found


def luminance(colour: Color) -> float:
    """As WCAG has it, all but for its straight piece near black."""
    parts = [(part / 255) ** 2.2 for part in colour.get_truecolor()]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def segments(app: TopApp) -> list[Segment]:
    """All that are on the screen."""
    update = app.screen._compositor.render_update(full=True)
    assert isinstance(update, LayoutUpdate)
    return [segment for line in update.strips for strip in line for segment in strip]


def colours(app: TopApp) -> set[tuple[int, int, int]]:
    """All that are on the screen."""
    styles = {segment.style for segment in segments(app) if segment.style}
    found = {colour for style in styles for colour in (style.color, style.bgcolor) if colour}
    return {(c.red, c.green, c.blue) for c in (colour.get_truecolor() for colour in found)}


def is_grey(colour: tuple[int, int, int]) -> bool:
    return max(colour) - min(colour) <= 2


def test_only_this_verb_imports_textual() -> None:
    script = "import sys, mesh.cli.main; print('textual' in sys.modules, 'tui' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                         timeout=60, check=True, env=dict(os.environ))  # fmt: skip
    assert run.stdout.split() == ["False", "False"]
