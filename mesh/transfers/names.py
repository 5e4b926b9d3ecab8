"""What is meant by the names of models and nodes, of what this node and its neighbours have."""

from __future__ import annotations

from collections.abc import Sequence

from mesh.errors import BadRequest, ModelNotFound
from mesh.identity.naming import nodes_meant, told_apart
from mesh.transfers.commands import PeerHolding
from mesh.transfers.hub import parse_origin
from mesh.transfers.shelf import Holding
from mesh.types import ModelId, NodeId


def meant(
    model: str, peers: Sequence[PeerHolding], holdings: Sequence[Holding]
) -> tuple[ModelId, str] | None:
    """The name and hash of the checkpoint of which these have something, if any does.

    Raises BadRequest when it could be several.
    """
    said = [*((p.held.model_id, p.held.weights_sha256) for p in peers)]
    said += [(held.model_id, held.weights_sha256) for held in holdings]
    known = {sha256: name for name, sha256 in said if means(model, name, sha256)}
    if len(known) > 1:
        names = " or ".join(f"{name}@{sha256[:12]}" for sha256, name in known.items())
        raise BadRequest(
            f"{model!r} is {len(known)} different checkpoints here.",
            fix=f"Say which: {names}.",
            param="model",
        )
    return next(((name, sha256) for sha256, name in known.items()), None)


def means(text: str, model_id: str, sha256: str) -> bool:
    """Whether a name, perhaps with the beginning of the hash behind ``@``, is this checkpoint's."""
    name, _, digits = text.partition("@")
    return bool(sha256) and name == model_id and sha256.startswith(digits)


def is_of(origin: str, revision: str) -> bool:
    """Whether it came from the hub at this commit."""
    place = parse_origin(origin)
    return place is not None and place[1] == revision


def only_node(who: str, peers: Sequence[PeerHolding]) -> NodeId:
    """The node that is called so. Raises BadRequest for several, ModelNotFound for none."""
    known = [(peer.node, peer.node_name) for peer in peers]
    found = nodes_meant(who, known)
    if len(found) > 1:
        raise BadRequest(
            f"{len(found)} nodes are called {who!r}.",
            fix=f"Name one of: {told_apart(known)}.",
            param="source",
        )
    if not found:
        raise ModelNotFound(
            f"No node that is up and has models is called {who!r}.",
            fix="See `hearthnet peers`.",
            param="source",
        )
    return found[0]


def only(model: str, held: Sequence[Holding]) -> Holding:
    """The one of these. Raises BadRequest where it could be several."""
    if len(held) > 1:
        names = " or ".join(f"{each.model_id}@{each.weights_sha256[:12]}" for each in held)
        raise BadRequest(
            f"{model!r} is {len(held)} different checkpoints here.", fix=f"Say which: {names}."
        )
    return held[0]
