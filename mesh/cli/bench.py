"""`hearthnet bench`: how fast a model answers, over the route that its requests take now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.bringing_up import loading
from mesh.cli.options import AskedDaemon, asks
from mesh.cli.output import note, print_table, route_line, say
from mesh.errors import NoRoute

if TYPE_CHECKING:
    from mesh.client import Client

_SHORT = 16
"""Tokens of the prompts before which nothing but the answers is to be timed."""
_IDS = range(10, 250)
"""Tokens that every vocabulary has, and none of which ends a text."""


@dataclass(frozen=True, slots=True)
class _Order:
    """Tokens of the prompt and of each answer, how many answers at once, and rounds of each."""

    prompt: int
    tokens: int
    answers: tuple[int, ...]
    rounds: int


@dataclass(frozen=True, slots=True)
class _Answer:
    tokens: int
    prompt_tokens: int
    timings: Mapping[str, Any]
    route: Sequence[Mapping[str, Any]]


@asks
def bench(
    daemon: AskedDaemon,
    model: Annotated[str | None, typer.Argument(help="See `hearthnet models`.")] = None,
    *,
    prompt: Annotated[
        int, typer.Option("--prompt", metavar="N", min=1, help="Tokens of the long prompt.")
    ] = 512,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=2, help="Tokens of each answer.")
    ] = 64,
    answers: Annotated[
        list[int] | None,
        typer.Option("--answers", metavar="N", min=2, max=64, help="At once. Repeatable."),
    ] = None,
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", min=1, max=100, help="Medians of so many.")
    ] = 3,
) -> None:
    """Measure a model over its route: reading a prompt, answering one, answering several at once.

    Prompts are random, so that nothing is known beforehand, and nothing is drafted.
    """
    order = _Order(prompt, tokens, tuple(answers or (4,)), rounds)
    daemon.show(daemon.ask(lambda client: _measured(client, model, order)), _show)


async def _measured(client: Client, model: str | None, order: _Order) -> dict[str, Any]:
    from statistics import median

    name = model or await _first(client)
    timer, rounds = _Timer(client, name), range(order.rounds)
    note(f"measuring {name}")
    await timer.answer(_SHORT, 2)  # whatever the first one has to prepare
    read = [await timer.answer(order.prompt, 1) for _ in rounds]
    spoken = [await timer.answer(_SHORT, order.tokens) for _ in rounds]
    together = {
        str(count): median([await timer.together(count, order.tokens) for _ in rounds])
        for count in order.answers
    }
    last = spoken[-1]
    return {
        "node": (await client.status())["node"]["name"],
        "model": name,
        "route": list(last.route),
        "rounds": order.rounds,
        "prompt_tokens": read[-1].prompt_tokens,
        "prompt_tokens_per_second": median(
            [each.prompt_tokens * 1e3 / each.timings["first_token_ms"] for each in read]
        ),
        "first_token_ms": median([each.timings["first_token_ms"] for each in read]),
        "tokens": last.tokens,
        "tokens_per_second": median([each.timings["tokens_per_second"] for each in spoken]),
        "together": together,
        "hops": last.timings["hops"],
    }


@dataclass(frozen=True, slots=True)
class _Timer:
    client: Client
    model: str

    async def answer(self, prompt: int, tokens: int) -> _Answer:
        """One answer of so many tokens to a random prompt."""
        import random

        ids = random.choices(_IDS, k=prompt)  # noqa: S311 - nothing secret
        chunks = self.client.complete(
            self.model, ids, max_tokens=tokens, temperature=0, ignore_eos=True,
            hearthnet={"draft": False},
        )  # fmt: skip
        last: dict[str, Any] = {}
        async with aclosing(chunks):
            async for chunk in chunks:
                last = chunk if chunk.get("usage") else last
        usage, extension = last["usage"], last["hearthnet"]
        return _Answer(
            usage["completion_tokens"], usage["prompt_tokens"], extension["timings"],
            extension["route"],
        )  # fmt: skip

    async def together(self, count: int, tokens: int) -> float:
        """Tokens a second of so many answers that begin at once, their short prompts included."""
        import asyncio
        import time

        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.answer(_SHORT, tokens)) for _ in range(count)]
        seconds = time.perf_counter() - begun
        return sum(task.result().tokens for task in tasks) / seconds


async def _first(client: Client) -> str:
    """The first model that can be asked, at once or after a wait. Raises NoRoute."""
    models = await client.models()
    names: list[str] = [row["id"] for row in models if row["runnable"]] + loading(models)
    if not names:
        raise NoRoute("No model can answer now.", fix="See `hearthnet models` for what keeps each.")
    return names[0]


def _show(told: dict[str, Any]) -> None:
    from tui.picture import bottleneck

    speeds = [
        (f"a prompt of {told['prompt_tokens']}", told["prompt_tokens_per_second"]),
        (f"one answer of {told['tokens']}", told["tokens_per_second"]),
        *((f"{count} answers at once", speed) for count, speed in told["together"].items()),
    ]
    say(f"{told['model']}: {route_line(told['route']) or 'here'}")
    print_table(("WHAT", "TOKENS A SECOND"), [(what, f"{speed:.1f}") for what, speed in speeds])
    say(f"first token after the prompt: {told['first_token_ms']:.0f} ms")
    for hop in told["hops"]:
        way = hop["p50_ms"] - hop["compute_p50_ms"]
        say(
            f"  {hop['node']} {hop['layers']}: {hop['p50_ms']:.1f} ms a token,"
            f" {hop['compute_p50_ms']:.1f} of them computing, {way:.1f} on the way"
        )
    timed = {"route": told["hops"], "tokens_per_second": told["tokens_per_second"]}
    slowest = bottleneck(timed, told["node"])
    if slowest is not None:
        say(f"most of the time: {slowest.words}")
