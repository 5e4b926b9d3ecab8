"""Which of several links two nodes keep, whatever the order in which each sees them."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mesh.discovery.greeting import PeerHello
from mesh.discovery.links import Admitted, ControlLink, LinkTable
from mesh.errors import MeshError
from mesh.types import NodeId
from mesh.wire.messages import Advertise, Hello

SMALL, LARGE = NodeId("hn1" + "a" * 52), NodeId("hn1" + "b" * 52)


class End:
    """One end of a link: closing it closes the other end."""

    def __init__(self) -> None:
        self.is_closed = False
        self.rtt_ms = None
        self.silent_s = 0.0
        self.other: End = self

    @property
    def peer(self) -> Hello:
        raise NotImplementedError

    def send(self, message: Any) -> None:
        raise NotImplementedError

    async def drain(self, timeout_s: float) -> None:
        raise NotImplementedError

    def close(self, reason: str = "") -> None:
        self.is_closed = self.other.is_closed = True


def control_link(
    initiator: NodeId, dial: int, own: NodeId, end: End, run: str = "1"
) -> ControlLink:
    def ignore(link: ControlLink, what: Advertise | MeshError | None) -> None:
        return

    initiated = initiator == own
    link = ControlLink(ignore, ignore, initiated=initiated, dial=dial if initiated else 0)
    peer = LARGE if own == SMALL else SMALL
    link.identify(end, PeerHello(peer, "n", "0", "h", run, 0 if initiated else dial, "a:1"))
    return link


@given(
    initiators=st.lists(st.sampled_from([SMALL, LARGE]), min_size=1, max_size=5),
    data=st.data(),
)
def test_both_ends_keep_the_same_open_link(initiators: list[NodeId], data: st.DataObject) -> None:
    asyncio.run(_both_ends_agree(initiators, data))


async def _both_ends_agree(initiators: list[NodeId], data: st.DataObject) -> None:
    tables = {SMALL: LinkTable(SMALL), LARGE: LinkTable(LARGE)}
    # Each link is first seen by who accepts it, then by who dialled: it waits for the hello.
    sightings = data.draw(st.permutations([*range(len(initiators))] * 2))
    ends: dict[int, End] = {}
    for number in sightings:
        initiator = initiators[number]
        if number not in ends:
            own = LARGE if initiator == SMALL else SMALL
            near, far = End(), End()
            near.other, far.other = far, near
            ends[number] = far
        else:
            own, near = initiator, ends[number]
            if near.is_closed:
                continue
        tables[own].admit(control_link(initiator, number, own, near))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    kept = [tables[own].get(peer) for own, peer in ((SMALL, LARGE), (LARGE, SMALL))]
    one, other = kept
    assert one is not None
    assert other is not None
    assert one.dial == other.dial
    assert one.initiated != other.initiated
    assert one.initiated == (SMALL in initiators)


async def test_restarted_peer_replaces_its_old_link_whoever_initiated_it() -> None:
    table = LinkTable(SMALL)
    old, new = End(), End()
    assert table.admit(control_link(SMALL, 9, SMALL, old, run="1")) is Admitted.FIRST
    restarted = control_link(LARGE, 1, SMALL, new, run="2")
    assert table.admit(restarted) is Admitted.REPLACED
    assert old.is_closed
    assert table.get(LARGE) is restarted


async def test_a_peer_that_dials_while_its_old_link_is_silent_has_lost_that() -> None:
    """Its address has changed: the link that would win was lost there, and is not noticed here."""
    table = LinkTable(SMALL)
    old, new = End(), End()
    table.admit(control_link(SMALL, 9, SMALL, old))
    assert table.admit(control_link(LARGE, 1, SMALL, End())) is Admitted.SPARE
    old.silent_s = 8.0
    again = control_link(LARGE, 2, SMALL, new)
    assert table.admit(again) is Admitted.REPLACED
    assert old.is_closed
    assert not new.is_closed
    assert table.get(LARGE) is again


async def test_a_peer_that_starts_again_elsewhere_is_no_second_machine() -> None:
    old = control_link(SMALL, 9, SMALL, end := End(), run="1")
    restarted = PeerHello(LARGE, "n", "0", "h", "2", 0, "b:1")
    assert old.is_rivalled_by(restarted)
    end.silent_s = 8.0
    assert not old.is_rivalled_by(restarted)


async def test_closing_a_superseded_link_does_not_drop_the_peer() -> None:
    table = LinkTable(SMALL)
    spare = control_link(LARGE, 1, SMALL, End())
    kept = control_link(SMALL, 1, SMALL, End())
    table.admit(spare)
    table.admit(kept)
    assert table.drop(spare) is False
    assert table.get(LARGE) is kept
    assert table.drop(kept) is True
    assert table.get(LARGE) is None
