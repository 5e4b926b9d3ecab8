"""Steering edits that come in parts, before the session that they are for is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from mesh.accounts.ledger import Hold, Resource, ResourceLedger
from mesh.errors import BadSteering, Busy
from mesh.models.edits import MAX_TOTAL_BYTES
from mesh.types import Principal
from mesh.wire.messages import OpenPart

_MAX_PARTLY_OPEN = 8


@dataclass(slots=True)
class _Parts:
    room: Hold
    data: bytes = b""


class EditParts:
    """What one link has sent of edits, on its owner's account: no token vouches for it yet."""

    def __init__(self, accounts: ResourceLedger, owner: Principal) -> None:
        self._accounts = accounts
        self._owner = owner
        self._parts: dict[int, _Parts] = {}

    def add(self, part: OpenPart) -> None:
        """One part more. Raises BadSteering and Busy; nothing of its session is kept then."""
        parts = self._parts.pop(part.session, None)
        if parts is None:
            parts = _Parts(self._accounts.hold(self._owner, Resource.EDIT_BYTES))
        try:
            size = len(parts.data) + len(part.data)
            if size > MAX_TOTAL_BYTES or len(self._parts) >= _MAX_PARTLY_OPEN:
                raise BadSteering(  # noqa: TRY301 - as what the ledger refuses
                    f"The edits of a session have more than {MAX_TOTAL_BYTES} bytes, or too many"
                    " sessions are being opened.",
                    fix="Attach fewer, or smaller ones.",
                    param="hearthnet.steer",
                )
            parts.room.resize(size)
        except (BadSteering, Busy):
            parts.room.close()
            raise
        parts.data += part.data
        self._parts[part.session] = parts

    def take(self, session: int) -> bytes:
        """The edits of this session, none for most; they are on nobody's account from here on."""
        parts = self._parts.pop(session, None)
        if parts is None:
            return b""
        parts.room.close()
        return parts.data

    def clear(self) -> None:
        """Forget everything."""
        for session in list(self._parts):
            self.take(session)
