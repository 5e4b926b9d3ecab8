"""`hearthnet` without a verb: what is, whether it answers, and what to do next, in three lines."""

from __future__ import annotations

from typing import Any

from mesh.cli.output import few

NO_DAEMON = """\
No hearthnet daemon runs here.
  hearthnet up --detach       start a node that holds the built-in model
  hearthnet chat              talk to it"""


def three_lines(picture: dict[str, Any]) -> str:
    """Of what `GET /mesh/v1/status` returned: who is here, the first thing amiss, the next step."""
    now, following = _standing(picture)
    return f"{_who(picture)}\n{now}\nnext: {following}"


def _who(picture: dict[str, Any]) -> str:
    node = picture["node"]
    up = [peer["name"] for peer in picture["peers"] if peer["state"] == "up"]
    together = f" with {few(up)}" if up else ", alone"
    hearth = node.get("hearth")
    where = f" in {hearth['name']}" if hearth else ""
    held = ", ".join(f"{shard['model_id']} {shard['layers']}" for shard in picture["shards"])
    return f"{node['name']} is up{where}{together}; it holds {held or 'no layers'}."


def _standing(picture: dict[str, Any]) -> tuple[str, str]:
    """What there is to say, worst first, and the command that follows from it."""
    from tui.words import out_of_order

    for process in picture["processes"]:
        if trouble := out_of_order(process):
            return f"{trouble.removesuffix('.')}.", _DOCTOR
    if picture["node"]["paused"]:
        return "It is paused: others get nothing from it.", "hearthnet resume"
    ready = [model for model in picture["models"] if model["runnable"]]
    if ready:
        return _answering(picture, ready)
    return _silent(picture["models"])


_DOCTOR = "hearthnet doctor"


def _answering(picture: dict[str, Any], ready: list[dict[str, Any]]) -> tuple[str, str]:
    names = ", ".join(model["id"] for model in ready)
    verb = "answers" if len(ready) == 1 else "answer"
    others = [model for model in picture["models"] if model["local"] and not model["runnable"]]
    but = f"; {others[0]['id']} does not: {others[0]['reason']}" if others else ""
    if not picture["node"]["enabled"]:
        return f"{names} {verb} here{but}. The mesh is off.", "hearthnet chat"
    if not picture["peers"]:
        invite = "`hearthnet invite` lets a second machine in"
        return f"{names} {verb} from this machine alone{but}.", f"hearthnet chat; {invite}"
    return f"{names} {verb}{but}.", "hearthnet chat"


def _silent(models: list[dict[str, Any]]) -> tuple[str, str]:
    """Nothing answers: what is missing of the model that is nearest to it."""
    if not models:
        return "No model is here, nor at anyone it sees.", "hearthnet run MODEL"
    model = min(models, key=lambda model: (not model["local"], len(model["missing"])))
    name, missing = model["id"], ", ".join(model["missing"])
    if not model["local"]:
        held = f"{name} is held by {', '.join(model['nodes'])}, and this machine has no files of it"
        return f"{held}.", f"hearthnet down, then hearthnet up --model PATH={name} --layers none"
    if model["reason"] == f"missing layers {missing}":
        said = f"Nobody that it sees holds layers {missing} of {name}."
        return said, f"on another machine, hearthnet up --layers {model['missing'][0]}"
    if model["reason"] == "loading":
        return f"{name} is loading.", "hearthnet chat; it waits"
    return f"{name} does not answer: {model['reason'].removesuffix('.')}.", _DOCTOR
