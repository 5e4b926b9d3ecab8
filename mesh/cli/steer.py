"""`hearthnet steer`: named edits of a model's activations, for the whole hearth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mesh.cli.options import ApiPort, Host, Json, StateDir, ask, locate_daemon
from mesh.cli.output import print_json, print_table, say

app = typer.Typer(help="Named steering edits that chat requests can use.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="What requests call it.")]


@app.command()
def publish(  # noqa: PLR0913 - every flag is a parameter
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
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    json: Json = False,
) -> None:
    """Publish an edit under a name; the newest edit of a name is the one that counts."""
    tensors = file.read_bytes()
    made = ask(
        locate_daemon(state_dir, host, api_port),
        lambda client: client.publish_steering(name, model, path, side, tensors),
    )
    if json:
        print_json(made)
    else:
        say(f"{made['name']} ({made['kind']}) steers the {side} of {path} of {model}.")


@app.command("list")
def show(
    *,
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    json: Json = False,
) -> None:
    """List the published edits."""
    edits = ask(locate_daemon(state_dir, host, api_port), lambda client: client.steerings())
    if json:
        print_json(edits)
        return
    print_table(
        ["name", "model", "path", "side", "kind", "bytes", "by"],
        [
            [e["name"], e["model_id"], e["path"], e["side"], e["kind"], e["size"], e["author_name"]]
            for e in edits
        ],
    )


@app.command()
def remove(
    name: Name,
    *,
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    json: Json = False,
) -> None:
    """Take a published edit back; answers that run go on with it."""
    done = ask(
        locate_daemon(state_dir, host, api_port), lambda client: client.remove_steering(name)
    )
    if json:
        print_json(done)
    else:
        say(f"{name} is removed.")
