"""`hearthnet list`, `show` and `rm`: models on this machine's disk, and what neighbours have."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mesh.cli.options import AskedDaemon, Yes, asks, require_yes
from mesh.cli.output import note, print_table, say
from mesh.cli.pull import transfer_line
from mesh.errors import ModelNotFound
from mesh.units import data_size

Model = Annotated[str, typer.Argument(help="Its name, perhaps with @ and the hash's beginning.")]


@asks
def list_models(daemon: AskedDaemon) -> None:
    """List the models on this machine's disk, what is being fetched, and what neighbours have."""
    daemon.show(daemon.ask(lambda client: client.weights()), _listed)


@asks
def show(daemon: AskedDaemon, model: Model) -> None:
    """Show what is here of a model, where it lies, and who else has which layers."""
    found = _of(daemon.ask(lambda client: client.weights()), model)
    daemon.show(found, _shown)


@asks
def rm(
    daemon: AskedDaemon,
    model: Model,
    *,
    yes: Yes = False,
) -> None:
    """Delete a model that was fetched from this machine's disk. One in use is not deleted."""
    found = _of(daemon.ask(lambda client: client.weights()), model)
    here = [f"{data_size(each['here_bytes'])} in {each['directory']}" for each in found["here"]]
    here += [f"{data_size(each['bytes'])} that came of it" for each in found["staged"]]
    if here and not yes:
        held = ", ".join(here)
        require_yes(f"Delete {model} ({held})?")
    removed = daemon.ask(lambda client: client.remove_model(model))
    daemon.show(
        removed, lambda gone: say(f"{gone['removed']} is gone: {data_size(gone['bytes'])}.")
    )


def _of(picture: dict[str, Any], model: str) -> dict[str, Any]:
    name, _, digits = model.partition("@")

    def is_meant(row: dict[str, Any]) -> bool:
        return bool(row["id"] == name and row["weights_sha256"].startswith(digits))

    here = [row for row in picture["models"] if is_meant(row)]
    nearby = [row for row in picture["neighbours"] if is_meant(row)]
    staged = [row for row in picture.get("staged", ()) if row["model_id"] == model]
    if not here and not nearby and not staged:
        raise ModelNotFound(f"{model!r} is neither here nor nearby.", fix="See `hearthnet list`.")
    return {"model": model, "here": here, "neighbours": nearby, "staged": staged}


def _listed(picture: dict[str, Any]) -> None:
    rows = [
        [
            row["id"],
            row["weights_sha256"][:12],
            _layers(row),
            data_size(row["here_bytes"]),
            row.get("dtype") or "",
            "in use" if row["in_use"] else "",
        ]
        for row in picture["models"]
    ]
    print_table(["model", "weights", "layers here", "size", "stored as", ""], rows)
    for transfer in picture["transfers"]:
        say(f"fetching {transfer['model_id']}: {transfer_line(transfer)}")
    told = {transfer["id"] for transfer in picture["transfers"]}
    for pull in picture["pulls"]:
        if pull["transfer"] not in told:
            say(f"fetching {pull['model']}: looking for it")
    fetched = {row["model_id"] for row in picture["transfers"]}
    for row in picture.get("staged", ()):  # a daemon of another version says none
        if row["model_id"] not in fetched:
            say(f"not all here: {_begun(row)}")
    here = {row["weights_sha256"] for row in picture["models"]}
    for row in picture["neighbours"]:
        names = ", ".join(name for _, name in _called(row["nodes"]))
        if row["weights_sha256"] not in here:
            say(f"nearby: {row['id']} ({row['weights_sha256'][:12] or 'being fetched'}) on {names}")


def _shown(found: dict[str, Any]) -> None:
    for row in found["here"]:
        say(f"{row['id']}  {row['weights_sha256']}")
        whole = "partial" if row["here_bytes"] < row["total_bytes"] else "complete"
        here, total = data_size(row["here_bytes"]), data_size(row["total_bytes"])
        kept_as = row.get("dtype")  # which daemons of earlier versions do not say
        stored = f", stored as {kept_as}" if kept_as else ""
        say(f"{whole}: {here} of {total}, {_layers(row)}{stored}")
        say(f"in {row['directory']}{' (in use)' if row['in_use'] else ''}")
        if row["origin"]:
            say(f"from {row['origin']}")
    for row in found["staged"]:
        say(f"not all here: {_begun(row)}")
    if not (found["here"] or found["staged"]):
        note("nothing of it is here")
    for row in found["neighbours"]:
        for node, name in _called(row["nodes"]):
            ends = " and ends" if node["ends"] else ""
            spans = ", ".join(node["layers"]) or "no whole layer"
            say(f"{name} has {spans}{ends} of {row['weights_sha256'][:12]}")


def _begun(row: dict[str, Any]) -> str:
    name = row["model_id"]
    return (
        f"{name}, {data_size(row['bytes'])} came; `hearthnet pull {name}` goes on with it,"
        f" `hearthnet rm {name}` deletes it"
    )


def _called(nodes: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """Nodes with what to call them: two that share a name by how their ids begin as well."""
    from mesh.identity.naming import called

    names = called((node["node_id"], node["name"]) for node in nodes)
    return [(node, names[node["node_id"]]) for node in nodes]


def _layers(row: dict[str, Any]) -> str:
    if row["layers"] == [f"0-{row['total_layers'] - 1}"] and row["ends"]:
        return "all"
    spans = ", ".join(row["layers"]) or "none"
    return f"{spans} of 0-{row['total_layers'] - 1}" + (", ends" if row["ends"] else "")
