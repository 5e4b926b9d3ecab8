"""`hearthnet run MODEL [PROMPT]`: one answer on stdout, everything else on stderr; or a chat."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli import chat, lens, why
from mesh.cli.answers import Display, Hidden, ReceivedAnswer, display, receive
from mesh.cli.bringing_up import ask_or_bring_up, bring_up
from mesh.cli.conversation import ALTERNATIVES
from mesh.cli.offering import StartDaemon, offer_daemon
from mesh.cli.options import AskedDaemon, Plain, Verbose, asks, path_from_root
from mesh.cli.output import note, print_json
from mesh.errors import BadRequest

if TYPE_CHECKING:
    from mesh.client import Client


_MOST_PIPED = 16 << 20
"""More than any context takes: what never ends would fill the memory."""
_System = Annotated[str | None, typer.Option(help="What the model is told first.")]
_Temperature = Annotated[
    float, typer.Option(help="0 always takes the likeliest token; higher varies more.")
]
_TopP = Annotated[float | None, typer.Option(help="Sample from this much probability.")]
_TopK = Annotated[int | None, typer.Option(help="Sample from this many tokens.")]
_Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
_MaxTokens = Annotated[int | None, typer.Option(help="The longest answer.")]
_IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on to the limit.")]
_Wire = Annotated[str | None, typer.Option(help="fp16, bf16 or fp32 between the nodes.")]
_Why = Annotated[bool, typer.Option("--why", help="What else each token could have been.")]
_Lens = Annotated[bool, typer.Option(lens.FLAG, help="What each layer would have said last.")]
_Raw = Annotated[bool, typer.Option("--raw", help="Continue the text, without chat template.")]


@asks
def run(  # noqa: PLR0913 - flags
    daemon: AskedDaemon,
    model: Annotated[str, typer.Argument(callback=path_from_root, help="See `hearthnet models`.")],
    prompt: Annotated[str | None, typer.Argument(help="What to ask.")] = None,
    *,
    system: _System = None,
    temperature: _Temperature = 0.0,
    top_p: _TopP = None,
    top_k: _TopK = None,
    seed: _Seed = None,
    max_tokens: _MaxTokens = None,
    ignore_eos: _IgnoreEos = False,
    wire_dtype: _Wire = None,
    raw: _Raw = False,
    show_why: _Why = False,
    show_lens: _Lens = False,
    plain: Plain = False,
    verbose: Verbose = False,
    yes: StartDaemon = False,
) -> None:
    """Ask once, or chat where there is no prompt. A model that is not up is deployed first.

    Piped input is added to the prompt; the answer is the only thing on stdout."""
    options: dict[str, Any] = {
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed,
        "max_tokens": max_tokens, "ignore_eos": ignore_eos, "wire_dtype": wire_dtype,
    }  # fmt: skip
    if prompt is None and sys.stdin.isatty():
        if raw or show_why or show_lens:
            raise _no_prompt_to_look_at()
        shown_so = chat.ShownAnswers(markdown=not plain, verbose=verbose, as_json=daemon.json)
        _converse(daemon, model, system or "", options, shown_so, yes=yes)
        return
    text = _whole_prompt(prompt)
    offer_daemon(daemon, yes=yes)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    if show_why or show_lens:
        options |= _alternatives(raw=raw)
    answer, seen = ReceivedAnswer(), dict[str, Any]()
    shown = Hidden() if daemon.json else display(markdown=not (plain or raw))
    question = _Question(text, messages, options, is_raw=raw, with_lens=show_lens)
    daemon.ask(
        lambda client: ask_or_bring_up(
            client, model, partial(question.ask, client, answer, shown, seen), lambda: answer.text
        )
    )
    if show_why:
        seen["tokens"] = answer.tokens
    _conclude(answer, seen, as_json=daemon.json, verbose=verbose)


@dataclass(frozen=True)
class _Question:
    """What is asked, of whichever model."""

    text: str
    messages: list[dict[str, str]]
    options: dict[str, Any]
    is_raw: bool
    with_lens: bool

    async def ask(
        self,
        client: Client,
        answer: ReceivedAnswer,
        shown: Display,
        seen: dict[str, Any],
        model: str,
    ) -> None:
        """Receive the answer of the model, and what its layers would have said."""
        if self.is_raw:
            chunks = client.complete(model, self.text, **self.options)
        else:
            chunks = client.chat(model, self.messages, **self.options)
        await receive(chunks, answer, shown)
        if self.with_lens and answer.tokens:
            seen["lens"] = await lens.look(client, model, self.messages, answer.tokens)


def _converse(
    daemon: AskedDaemon,
    model: str,
    system: str,
    options: dict[str, Any],
    shown: chat.ShownAnswers,
    *,
    yes: bool,
) -> None:
    from mesh.cli.conversation import Conversation

    offer_daemon(daemon, yes=yes)
    name = daemon.ask(lambda client: bring_up(client, model))
    wanted = {key: given for key, given in options.items() if given is not None}
    chat.converse(daemon, name, Conversation("", system, wanted), shown)


def _alternatives(*, raw: bool) -> dict[str, Any]:
    if raw:
        raise BadRequest(
            f"--why and {lens.FLAG} look at an answer in a chat.", fix="Leave --raw out."
        )
    return {"logprobs": True, "top_logprobs": ALTERNATIVES}


def _no_prompt_to_look_at() -> BadRequest:
    return BadRequest(
        f"--raw, --why and {lens.FLAG} are for one answer.",
        fix=f"Write the prompt after the model; in a chat, ask /why or /why {lens.FLAG}.",
    )


def _conclude(
    answer: ReceivedAnswer, seen: dict[str, Any], *, as_json: bool, verbose: bool
) -> None:
    """What is printed once the answer is complete."""
    if as_json:
        print_json(answer.to_dict() | seen)
    else:
        _explain(seen)
    if verbose or not as_json:
        note(answer.timings() if verbose else answer.summary)


def _explain(seen: dict[str, Any]) -> None:
    if "tokens" in seen:
        note(why.table(seen["tokens"], everything=True))
    if "lens" in seen:
        note(lens.table(seen["lens"]))


def _whole_prompt(prompt: str | None) -> str:
    piped = "" if sys.stdin.isatty() else sys.stdin.read(_MOST_PIPED + 1).rstrip("\n")
    if len(piped) > _MOST_PIPED:
        raise BadRequest(f"More than {_MOST_PIPED} characters are piped in.", fix="Send less.")
    whole = "\n\n".join(part for part in (prompt, piped) if part)
    if not whole:
        raise BadRequest(
            "There is no prompt.", fix='Write it after the model, or pipe it in: run MODEL "..."'
        )
    return whole
