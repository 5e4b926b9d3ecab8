"""`hearthnet deploy MODEL`: wish for a model on the machines of the hearth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.deploying import (
    Timeout,
    follow,
    pins,
    require_wait,
    shown,
    warn_of_gaps,
    within,
)
from mesh.cli.estimate import print_plan
from mesh.cli.options import AskedDaemon, asks, path_from_root
from mesh.cli.output import exit_code
from mesh.errors import from_dict

if TYPE_CHECKING:
    from mesh.client import Client

Model = Annotated[
    str,
    typer.Argument(
        callback=path_from_root,
        help="A model's name, ORG/NAME or ORG/NAME/FILE.gguf of the hub, or a checkpoint's"
        " directory or GGUF file (PATH[=ID]).",
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Return once all of it is up.")]
Minimum = Annotated[
    float | None,
    typer.Option("--minimum-seconds", min=0, metavar="N", help="It stays so long at least."),
]
KeepAlive = Annotated[
    float | None,
    typer.Option(
        "--keep-alive", min=0, metavar="S", help="Rest after so many seconds without use; 0: never."
    ),
]
Nodes = Annotated[str | None, typer.Option(metavar="A,B", help="Use these machines only; '': any.")]
Layers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NODE=LO-HI", help="Layers that have to be there; none: anywhere. Repeatable."
    ),
]
Context = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="Positions that have to fit; 0: what is usual."),
]
Estimate = Annotated[
    bool,
    typer.Option(
        "--estimate",
        help="Only say what it would need and give; exit code 5: it does not fit.",
    ),
]
With = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="NODE",
        help="Estimate with it, were it here; NAME=GIB[:GB/S] for one to buy. Repeatable.",
    ),
]
Without = Annotated[
    list[str] | None, typer.Option(metavar="A,B", help="Estimate without these. Repeatable.")
]
Streams = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Estimate for so many at a time.")
]


@asks
def deploy(  # noqa: PLR0913 - flags
    daemon: AskedDaemon,
    model: Model,
    *,
    replicas: Annotated[int | None, typer.Option(min=1, max=16, help="Whole copies of it.")] = None,
    dedicated: Annotated[
        bool | None,
        typer.Option("--dedicated/--shared", help="Never make room for another, never rest."),
    ] = None,
    nodes: Nodes = None,
    layers: Layers = None,
    quant: Annotated[str | None, typer.Option(help="none, int8, int4 or auto.")] = None,
    context: Context = None,
    minimum: Minimum = None,
    estimate: Estimate = False,
    with_: With = None,
    without: Without = None,
    streams: Streams = None,
    keep_alive: KeepAlive = None,
    wait: Wait = False,
    timeout: Timeout = None,
) -> None:
    """Have a model loaded over the house; what is deployed already is changed."""
    require_wait(wait=wait, timeout=timeout)
    wanted: dict[str, Any] = {
        "replicas": replicas, "dedicated": dedicated, "quant": quant, "context": context,
        "minimum_s": minimum, "keep_alive_s": keep_alive, "layers": pins(layers),
        "nodes": None if nodes is None else _names(nodes),
    }  # fmt: skip
    order = {name: value for name, value in wanted.items() if value is not None}
    if estimate or with_ or without or streams is not None:
        for kept_for in ("minimum_s", "keep_alive_s"):
            order.pop(kept_for, None)
        left_out = None if without is None else [name for text in without for name in _names(text)]
        supposed = {"with": with_, "without": left_out, "streams": streams}
        order |= {name: value for name, value in supposed.items() if value is not None}
        _estimate(daemon, model, order)
        return

    async def question(client: Client) -> dict[str, Any]:
        row = await client.deploy(model, **order)
        warn_of_gaps(row)
        return await _up(client, row, model, timeout) if wait else row

    daemon.show(daemon.ask(question), shown)


async def _up(
    client: Client, row: dict[str, Any], model: str, timeout_s: float | None
) -> dict[str, Any]:
    return await within(timeout_s, follow(client, row["deployment"]), f"{model} was not up")


def _estimate(daemon: AskedDaemon, model: str, order: dict[str, Any]) -> None:
    plan = daemon.ask(lambda client: client.plan(model, **order))
    daemon.show(plan, print_plan)
    if plan["refusal"] is not None:
        raise typer.Exit(exit_code(from_dict(plan["refusal"])))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
