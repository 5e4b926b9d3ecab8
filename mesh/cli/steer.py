"""`hearthnet steer`: named edits of a model's activations, for the whole hearth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mesh.cli.groups import VerbGroup
from mesh.cli.options import AskedDaemon, asks
from mesh.cli.output import print_table, say

app = typer.Typer(
    cls=VerbGroup, help="Named steering edits that chat requests can use.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="What requests call it.")]


@app.command()
@asks
def publish(
    daemon: AskedDaemon,
    name: Name,
    file: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, help="safetensors in fp32: `vector`, or `a` and `b`."
        ),
    ],
    *,
    path: Annotated[str, typer.Option(help="Where: model.layers.N, model.layers.N.mlp, ...")],
    model: Annotated[str, typer.Option(help="The model it was made for.")] = "builtin",
    side: Annotated[str, typer.Option(help="output or input of that module.")] = "output",
) -> None:
    """Publish an edit under a name; the newest edit of a name is the one that counts."""
    tensors = file.read_bytes()
    made = daemon.ask(lambda client: client.publish_steering(name, model, path, side, tensors))
    said = f"{made['name']} ({made['kind']}) steers the {side} of {path} of {model}."
    daemon.show(made, lambda _: say(said))


@app.command("list")
@asks
def show(daemon: AskedDaemon) -> None:
    """List the published edits."""
    daemon.show(daemon.ask(lambda client: client.steerings()), _show)


def _show(edits: list[dict[str, Any]]) -> None:
    print_table(
        ["name", "model", "path", "side", "kind", "bytes", "by"],
        [
            [e["name"], e["model_id"], e["path"], e["side"], e["kind"], e["size"], e["author_name"]]
            for e in edits
        ],
    )


@app.command()
@asks
def remove(daemon: AskedDaemon, name: Name) -> None:
    """Take a published edit back; answers that run go on with it."""
    done = daemon.ask(lambda client: client.remove_steering(name))
    daemon.show(done, lambda _: say(f"{name} is removed."))
