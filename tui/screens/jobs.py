"""The queue of nnsight clients' jobs, what each prints, and ending one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Log

from tui.picture import Picture
from tui.screens.confirm import ConfirmScreen
from tui.screens.screen import TopScreen
from tui.widgets.table import Row, Table
from tui.words import clean

LOG_S = 1.0
"""What the chosen job prints is asked for so often, while somebody looks."""


class JobsScreen(TopScreen):
    """A table, and below it what the chosen job printed."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("k", "kill", "Kill")]

    def __init__(self, now_s: Callable[[], float] = time.time) -> None:
        """`now_s` is what ages are as of."""
        super().__init__()
        self._now_s = now_s
        self._shown: tuple[str, list[str]] = ("", [])

    def body(self) -> ComposeResult:
        yield Table("job", "model", "key", "status", "age", "note")
        yield Log(max_lines=500, id="printed")

    def on_mount(self) -> None:
        """Ask for what is printed, while this is looked at."""
        self.query_one("#printed").border_title = "printed"
        self.set_interval(LOG_S, self._look)

    def took(self, picture: Picture) -> None:
        jobs = picture.status.get("jobs") or {"jobs": [], "ended": []}
        rows = [*jobs["jobs"], *jobs["ended"][:20]]
        self.query_one(Table).fill({job["id"]: _row(job, self._now_s()) for job in rows})

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Another job is chosen."""
        self._look()

    def action_kill(self) -> None:
        """End the chosen job, after a question."""
        chosen = self.query_one(Table).chosen
        if chosen is None:
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._kill(chosen)

        question = f"End the job {chosen[:12]}? Its client is told."
        self.app.push_screen(ConfirmScreen(question, "end it"), answered)

    @work(exclusive=True, group="kill", exit_on_error=False)
    async def _kill(self, job: str) -> None:
        ended = await self.ask(lambda client: client.kill_job(job))
        if ended is not None:
            self.notify(f"{job[:12]} has ended: {ended['status']}", markup=False)

    def _look(self) -> None:
        chosen = self.query_one(Table).chosen
        if chosen is not None and self.is_current and self.picture.lost is None:
            self._fetch(chosen)

    @work(exclusive=True, group="printed", exit_on_error=False)
    async def _fetch(self, job: str) -> None:
        found = await self.ask(lambda client: client.job_log(job))
        if found is None:
            return
        lines = [clean(line) for line in found["lines"]]
        if (job, lines) != self._shown:
            self._shown = (job, lines)
            self.query_one("#printed", Log).clear().write_lines(lines or ["(nothing yet)"])


def _row(job: Mapping[str, Any], now_s: float) -> Row:
    note = job["description"].partition("\n")[0][:60]
    return job["id"][:12], job["model"], job["owner"][:12], job["status"], _age(job, now_s), note


def _age(job: Mapping[str, Any], now_s: float) -> str:
    ended = job.get("ended_at")
    seconds = max(0, round((ended or now_s) - job["received_at"]))
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min"
