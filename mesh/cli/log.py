"""`hearthnet log`: the hearth's signed log, newest first."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mesh.cli.members import require_known
from mesh.cli.options import AskedDaemon, asks
from mesh.cli.output import note, print_table, say


@asks
def log(
    daemon: AskedDaemon,
    *,
    author: Annotated[
        str | None, typer.Option("--author", metavar="NODE", help="Only what this node signed.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option("--type", metavar="TYPE", help="Only these, such as member or model."),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            max=200,
            help="So many at most of decisions, and of facts.",
        ),
    ] = 30,
    after: Annotated[
        str | None, typer.Option("--after", metavar="PLACE", help="Go on where a page ended.")
    ] = None,
) -> None:
    """Show what the hearth's nodes have signed: decisions about members, and facts."""
    wanted = {"author": author, "type": kind, "limit": limit, "after": after}
    page = daemon.ask(lambda client: client.log(**wanted))
    if author is not None and not (page["decisions"] or page["facts"] or page["next"]):
        hearth = daemon.ask(lambda client: client.hearth())
        require_known(author, [*hearth["members"], *hearth["out"]])
    daemon.show(page, _show)


def _show(page: dict[str, Any]) -> None:
    rows = sorted([*page["decisions"], *page["facts"]], key=lambda row: row["at"], reverse=True)
    if not rows:
        say("nothing in the log is of that kind")
        return
    print_table(
        ("AT", "WHO", "TYPE", "SAYS"),
        [(row["at"][:19], row["author_name"], row["type"], in_words(row["says"])) for row in rows],
    )
    if page["next"] is not None:
        note(f"more: --after {page['next']}")


def in_words(says: Any) -> str:
    """What an entry says, in one short line."""
    if isinstance(says, dict):
        return " ".join(f"{key}={in_words(value)}" for key, value in says.items())[:120]
    if isinstance(says, list):
        return ",".join(map(in_words, says))[:60]
    return str(says)[:40]
