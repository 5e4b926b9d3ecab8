"""From what multicast DNS shows to whom the dialer tries. Believes nothing; dials only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from mesh.discovery.announcement import Announcement
from mesh.discovery.dialing import Dialer
from mesh.discovery.sightings import PeerState, PeerView, Sightings


def follow(
    announcements: Sequence[Announcement], hearth: str, dialer: Dialer, sightings: Sightings
) -> None:
    """Dial the announced nodes of this hearth, show those of others, give up who is gone.

    Several announcements of one node take turns, the last one first: each may be forged, and none
    displaces another's addresses.
    """
    wanted: dict[str, list[Announcement]] = {}
    strangers: dict[str, Announcement] = {}
    for announcement in reversed(announcements):
        if announcement.hearth == hearth:
            wanted.setdefault(f"mdns {announcement.node_id}", []).append(announcement)
        else:
            # Once each: what a run that was killed announced stays until its time is over.
            strangers.setdefault(f"stranger {announcement.node_id}", announcement)
    for key, of_node in wanted.items():
        turns = zip_longest(*(announcement.endpoints() for announcement in of_node))
        endpoints = dict.fromkeys(e for turn in turns for e in turn if e is not None)
        dialer.add(key, tuple(endpoints), of_node[0].node_id)
    for target in dialer.targets():
        if target.key.startswith("mdns ") and target.key not in wanted:
            dialer.discard(target.key)
    sightings.keep_only({target.key for target in dialer.targets()} | strangers.keys())
    for key, stranger in strangers.items():
        sightings.show(key, _other_hearth(stranger))


def _other_hearth(stranger: Announcement) -> PeerView:
    return PeerView(
        stranger.node_id, stranger.name, stranger.endpoints()[0], PeerState.OTHER_HEARTH,
        "it belongs to another hearth", None,
    )  # fmt: skip
