"""What every hop of one generation is asked for, as plain data and as the messages that ask."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mesh.models.edits import describe
from mesh.models.harvest import HarvestBatch
from mesh.types import THIS_NODE, Edit, LayerRange, ModelId, Principal, WireDtype
from mesh.wire.messages import Message, Open, OpenPart

PART_BYTES = 128 << 10
"""Bytes of edits in one message: several fit below a link's limit for what is not a tensor."""

FIRST_ANSWER = 128
"""Positions that are reserved behind what is known of a text; hops give more as it grows."""


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What every hop of a generation is asked for: `reserve` positions at once.

    `limit` is the position that the text may reach; nothing is reserved behind it. Without one it
    needs no more than `reserve`. No hop is told the `principal`, on whose behalf it is. Terms are
    told apart by which object they are: one for all hops.
    """

    model_id: ModelId
    weights_sha256: str
    reserve: int
    wire_dtype: WireDtype
    edits: tuple[Edit, ...] = ()
    harvest: HarvestBatch | None = None
    limit: int = 0
    principal: Principal = THIS_NODE

    def room(self, fed: int) -> int:
        """Positions to reserve for a text that has `fed` of them already."""
        return max(self.reserve, min(fed + FIRST_ANSWER, self.limit))

    def with_room(self, fed: int) -> SessionTerms:
        """The terms that reserve `room`; these themselves where they do."""
        room = self.room(fed)
        return self if self.reserve >= room else replace(self, reserve=room)

    def opening(self, session: int, layers: LayerRange) -> list[Message]:
        """What asks a hop for a session on `layers`: its share of the edits, then `Open`."""
        edits = [edit for edit in self.edits if edit.site.layer in layers]
        data = b"".join(edit.data for edit in edits)
        return [
            *(
                OpenPart(session, data[first : first + PART_BYTES])
                for first in range(0, len(data), PART_BYTES)
            ),
            Open(
                session,
                self.model_id,
                self.weights_sha256,
                layers.start,
                layers.stop,
                self.reserve,
                self.wire_dtype,
                describe(edits),
                harvest=self.harvest.to_fields() if self.harvest is not None else {},
            ),
        ]
