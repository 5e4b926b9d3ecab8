"""What is deployed and how far it is, what is held where and fetched; deploy, scale and evict."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable

from tui.deployed import Deployed, deployed, gaps, known_models, what_ends
from tui.picture import Picture
from tui.screens.confirm import ConfirmScreen
from tui.screens.screen import TopScreen
from tui.screens.wish import ReplicaWish, WishScreen
from tui.widgets.downloads import Downloads
from tui.widgets.holdings import ModelHolders
from tui.widgets.node_memory import NodeMemory
from tui.widgets.on_disk import OnDisk
from tui.widgets.spans import Spans
from tui.widgets.table import Row, Table
from tui.words import COLOURS, GLYPHS, clean


class ModelsScreen(TopScreen):
    """A table of deployments, while there are any; below it all else, to scroll."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "deploy", "Deploy"),
        Binding("s", "scale", "Scale"),
        Binding("e", "evict", "Evict"),
        Binding("x", "stop_pulls", "Stop a pull"),
    ]

    def body(self) -> ComposeResult:
        yield Table("deployed", "replicas", "state", "level", shortens="deployed")
        with VerticalScroll(can_focus=True):
            yield Spans()
            yield Downloads()
            yield ModelHolders()
            yield OnDisk()
            yield NodeMemory()

    def took(self, picture: Picture) -> None:
        table, found = self.query_one(Table), deployed(picture)
        table.fill({each.key: _row(each) for each in found})
        if bool(found) != table.display:
            table.display = bool(found)
            (table if found else self.query_one(VerticalScroll)).focus()
        self._show_chosen()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Another deployment is chosen."""
        self._show_chosen()

    def action_deploy(self) -> None:
        """Wish for a model; the estimate is shown before it is confirmed."""

        def answered(wanted: ReplicaWish | None) -> None:
            if wanted is not None:
                self._deploy(wanted)

        known = known_models(self.picture)
        self.app.push_screen(WishScreen(self._plan_deploy, "Deploy a model", known), answered)

    def action_scale(self) -> None:
        """Have another number of replicas of the chosen deployment."""
        chosen = self._chosen()
        if chosen is None:
            return

        def answered(wanted: ReplicaWish | None) -> None:
            if wanted is not None:
                self._scale(chosen.key, wanted)

        plan = partial(self._plan, chosen.settings)
        screen = WishScreen(plan, f"Scale {chosen.model}", before=_wish(chosen))
        self.app.push_screen(screen, answered)

    def action_evict(self) -> None:
        """End the chosen deployment, after a question that says what ends."""
        chosen = self._chosen()
        if chosen is None:
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._evict(chosen)

        question = what_ends(chosen, self.picture)
        self.app.push_screen(ConfirmScreen(question, "evict it"), answered)

    @work(exclusive=True, group="pulls", exit_on_error=False)
    async def action_stop_pulls(self) -> None:
        """Stop what is pulled to this machine, after a question for each."""
        weights = await self.ask(lambda client: client.weights())
        if weights is None:
            return
        pulls = clean(weights["pulls"])
        if not pulls:
            self.notify("Nothing is pulled here; what a deployment fetches ends with it.")
        for pull in pulls:
            question = f"Stop fetching {pull['model']}? What has come is kept."
            if await self.app.push_screen_wait(ConfirmScreen(question, "stop it")):
                await self._stop(pull)

    async def _stop(self, pull: Mapping[str, Any]) -> None:
        if await self.ask(lambda client: client.cancel_pull(pull["pull"])) is not None:
            self.notify(f"{pull['model']} is not fetched any more.", markup=False)

    async def _plan_deploy(self, wanted: ReplicaWish) -> Mapping[str, Any]:
        """What is deployed already keeps its settings. Raises MeshError."""
        same = (each for each in deployed(self.picture) if wanted.model in (each.key, each.model))
        before = next(same, None)
        return await self._plan(before.settings if before else {}, wanted)

    async def _plan(self, settings: Mapping[str, Any], wanted: ReplicaWish) -> Mapping[str, Any]:
        """Raises MeshError."""
        answer = await self.daemon().plan(wanted.model, replicas=wanted.replicas, **settings)
        plan: Mapping[str, Any] = clean(answer)
        return plan

    @work(exclusive=True, group="wish", exit_on_error=False)
    async def _deploy(self, wanted: ReplicaWish) -> None:
        row = await self.ask(lambda client: client.deploy(wanted.model, replicas=wanted.replicas))
        if row is not None:
            self._tell(f"{wanted.model} is wished for; it comes up by itself.", row)

    @work(exclusive=True, group="wish", exit_on_error=False)
    async def _scale(self, deployment: str, wanted: ReplicaWish) -> None:
        row = await self.ask(lambda client: client.scale(deployment, wanted.replicas))
        if row is not None:
            self._tell(f"{wanted.model}: {wanted.replicas} replica(s) are wished for.", row)

    @work(exclusive=True, group="wish", exit_on_error=False)
    async def _evict(self, chosen: Deployed) -> None:
        ended = await self.ask(lambda client: client.evict(chosen.key))
        if ended is not None:
            self.notify(f"{chosen.model} is evicted.", markup=False)

    def _tell(self, words: str, wished: Mapping[str, Any]) -> None:
        self.notify(words, markup=False)
        for gap in gaps(clean(wished)):
            self.notify(gap, severity="warning", markup=False)

    def _chosen(self) -> Deployed | None:
        key = self.query_one(Table).chosen
        found = next((each for each in deployed(self.picture) if each.key == key), None)
        if found is None:
            self.notify("Nothing is deployed; n deploys.")
        return found

    def _show_chosen(self) -> None:
        self.query_one(Spans).chosen = self.query_one(Table).chosen or ""


def _wish(found: Deployed) -> ReplicaWish:
    return ReplicaWish(found.model, found.wished)


def _row(found: Deployed) -> Row:
    state = Text(f"{GLYPHS[found.state]} {found.words}", COLOURS[found.state])
    return Text(found.model), found.replicas, state, found.level
