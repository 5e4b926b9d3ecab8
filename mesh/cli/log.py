"""`hearthnet log`: the hearth's signed log, newest first."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mesh.cli.options import AskedDaemon, asks
from mesh.cli.output import note, print_table, say
from mesh.errors import NotFound


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
        _require_known(daemon.ask(lambda client: client.hearth()), author)
    daemon.show(page, _show)


def _require_known(hearth: dict[str, Any], author: str) -> None:
    """Raise NotFound where nobody is called so, or has an id that begins so."""
    for each in (*hearth["members"], *hearth["out"]):
        if each["name"] == author or each["node_id"].startswith(author):
            return
    raise NotFound(f"Nobody here is called {author!r}.", fix="See `hearthnet members`.")


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
