"""A session on a hop, over a link of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

from mesh.pipeline.claims import Claims
from mesh.pipeline.hop import HopSession, Patience
from mesh.pipeline.links import HopLink
from mesh.pipeline.terms import SessionTerms
from mesh.routing.cover import key_of
from mesh.types import (
    Endpoint,
    LayerRange,
    ModelId,
    NodeId,
    RouteHop,
    ShardDescriptor,
    WireDtype,
    shard_id,
)
from mesh.wire.link import Link

HOST, MODEL = NodeId("far"), ModelId("toy")
L = TypeVar("L", bound=Link)


def hop_over(link_to: Callable[[HopLink], L]) -> tuple[RouteHop, HopLink, L]:
    """A hop, and the link to it that was made for it."""
    layers = LayerRange(0, 2)
    descriptor = ShardDescriptor(
        shard_id(MODEL, layers), MODEL, "0" * 64, layers, 2, 0, 1, HOST, HOST,
        Endpoint("wss://127.0.0.1:1"), "fp32", "", datetime.now(UTC),
    )  # fmt: skip
    hop = HopLink(descriptor.endpoint, HOST)
    link = link_to(hop)
    hop.attach(link)
    return RouteHop(descriptor, layers), hop, link


def session_over(link_to: Callable[[HopLink], L]) -> tuple[HopSession, L]:
    """One that is not open yet, and the link that was made for it."""
    route_hop, hop, link = hop_over(link_to)
    claim = Claims().claim(key_of(route_hop.shard))
    terms = SessionTerms(MODEL, "0" * 64, 1024, WireDtype.FP16)
    return HopSession(route_hop, hop, claim, terms, Patience(5.0, 5.0)), link
