"""`hearthnet pull`: fetch a model from neighbours or the hub, and show how far that is."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.options import AskedDaemon, asks, path_from_root
from mesh.cli.output import note, say
from mesh.units import data_size, lasting

if TYPE_CHECKING:
    from mesh.client import Client
    from mesh.errors import MeshError

_LOOK_S = 1


Model = Annotated[
    str,
    typer.Argument(
        callback=path_from_root,
        help="A neighbour's model, ORG/NAME or ORG/NAME/FILE.gguf of the hub, or a directory"
        " (./...).",
    ),
]
Drop = Annotated[
    bool, typer.Option("--drop", help="Keep nothing of the hub's that was not asked for.")
]
Cancel = Annotated[
    bool, typer.Option("--cancel", help="Stop fetching or offering it; what has come is kept.")
]


@asks
def pull(  # noqa: PLR0913 - flags
    daemon: AskedDaemon,
    model: Model,
    *,
    layers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LO-HI|none", help="Only these layers, or none; may be given several times."
        ),
    ] = None,
    ends: Annotated[
        bool,
        typer.Option(
            help="Embedding, final norm and head as well; others can run them for a node."
        ),
    ] = True,
    source: Annotated[
        str, typer.Option("--from", metavar="NODE|hub", help="From there and nowhere else.")
    ] = "",
    revision: Annotated[str, typer.Option(help="Of the hub's repository.")] = "main",
    drop: Drop = False,
    wait: Annotated[bool, typer.Option(help="Until it is here.")] = True,
    cancel: Cancel = False,
) -> None:
    """Fetch a model to this machine's disk, or only some of its layers.

    What neighbours have comes from them, several at once; else it comes from the hub, once for the
    whole hearth. The daemon fetches it, and goes on when it is started again: Ctrl-C ends this
    command, and --cancel the fetch. One that was ended or has failed goes on where it stopped when
    it is pulled again.
    """
    if cancel:
        if layers or not ends or source or revision != "main" or drop or not wait:
            raise typer.BadParameter("--cancel goes with no other option of a pull.")
        daemon.show(daemon.ask(lambda client: _cancel(client, model)), _cancelled)
        return
    wanted = {
        "layers": [] if layers == ["none"] else layers or None,
        "ends": ends,
        "source": source,
        "revision": revision,
        "drop": drop,
    }
    outcome = daemon.ask(lambda client: _run(client, model, wanted, wait=wait))
    daemon.show(outcome, lambda end: _told(end, wait=wait))


async def _run(client: Client, model: str, wanted: dict[str, Any], *, wait: bool) -> dict[str, Any]:
    import asyncio

    from mesh.errors import from_dict

    name = await client.pull(model, **wanted)
    line = ProgressLine()
    try:
        outcome = await client.pull_outcome(name)
        while wait and outcome["state"] == "running":
            line.show(outcome["transfer"])
            outcome = await client.pull_outcome(name, _LOOK_S)
    except asyncio.CancelledError:
        line.end()
        note(
            f"The daemon goes on fetching {model}: `hearthnet list` shows how far that is, and"
            f" `hearthnet pull --cancel {model}` stops it."
        )
        raise
    line.end()
    if outcome["state"] == "failed":
        raise from_dict(outcome["error"])
    return outcome


async def _cancel(client: Client, model: str) -> dict[str, Any]:
    """End the pulls of a model: each as it ended, and whether it is fetched for another reason.

    Raises NotFound where there is none.
    """
    before = await client.weights()
    pulls = _pulls_of(before, model)
    if not pulls:
        raise _not_pulled(before, model)
    ended = [await client.cancel_pull(each["pull"]) for each in pulls]
    ids = {each["transfer"] for each in pulls}
    models = {row["model_id"] for row in before["transfers"] if row["id"] in ids} | {model}
    left = (await client.weights())["transfers"]
    goes_on = any(row["model_id"] in models for row in left if row["id"] not in ids)
    return {"model": model, "cancelled": ended, "goes_on": goes_on}


def _pulls_of(picture: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """The pulls that were asked for by this name, or that fetch or offer the model of this name."""
    fetched = {row["id"]: row["model_id"] for row in picture["transfers"]}
    lying = {row["directory"]: row["id"] for row in picture["models"]}
    return [
        each for each in picture["pulls"] if model in (each["model"], fetched.get(each["transfer"]))
    ] + [
        {**each, "transfer": None}
        for each in picture.get("offers", ())  # a daemon of another version has none
        if model in (each["directory"], lying.get(each["directory"]))
    ]


def _not_pulled(picture: dict[str, Any], model: str) -> MeshError:
    from mesh.errors import NotFound

    if any(row["model_id"] == model for row in picture["transfers"]):
        return NotFound(
            f"{model} is not pulled: it is fetched for its deployment.",
            fix=f"`hearthnet evict {model}` ends that.",
        )
    names = ", ".join(each["model"] for each in picture["pulls"]) or "nothing"
    return NotFound(f"{model} is not pulled; {names} is.", fix="See `hearthnet list`.")


def _cancelled(outcome: dict[str, Any]) -> None:
    model = outcome["model"]
    withdrawn = [each for each in outcome["cancelled"] if each["state"] == "withdrawn"]
    done = [each for each in outcome["cancelled"] if each["state"] == "done"]
    if done:
        say(f"{model} had come meanwhile; it is in {done[0]['directory']}")
    elif withdrawn:
        say(f"{withdrawn[0]['directory']} is not offered any more; it stays where it is.")
    elif outcome["goes_on"]:
        say(f"{model} is not pulled any more; a deployment still has it fetched.")
    else:
        say(f"{model} is not fetched any more; what has come is kept for the next pull.")


def _told(outcome: dict[str, Any], *, wait: bool) -> None:
    if wait:
        say(f"{outcome['model']} is in {outcome['directory']}")
    else:
        say(f"{outcome['model']} is being fetched; `hearthnet list` shows how far that is.")


class ProgressLine:
    """One line on stderr that is written over, or a new one each time where that cannot be."""

    def __init__(self) -> None:
        self._shown = ""
        self._is_screen = sys.stderr.isatty()

    def show(self, transfer: dict[str, Any] | None) -> None:
        """How far it is."""
        line = "looking for it" if transfer is None else transfer_line(transfer)
        if line == self._shown:
            return
        if self._is_screen:
            from rich.cells import set_cell_size

            sys.stderr.write("\r")  # `note` lets no text do that
            # A line that fills the last column is continued on the next, which is not written over.
            note(set_cell_size(line, shutil.get_terminal_size().columns - 1), end="")
        else:
            note(line)
        self._shown = line

    def end(self) -> None:
        """No more comes."""
        if self._is_screen and self._shown:
            note("")


def transfer_line(transfer: dict[str, Any]) -> str:
    """``12 % of 4.1 GB, 31.0 MB/s, 2 min left (attic 20.1, kitchen 10.9)``."""
    if transfer["note"]:
        return str(transfer["note"])
    if not transfer["total_bytes"]:
        return f"{transfer['state']}"
    rates = [f"{s['name']} {data_size(s['bytes_per_s'])}/s" for s in transfer["sources"]]
    is_coming = transfer["done_bytes"] < transfer["total_bytes"]
    return come_line(transfer) + (f" ({', '.join(rates)})" if is_coming and len(rates) > 1 else "")


def come_line(row: dict[str, Any]) -> str:
    """``12 % of 4.1 GB, 31.0 MB/s, 2 min left``."""
    done, total = row["done_bytes"], row["total_bytes"]
    if done >= total:
        return f"all of {data_size(total)} has come and is checked"
    parts = [f"{done * 100 // total} % of {data_size(total)}", f"{data_size(row['bytes_per_s'])}/s"]
    if row["eta_s"] is not None:
        parts.append(f"{lasting(row['eta_s'])} left")
    return ", ".join(parts)
