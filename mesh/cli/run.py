"""`hearthnet run MODEL PROMPT`: one answer on stdout, everything else on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.answers import Answer, receive
from mesh.cli.options import ApiPort, Host, Json, StateDir, ask, locate_daemon
from mesh.cli.output import note, print_json
from mesh.errors import BadRequest

if TYPE_CHECKING:
    from mesh.client import Client


def run(  # noqa: PLR0913 - flags
    model: Annotated[str, typer.Argument(help="See `hearthnet models`.")],
    prompt: Annotated[str | None, typer.Argument(help="What to ask.")] = None,
    *,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    temperature: Annotated[
        float, typer.Option(help="0 always takes the likeliest token; higher varies more.")
    ] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Sample from this much probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from this many tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="The longest answer.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to the limit.")] = False,
    wire_dtype: Annotated[
        str | None, typer.Option(help="fp16, bf16 or fp32 between the nodes.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text, without the chat template.")
    ] = False,
    state_dir: StateDir = None,
    host: Host = None,
    api_port: ApiPort = None,
    as_json: Json = False,
) -> None:
    """Ask once. Piped input is added to the prompt; the answer is the only thing on stdout."""
    text = _whole_prompt(prompt)
    options: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "max_tokens": max_tokens,
        "ignore_eos": ignore_eos,
        "wire_dtype": wire_dtype,
    }
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    answer = Answer()

    async def question(client: Client) -> None:
        chunks = (
            client.complete(model, text, **options)
            if raw
            else client.chat(model, messages, **options)
        )
        await receive(chunks, answer, show=not as_json)

    ask(locate_daemon(state_dir, host, api_port), question)
    if as_json:
        print_json(
            {
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "usage": answer.usage,
                "hearthnet": answer.extension,
            }
        )
    else:
        note(answer.summary)


def _whole_prompt(prompt: str | None) -> str:
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().rstrip("\n")
    whole = "\n\n".join(part for part in (prompt, piped) if part)
    if not whole:
        raise BadRequest(
            "There is no prompt.", fix='Write it after the model, or pipe it in: run MODEL "..."'
        )
    return whole
