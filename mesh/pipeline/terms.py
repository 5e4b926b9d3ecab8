"""What every hop of one generation is asked for, as plain data and as the messages that ask."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mesh.models.edits import describe
from mesh.models.harvest import HarvestBatch
from mesh.pipeline.remote_ends import RemoteEnds
from mesh.types import (
    HIDDEN_DTYPES,
    THIS_NODE,
    Edit,
    LayerRange,
    ModelId,
    Principal,
    ShardDescriptor,
    WireDtype,
)
from mesh.wire.messages import Message, Open, OpenPart, WireTensor

PART_BYTES = 128 << 10
"""Bytes of edits in one message: several fit below a link's limit for what is not a tensor."""

FIRST_ANSWER = 128
"""Positions that are reserved behind what is known of a text; hops give more as it grows."""


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What every hop of a generation is asked for: `reserve` positions at once.

    `limit` is the position that the text may reach; nothing is reserved behind it. Without one it
    needs no more than `reserve`. No hop is told the `principal`, on whose behalf it is.
    `remote_ends` is what of the model's ends hops run. Of models that turn short texts otherwise
    than long ones (`mesh.models.rope`) a text `is_long` whose hops reserve more positions at once
    than a short one has. Terms are told apart by which object they are: one for all hops.
    """

    model_id: ModelId
    weights_sha256: str
    reserve: int
    wire_dtype: WireDtype
    edits: tuple[Edit, ...] = ()
    harvest: HarvestBatch | None = None
    limit: int = 0
    principal: Principal = THIS_NODE
    remote_ends: RemoteEnds | None = None
    is_long: bool = False

    def room(self, fed: int) -> int:
        """Positions to reserve for a text that has `fed` of them already."""
        return max(self.reserve, min(fed + FIRST_ANSWER, self.limit))

    def with_room(self, fed: int) -> SessionTerms:
        """The terms that reserve `room`; these themselves where they do."""
        room = self.room(fed)
        return self if self.reserve >= room else replace(self, reserve=room)

    def for_checking(self) -> SessionTerms:
        """What another host is asked for, to check one that was asked for these: it writes nothing
        down, and says candidates of all rows that it is asked in one."""
        ends = None if self.remote_ends is None else self.remote_ends.of_all_rows()
        return replace(self, harvest=None, remote_ends=ends)

    def opening(self, session: int, layers: LayerRange) -> list[Message]:
        """What asks a hop for a session on `layers`: its share of the edits, then `Open`."""
        edits = [edit for edit in self.edits if edit.site.layer in layers]
        data = b"".join(edit.data for edit in edits)
        request = Open(
            session,
            self.model_id,
            self.weights_sha256,
            layers.start,
            layers.stop,
            self.reserve,
            self.wire_dtype,
            describe(edits),
            harvest=self.harvest.to_fields() if self.harvest is not None else {},
        )
        if self.remote_ends is not None:
            request = self.remote_ends.opening(request, layers)
        return [
            *(
                OpenPart(session, data[first : first + PART_BYTES])
                for first in range(0, len(data), PART_BYTES)
            ),
            request,
        ]

    def is_served_by(self, shard: ShardDescriptor, layers: LayerRange) -> bool:
        """Whether a shard that holds these layers can do all that is asked of a hop on them."""
        return self.remote_ends is None or self.remote_ends.is_served_by(shard, layers)

    def fits(
        self, layers: LayerRange, position: int, shape: tuple[int, ...], tensor: WireTensor
    ) -> bool:
        """Whether an answer has the shape and one of the dtypes of what a hop on these layers gives
        for an input of `shape` from `position` on."""
        if self.remote_ends is None:
            return tensor.shape == shape and tensor.dtype in HIDDEN_DTYPES
        return self.remote_ends.fits(layers, position, shape[1], tensor)

    def aligned(self, layers: LayerRange, rows: int, tensor: WireTensor) -> WireTensor:
        """An answer that `fits` an input of `rows`, with a row for each of them."""
        if self.remote_ends is None:
            return tensor
        return self.remote_ends.aligned(layers, rows, tensor)
