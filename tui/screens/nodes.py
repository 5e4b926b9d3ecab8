"""Every node with all that is known of it; inviting, and putting one out."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Static

from tui.picture import Picture, ShownNode, nodes
from tui.screens.confirm import ConfirmScreen
from tui.screens.screen import TopScreen
from tui.widgets.people import node_style
from tui.widgets.table import Table
from tui.words import COLOURS, GLYPHS, clean, ms, short


class NodesScreen(TopScreen):
    """A table, and below it the node that is chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("i", "invite", "Invite"),
        Binding("x", "put_out", "Put out"),
    ]

    def body(self) -> ComposeResult:
        yield Table("", "node", "state", "rtt", "layers", "id", shortens="node")
        with VerticalScroll(classes="detail", can_focus=False):
            yield Static(id="chosen", markup=False)

    def took(self, picture: Picture) -> None:
        self.query_one(Table).fill({node.key: _row(node) for node in nodes(picture)})
        self._show_chosen()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Another node is chosen."""
        self._show_chosen()

    def action_invite(self) -> None:
        """Let a machine in."""
        self._invite()

    def action_put_out(self) -> None:
        """Put the chosen node out of the hearth, after a question."""
        chosen = self._chosen()
        if chosen is None or chosen.letter == "A":
            self.notify("Choose another node first; this one cannot put itself out.")
            return
        if chosen.state == "other":
            self.notify(f"{chosen.name} is in another hearth.", markup=False)
            return
        question = (
            f"Put {chosen.name} ({short(chosen.key)}) out of the hearth? Its key never comes back."
        )

        def answered(yes: bool | None) -> None:
            if yes:
                self._revoke(chosen.key)

        self.app.push_screen(ConfirmScreen(question, "put it out"), answered)

    @work(exclusive=True, group="invite", exit_on_error=False)
    async def _invite(self) -> None:
        window = await self.ask(lambda client: client.invite(None, None))
        if window is not None:
            words = f"hearthnet join {window['code']}"
            self.notify(
                f"On the other machine, within {window['ttl_s']:.0f} s:\n{clean(words)}",
                title="Invitation", timeout=window["ttl_s"], markup=False,
            )  # fmt: skip

    @work(exclusive=True, group="revoke", exit_on_error=False)
    async def _revoke(self, key: str) -> None:
        done = await self.ask(lambda client: client.change_member("revoke", key))
        if done is not None:
            votes = done.get("votes_missing") or 0
            said = "It is out." if done.get("done") else f"{votes} more vote(s) are needed."
            self.notify(said, markup=False)

    def _chosen(self) -> ShownNode | None:
        key = self.query_one(Table).chosen
        return next((node for node in nodes(self.picture) if node.key == key), None)

    def _show_chosen(self) -> None:
        chosen = self._chosen()
        self.query_one("#chosen", Static).update(Text() if chosen is None else _detail(chosen))


def _row(node: ShownNode) -> tuple[Text, Text, Text, str, str, str]:
    state = Text(f"{GLYPHS[node.state]} {node.word.partition(':')[0]}", COLOURS[node.state])
    layers = ", ".join(f"{model} {span}" for model, span in node.shards)
    rtt = ms(node.rtt_ms) if node.letter != "A" else ""
    return (
        Text(node.letter, node_style(node.letter)),
        Text(node.name),
        state,
        rtt,
        layers,
        short(node.key),
    )


def _detail(node: ShownNode) -> Text:
    version = node.row.get("software") or "version not known"
    if skew := node.row.get("skew"):
        version += f" ({skew})"
    text = Text(f"{node.name} · {node.word} · {version}\n")
    text.append(f"id {node.key}\n", "dim")
    where = node.row.get("address") or node.row.get("endpoint") or "-"
    text.append(f"address {where}\n", "dim")
    for shard in node.row.get("shards", ()):
        text.append(f"{shard['model_id']} {shard['layers']}")
        if "p50_latency_ms" in shard:
            text.append(
                f" · {ms(shard['p50_latency_ms'])} a step · {shard['active_streams']} running"
                f" · {shard['queue_depth']} waiting · {shard.get('dtype', '')}"
            )
        text.append("\n")
    return text
