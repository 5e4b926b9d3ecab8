"""How the version that another node says it runs stands to one's own. Knows no links."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\d+")


def skew(own: str, other: str | None) -> str | None:
    """Of ``hearthnet/VERSION`` twice: whether the other one is ``older``, ``newer``, or of
    ``another`` version that cannot be ordered; None where they are the same, or nothing is known.
    """
    if other is None or other == own:
        return None
    mine, theirs = _release(own), _release(other)
    if mine == theirs or not (mine and theirs):
        return "another"
    return "older" if theirs < mine else "newer"


def version_of(software: str | None) -> str | None:
    """``0.1.0`` of ``hearthnet/0.1.0``; what is of another form as it is."""
    return None if software is None else software.removeprefix("hearthnet/")


def _release(software: str) -> tuple[int, ...]:
    """The numbers of ``hearthnet/0.1.0rc1`` up to what is no number between dots; () of a text
    without one, and of other programs."""
    name, _, version = software.rpartition("/")
    if name != "hearthnet":
        return ()
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, _NUMBER.findall(release[0]))) if release else ()
