"""What a running daemon's own word says of it, its processes and what it has to do.

Reads what the API answers; asks nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from mesh.health.checkup.findings import Finding, fine, note, wrong
from mesh.health.skew import skew, version_of
from mesh.units import lasting

_RECENT = timedelta(hours=1)
_EXPIRES_SOON = timedelta(days=14)
"""What renews certificates by itself does so well before."""
_SEEN_NOW = ("no_multicast", "clock_skew")
"""Warnings of what an examination looks at itself: one that has passed is not wrong any more."""
LOADING, LAYERS = "loading", "layers"
"""Codes of ``/readyz``: what is missing only for a while, and layers that nobody serves."""


def daemon(
    picture: Mapping[str, Any],
    missing: Iterable[tuple[str, str]],
    own: str,
    now: datetime,
    out_of_order: Callable[[Mapping[str, Any]], str | None],
) -> Iterator[Finding]:
    """Of what ``/mesh/v1/status`` and ``/readyz`` answer; `own` is the command's
    ``hearthnet/VERSION``, and `out_of_order` says what is wrong with a process, None where nothing
    is."""
    yield from _version(picture["node"], own)
    yield from _standing(picture["node"])
    yield from _certificate(picture["node"].get("api_tls"), now)
    yield from _processes(picture["processes"], out_of_order)
    yield from _readiness(list(missing), picture["models"])
    yield from _warnings(picture["warnings"], now)


def _version(node: Mapping[str, Any], own: str) -> Iterator[Finding]:
    running, here = version_of(node["software"]), version_of(own)
    if (apart := skew(own, node["software"])) is not None:
        yield wrong(
            "daemon",
            f"The daemon runs hearthnet {running}, which is {apart} than this command's {here}."
            if apart != "another"
            else f"The daemon runs hearthnet {running}, and this command is {here}.",
            "`hearthnet restart`: it is to run what is installed.",
        )
        return
    since = datetime.fromisoformat(node["started_at"])
    yield fine("daemon", f"{node['name']} runs hearthnet {running} since {since:%Y-%m-%d %H:%M}")


def _standing(node: Mapping[str, Any]) -> Iterator[Finding]:
    if not node["enabled"]:
        yield note("daemon", "The mesh is off: it answers from this machine alone.")
    if node["paused"]:
        yield note("daemon", "It is paused: others get nothing from it.", "`hearthnet resume`")


def _certificate(tls: Mapping[str, Any] | None, now: datetime) -> Iterator[Finding]:
    if tls is None or "expires" not in tls:  # that of an older daemon
        return
    expires = datetime.fromisoformat(tls["expires"])
    if expires - now < _EXPIRES_SOON:
        does = "expired" if expires < now else "expires"
        yield wrong(
            "certificate",
            f"The API's certificate {tls['certificate']} {does} on {expires:%Y-%m-%d}.",
            "Renew it: what replaces its file is taken up within a minute or two.",
        )


def _processes(
    rows: Iterable[Mapping[str, Any]], out_of_order: Callable[[Mapping[str, Any]], str | None]
) -> Iterator[Finding]:
    well = []
    for row in rows:
        if (trouble := out_of_order(row)) is None:
            well.append(str(row["name"]))
            continue
        yield wrong(
            "processes", f"{trouble.removesuffix('.')}.",
            "It is started once that is otherwise."
            if row.get("held")
            else "It is started again by itself; if that does not last, `hearthnet logs` says why.",
        )  # fmt: skip
    if well:
        yield fine("processes", f"{', '.join(well)}: in order")


def _readiness(
    missing: list[tuple[str, str]], models: Iterable[Mapping[str, Any]]
) -> Iterator[Finding]:
    for code, what in missing:
        said = f"{what.removesuffix('.')}."
        if code == LOADING:
            yield note("ready", said, "Wait for it: `hearthnet status --watch`.")
        elif code == LAYERS:
            yield wrong(
                "ready", said,
                "Start the machine that has them, or have them loaded: `hearthnet deploy MODEL`.",
            )  # fmt: skip
        else:
            yield wrong("ready", said, "`hearthnet status --all` and `hearthnet logs` say more.")
    if not missing:
        names = [str(model["id"]) for model in models if model["runnable"]]
        said = f"{', '.join(names)} can be asked" if names else "all that is to be loaded is"
        yield fine("ready", said)


def _warnings(rows: Iterable[Mapping[str, Any]], now: datetime) -> Iterator[Finding]:
    for row in rows:
        at = row.get("at")
        age = None if at is None else now - datetime.fromisoformat(at)
        when = "" if age is None else f" ({_ago(age)})"
        said = f"{row['message']}{when}"
        if row.get("code") in _SEEN_NOW or (age is not None and age > _RECENT):
            yield note("warnings", said, row["fix"])
        else:
            yield wrong("warnings", said, row["fix"])


def _ago(age: timedelta) -> str:
    return f"{lasting(max(0.0, age.total_seconds()))} ago"
