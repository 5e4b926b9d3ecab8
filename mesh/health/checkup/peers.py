"""What the tries of connections and the peers' own words say: who is there, and who reaches whom.

Reads what the API answers; asks nobody. A link between two daemons is opened by one of them, so it
may be up though one machine takes no connections; what is tried in both directions tells which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mesh.discovery.knocking import REFUSED, TIMED_OUT
from mesh.events.intake import SKEW_S
from mesh.health.checkup.findings import Finding, fine, note, wrong
from mesh.health.checkup.network import NAME_ONE, let_in
from mesh.health.skew import version_of
from mesh.units import lasting

_APART_S = 5.0
"""Two machines that have their time from the network are not so far apart."""
_WORDS = {"nodes": "daemon", "layers": "layers", "weights": "weights"}
Row = Mapping[str, Any]


def peers(picture: Row, tried: Row, members: Sequence[Row]) -> Iterator[Finding]:
    """Of what ``/mesh/v1/status`` and ``/mesh/v1/reach`` answer; `members` are those of
    ``/mesh/v1/hearth``."""
    node, known = picture["node"], {row["id"]: row for row in picture["peers"] if row["id"]}
    for row in tried["peers"]:
        yield from _peer(row, known.get(row["id"], {}), node)
    yield from _strangers(picture["peers"])
    yield from _clocks(tried["peers"])
    yield from _absent(members, {row["id"] for row in tried["peers"]})


def _peer(row: Row, seen: Row, node: Row) -> Iterator[Finding]:
    who = row["name"]
    if row["state"] != "up":
        yield _unlinked(row, seen)
        return
    shut = [port for port in row["out"] if port["why"]]
    if shut:
        yield wrong(
            "peers", f"This machine is linked with {who} and does not reach {_ports(shut)} there.",
            f"A firewall on {who} lets some ports in only: each layer has another. Let all TCP"
            " ports in from this network there.",
        )  # fmt: skip
    back = row["back"]
    if back is None:
        why = row["back_unknown"] or f"{who} is gone."
        yield note("peers", f"Whether {who} reaches this machine is not known: {why}")
    elif shut_here := [port for port in back if port["why"]]:
        yield _one_way(who, shut_here, node)
    if not shut and back is not None and not any(port["why"] for port in back):
        yield fine("peers", f"{who}: {_versioned(seen)}{_way(seen)}, both reach each other")
    if seen.get("skew"):
        yield _skewed(seen, node)


def _one_way(who: str, shut: Sequence[Row], node: Row) -> Finding:
    """A machine lets packets out and not in."""
    if all(port["why"] == REFUSED for port in shut):
        return wrong(
            "peers", f"{who} is told that nothing listens at {_ports(shut)} of this machine.",
            "A firewall here may refuse what arrives, or the process has just ended: see"
            " `hearthnet status`.",
        )  # fmt: skip
    networks = [each["network"] for each in node.get("interfaces", ()) if each["used"]]
    return wrong(
        "peers",
        f"This machine reaches {who}, and {who} does not reach {_ports(shut)} here: a firewall on"
        " this machine lets connections out and not in.",
        let_in(networks[0] if networks else "your network"),
    )


def _unlinked(row: Row, seen: Row) -> Finding:
    who, where = row["name"], row["address"]
    why = next((port["why"] for port in row["out"]), seen.get("reason"))
    if why == TIMED_OUT:
        return wrong(
            "peers", f"Nothing comes back from {who} at {where}: it is off, or a firewall there"
            " drops what arrives.",
            f"See whether it runs; on it, let all TCP ports in from this network, or {NAME_ONE}.",
        )  # fmt: skip
    if why == REFUSED:
        return wrong(
            "peers", f"{who} is there, and nothing listens at {where}.",
            f"Start hearthnet on {who}, or name the port that its `hearthnet status` says.",
        )  # fmt: skip
    if why is None:
        return wrong(
            "peers", f"{who} takes calls at {where}, and there is no link: {row['state']}"
            f"{': ' + seen['reason'] if seen.get('reason') else ''}.",
            "It is tried again; `hearthnet peers` says what comes of it.",
        )  # fmt: skip
    return wrong("peers", f"{who} at {where} cannot be called: {why}.", f"See how {who} is.")


def _skewed(seen: Row, node: Row) -> Finding:
    own, theirs = version_of(node["software"]), version_of(seen["software"])
    apart = "and here it is" if seen["skew"] == "another" else f"{seen['skew']} than the one here,"
    return note(
        "versions", f"{seen['name']} runs hearthnet {theirs}, {apart} {own}.",
        "Two that differ work together as far as the older one knows how; install one version.",
    )  # fmt: skip


def _strangers(rows: Sequence[Row]) -> Iterator[Finding]:
    others = [f"{r['name']} at {r['address']}" for r in rows if r["state"] == "other hearth"]
    if others:
        where = "are in other hearths" if others[1:] else "is in another hearth"
        yield note("peers", f"{', '.join(others)} {where}.")
    for row in rows:
        if row["state"] == "other version":
            yield wrong(
                "peers", f"{row['name']} at {row['address']} cannot be talked to: {row['reason']}",
                "Install the same version on both.",
            )  # fmt: skip
        elif row["state"] == "not a peer":
            yield wrong(
                "peers",
                f"{row['name']} at {row['address']} is not let in: {row['reason'].rstrip('.')}.",
                "`hearthnet members` on both says who is in; `hearthnet invite` lets one in.",
            )  # fmt: skip


def _clocks(rows: Sequence[Row]) -> Iterator[Finding]:
    told = {row["name"]: row["ahead_s"] for row in rows if row["ahead_s"] is not None}
    apart = {name: ahead for name, ahead in told.items() if abs(ahead) >= _APART_S}
    if told and not apart:
        yield fine("clocks", f"within {_APART_S:.0f} s of {', '.join(told)}")
    if len(apart) > 1 and len(apart) == len(told):
        ahead = sorted(told.values())[len(told) // 2]
        said = f"This machine's clock is {_apart(-ahead)} those of {', '.join(told)}."
        yield _clock(said, max(map(abs, told.values())))
        return
    for name, ahead in apart.items():
        yield _clock(f"The clock of {name} is {_apart(ahead)} this machine's.", abs(ahead))


def _clock(said: str, apart_s: float) -> Finding:
    fix = "Set the one that is wrong; `timedatectl set-ntp true` has Linux keep it right."
    if apart_s < SKEW_S:
        return note("clocks", said, fix)
    return wrong("clocks", said, f"Times that are shown are wrong, and the log's. {fix}")


def _apart(ahead_s: float) -> str:
    """``12 s ahead of``, ``3 min behind``."""
    return f"{lasting(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'}"


def _absent(members: Sequence[Row], seen: set[str | None]) -> Iterator[Finding]:
    away = [row["name"] for row in members if not row["self"] and row["node_id"] not in seen]
    if away:
        yield note(
            "peers",
            f"Nothing is seen of {', '.join(away)}, {'who are' if len(away) > 1 else 'who is'} in"
            " the hearth: off, or on another network.",
            f"If it is on: `hearthnet doctor` there, or {NAME_ONE}.",
        )
    elif not seen:
        yield note("peers", "No other machine is in the hearth.", "`hearthnet invite` lets one in.")


def _versioned(seen: Row) -> str:
    version = version_of(seen.get("software"))
    return f"hearthnet {version}" if version else "version not known"


def _way(seen: Row) -> str:
    return f", {seen['rtt_ms']:.1f} ms away" if seen.get("rtt_ms") is not None else ""


def _ports(ports: Sequence[Row]) -> str:
    """``ports 43107 (layers: timed out) and 8421 (daemon: refused)``."""
    each = [f"{p['port']} ({_WORDS.get(p['what'], p['what'])}: {p['why']})" for p in ports]
    return f"port{'s' * (len(each) > 1)} {' and '.join(each)}"
