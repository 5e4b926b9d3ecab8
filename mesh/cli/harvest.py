"""`hearthnet harvest`: activations of a data set, written by the nodes that compute them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mesh.cli.options import AskedDaemon, asks
from mesh.cli.output import note, say


@asks
def harvest(  # noqa: PLR0913 - flags
    daemon: AskedDaemon,
    model: Annotated[str, typer.Argument(help="The model to run.")],
    *,
    module: Annotated[
        str, typer.Option(metavar="PATTERN", help="Which outputs, such as model.layers.*.mlp.")
    ],
    dataset: Annotated[
        Path,
        typer.Option(
            exists=True, dir_okay=False, help="One prompt a line, or .jsonl with a `text` in each."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", file_okay=False, help="For the index.")],
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Of each prompt; more are cut off.")
    ] = 1024,
    batch: Annotated[int, typer.Option(min=1, max=1024, help="Prompts of one file.")] = 32,
    parallel: Annotated[int, typer.Option(min=1, max=8, help="Batches at a time.")] = 2,
) -> None:
    """Run prompts and leave the activations on the nodes, as safetensors; DIR gets the index.

    Interrupted, the same command goes on where it was.
    """
    from mesh.research.harvest.dataset import batches, digest
    from mesh.research.harvest.index import HarvestIndex, HarvestPlan
    from mesh.research.harvest.run import run

    plan = HarvestPlan(model, module, digest(dataset), max_tokens, batch)
    index = HarvestIndex(out, plan)

    def tell(result: dict[str, Any]) -> None:
        tokens = sum(len(prompt["ids"]) for prompt in result["prompts"])
        cut = sum(prompt["cut"] for prompt in result["prompts"])
        shorter = f"; prompts cut short: {cut}" if cut else ""
        note(f"batch {result['batch']}: {tokens} tokens, {len(result['files'])} files{shorter}")

    prompts = batches(dataset, batch)
    count = daemon.ask(lambda c: run(c, index, prompts, parallel=parallel, on_batch=tell))
    path = index.finish(count)
    daemon.show(
        {"index": str(path), "run": plan.run, "batches": count},
        lambda _: say(f"{path} says which node has what; batches: {count}."),
    )
