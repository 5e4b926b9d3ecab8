"""Founding a hearth, and taking one over with the code that its founding printed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesh.accounts.ledger import ResourceLedger
from mesh.clock import Clock
from mesh.events.authoring import LogSettings
from mesh.events.intake import Report
from mesh.events.log import EventLog
from mesh.events.rules import Verify
from mesh.hearth.record import HearthRecord
from mesh.identity import decisions, membership
from mesh.identity.certificates import make_certificate
from mesh.identity.decisions import Founded, Recovered
from mesh.identity.keys import NodeKey
from mesh.identity.recovery import new_code, recovery_key

OnReport = Callable[[Report], None]


@dataclass(frozen=True, slots=True)
class Founding:
    """A hearth that was founded just now. `code` is to be shown once, and kept by people only."""

    record: HearthRecord
    code: str = field(repr=False)


async def found(
    key: NodeKey, node_name: str, logs: Path, clock: Clock, on_report: OnReport
) -> Founding:
    """Found a hearth with this node as its first anchor; the caller keeps the record.

    A crash before it is kept leaves a log that nobody opens again.
    """
    code = new_code()
    name = f"{node_name}'s hearth"[: decisions.MAX_NAME]
    founded_ms = max(0, int(clock.now().timestamp() * 1000))
    founded = Founded(
        name, secrets.token_bytes(decisions.NONCE_BYTES), make_certificate(key), node_name,
        recovery_key(code).public_key().public_bytes_raw(), founded_ms,
    )  # fmt: skip
    hearth_id = decisions.hearth_id(founded)
    kind, payload = decisions.encode(founded)
    log = await open_log(key, hearth_id, logs, clock, on_report)
    try:
        await log.decide(kind, lambda parents, wall_ms: payload, wall_ms=founded_ms)
    finally:
        await log.close()
    return Founding(HearthRecord(hearth_id, name, node_name=node_name), code)


async def recover(log: EventLog, key: NodeKey, hearth_id: str, node_name: str, code: str) -> None:
    """Make this node the only anchor. Raises BadValue for text that is no code, LogRefused for the
    code of another hearth, and what `EventLog.decide` raises."""
    prover = recovery_key(code)

    def say(parents: Sequence[bytes], wall_ms: int) -> dict[str, Any]:
        bare = Recovered(make_certificate(key), node_name, b"")
        statement = decisions.recovery_statement(hearth_id, bare, parents, wall_ms)
        proven = Recovered(bare.certificate, node_name, prover.sign(statement))
        return decisions.encode(proven)[1]

    await log.decide(decisions.RECOVERED, say, after_everything=True)


async def open_log(
    key: NodeKey,
    hearth_id: str,
    logs: Path,
    clock: Clock,
    on_report: OnReport,
    accounts: ResourceLedger | None = None,
) -> EventLog:
    """The log of one hearth, in a file of its own below `logs`."""
    verify: Verify = membership.verify
    return await EventLog.open(
        LogSettings(logs / f"{hearth_id}.db", hearth_id, key.node_id),
        rules=membership.HearthRules(hearth_id),
        verify=verify,
        sign=key.sign,
        clock=clock,
        on_report=on_report,
        accounts=accounts,
    )
