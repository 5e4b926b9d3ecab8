"""The privacy report: what each machine sees of this node's prompts and answers, as plain data.

Reads routes; decides none. What a host can read out of the activations it gets was measured: see
docs/explanation/privacy.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mesh import codec
from mesh.types import LayerRange, ModelId

_PAGE = "docs/explanation/privacy.md"


class Sight(StrEnum):
    """The degree to which a host can tell the tokens that went by, prompt and answer alike."""

    OWN = "this machine"
    EXACT = "exact"
    """It gets what goes into layer 0, one known row per token, or what comes out of the last layer,
    which the public output head turns into the next token."""
    BLURRED = "blurred"
    """As exact, but for noise on what goes into layer 0."""
    RECOVERABLE = "recoverable"
    """It gets activations of layers in between: most of the text can be computed back."""


@dataclass(frozen=True, slots=True)
class Exposure:
    """One machine's part of a route: activations into and out of its layers, never text.

    `is_checkable`: another machine holds the same layers, by which its answers can be checked.
    """

    node: str
    layers: LayerRange
    sight: Sight
    is_checkable: bool

    def words(self) -> str:
        """One line for people."""
        return f"layers {self.layers} on {self.node}: {_WORDS[self.sight]}"


_WORDS = {
    Sight.OWN: "this machine; nobody else sees these.",
    Sight.EXACT: "can tell every token of prompt and answer.",
    Sight.BLURRED: "can tell most tokens of prompt and answer, through the noise.",
    Sight.RECOVERABLE: "can compute back most of prompt and answer, with some effort.",
}


@dataclass(frozen=True, slots=True)
class ReportedRoute:
    """The hops of a running request, or of the next one; none and a reason when there is none.

    `is_thin`: the first and the last of them run embedding and head for this machine.
    """

    model: ModelId
    request: str | None
    hops: tuple[Exposure, ...]
    missing: str = ""
    is_thin: bool = False


@dataclass(frozen=True, slots=True)
class Precautions:
    """The settings of this node that limit exposure."""

    keep_first: int
    keep_last: int
    activation_noise: float
    spot_check_probability: float
    spot_check_home_mb: int = 0


def report(routes: Sequence[ReportedRoute], precautions: Precautions) -> dict[str, Any]:
    """``{"routes": [{"model", "request", "hops": [{"node", "layers", "sight", "is_checkable"}],
    "missing"}], "precautions": {...}, "words": [lines]}``; `request` is None for the route
    of the next one."""
    said = [codec.plain(route) for route in routes]
    for row in said:
        del row["is_thin"]
    return {
        "routes": said,
        "precautions": codec.plain(precautions),
        "words": list(_lines(routes, precautions)),
    }


def expose(
    node: str,
    layers: LayerRange,
    total_layers: int,
    *,
    is_own: bool,
    is_checkable: bool,
    noisy: bool,
) -> Exposure:
    """What the machine of these layers can see; this one needs no check."""
    if is_own:
        sight = Sight.OWN
    elif layers.stop == total_layers:
        sight = Sight.EXACT
    elif layers.start == 0:
        sight = Sight.BLURRED if noisy else Sight.EXACT
    else:
        sight = Sight.RECOVERABLE
    return Exposure(node, layers, sight, is_own or is_checkable)


def _lines(routes: Sequence[ReportedRoute], precautions: Precautions) -> Iterator[str]:
    for route in routes:
        which = f"request {route.request}, running" if route.request else "the next request"
        yield f"{route.model}, {which}:"
        if route.missing:
            yield f"  no route: {route.missing}"
        for exposure in route.hops:
            yield f"  {exposure.words()}"
            if not exposure.is_checkable:
                yield f"    {_unchecked(exposure, precautions)}"
        if route.is_thin and route.hops:
            yield (
                "  this machine has no embedding and no head of it: the first is sent the prompt's"
                " tokens, the last says the answer's (research.distributed_inference.thin)."
            )
    if not any(route.is_thin for route in routes):
        yield "No other machine is sent text: prompt, answer and chat stay here as text."
    yield "Between machines all is encrypted; who listens sees who talks, when, and how much."
    yield "Members below trusted, and everybody outside the hearth, are sent nothing of it."
    if any(hop.sight is not Sight.OWN for route in routes for hop in route.hops):
        yield "If a machine fails, another trusted one gets its part, and sees what it saw."
        if precautions.spot_check_probability > 0:
            share = f"{100 * precautions.spot_check_probability:g} %"
            yield (
                f"For {share} of the steps, and for machines that are new, another one that holds"
                " the same layers repeats the work as a check, and sees as much."
            )
    yield from _precaution_lines(precautions)


def _unchecked(exposure: Exposure, precautions: Precautions) -> str:
    """A machine whose answers no other one can compute again."""
    alone = f"nobody but {exposure.node} holds all of these:"
    if precautions.spot_check_home_mb and precautions.spot_check_probability:
        most = f"{precautions.spot_check_home_mb} MiB, spot_check_home_mb"
        return f"{alone} what it answers is checked only if a copy fits here ({most})."
    return f"{alone} nobody can check what it answers."


def _precaution_lines(precautions: Precautions) -> Iterator[str]:
    kept = [
        f"the {which} {count}"
        for which, count in (("first", precautions.keep_first), ("last", precautions.keep_last))
        if count
    ]
    if kept:
        yield f"Layers that always run here: {' and '.join(kept)}."
    else:
        yield "routing.keep_first and keep_last keep a model's first and last layers here."
    if precautions.activation_noise > 0:
        yield f"Noise of {precautions.activation_noise:g} of the signal is added before layer 0."
    yield f"How much each of this helps is measured in {_PAGE}."
