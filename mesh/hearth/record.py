"""The record of a node's hearth, beside the log: enough to find the other members again.

A member that has just joined has no log yet; the members it was told of are those it may fetch the
log from. Once the log names this node, the log alone decides.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mesh import codec
from mesh.codec import Fault
from mesh.errors import KeyUnreadable, SchemaTooOld, UntrustedPeer
from mesh.identity.certificates import check_certificate
from mesh.identity.decisions import HEARTH_PREFIX
from mesh.identity.keys import node_id
from mesh.identity.roster import Member, TrustLevel
from mesh.private_files import mending, read_private, write_private
from mesh.types import NodeId

_MAX_BYTES = 1 << 20
_RESTORE = "Restore the file from a backup, or use a new --state-dir and join again."


@dataclass(frozen=True, slots=True)
class HearthRecord:
    """The hearth a node is in. `members` are those it was told of as it joined; founders: none.
    `node_name` is what this node is called, '' where an earlier version wrote it."""

    hearth_id: str
    name: str
    members: tuple[Member, ...] = ()
    node_name: str = ""

    def level_of(self, node: NodeId) -> TrustLevel:
        """The level at which it was told of the node; ``member`` where it was told of none."""
        levels = (member.level for member in self.members if member.node_id == node)
        return next(levels, TrustLevel.MEMBER)


def read_record(path: Path) -> HearthRecord | None:
    """The record; None when the node is in no hearth. Raises KeyUnreadable, and SchemaTooOld for a
    hearth of which this version cannot read the log."""
    try:
        said = codec.parse_json(read_private(path, _MAX_BYTES))
        record = codec.convert(said, _Record)
        if not record.hearth_id.startswith(HEARTH_PREFIX):
            raise _too_old(path)
        members = tuple(_member(row) for row in record.members)
        return HearthRecord(record.hearth_id, record.name, members, record.node_name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refused(path, error) from error
    except Fault as fault:
        raise _unusable(path, f"it is damaged ({fault.field or 'it'} {fault.why})") from fault
    except (ValueError, UntrustedPeer) as error:
        raise _unusable(path, f"it is damaged ({error!r})") from error


def write_record(path: Path, record: HearthRecord) -> None:
    """Keep the record, on the disk when this returns. Raises KeyUnreadable."""
    fields = {
        "version": 1,
        "hearth_id": record.hearth_id,
        "name": record.name,
        "node_name": record.node_name,
        "members": [asdict(_row(member)) for member in record.members],
    }
    try:
        write_private(path, json.dumps(fields, indent=1).encode())
    except OSError as error:
        raise _refused(path, error) from error


@dataclass(frozen=True, slots=True)
class _Row:
    certificate: str
    name: str
    level: str
    added_by: str


@dataclass(frozen=True, slots=True)
class _Record:
    hearth_id: str
    name: str
    members: tuple[_Row, ...]
    version: int = 1
    node_name: str = ""


def _row(member: Member) -> _Row:
    certificate = base64.b64encode(member.certificate).decode()
    return _Row(certificate, member.name, member.level.label, member.added_by)


def _member(row: _Row) -> Member:
    certificate = base64.b64decode(row.certificate, validate=True)
    key = check_certificate(certificate)
    level = TrustLevel.parse(row.level)
    return Member(node_id(key), key, row.name, level, NodeId(row.added_by), certificate)


def _too_old(path: Path) -> SchemaTooOld:
    return SchemaTooOld(
        f"The hearth in {path} was founded by an older hearthnet, whose log has another form.",
        fix=f"Move {path} away: the next start founds a new hearth, to which you invite the others"
        " again. Keys of the API and settings stay.",
    )


def _refused(path: Path, error: OSError) -> KeyUnreadable:
    why = error.strerror or str(error)
    return _unusable(
        path, why, mending(error, "Make the file readable and writable for this user.")
    )


def _unusable(path: Path, why: str, fix: str = _RESTORE) -> KeyUnreadable:
    return KeyUnreadable(
        f"What this node knows of its hearth, {path}, cannot be used: {why}.", fix=fix
    )
