"""Puts tensors together from chunks. Memory grows with what arrived, never with what was announced.

Knows nothing of windows or of what a tensor is for.
"""

from __future__ import annotations

from mesh.errors import BadFrame, FrameTooLarge
from mesh.wire.limits import Limits
from mesh.wire.messages import WireTensor
from mesh.wire.tensors import TensorHeader

MAX_OPEN_TENSORS = 16

_FIX = "Run the same hearthnet version on both machines."


class _Partial:
    __slots__ = ("data", "final", "gradient", "header")

    def __init__(self, header: TensorHeader, gradient: bool) -> None:
        self.header = header
        self.gradient = gradient
        self.data = bytearray()
        self.final = False


class Reassembly:
    """The incomplete tensors of one direction, by tensor id."""

    def __init__(self, limits: Limits) -> None:
        self._limit = limits.reassembly_bytes
        self._open: dict[int, _Partial] = {}
        self.size_bytes = 0
        """Bytes held now."""

    def room_for(self, header: TensorHeader) -> int:
        """How many bytes the next chunk of this tensor may have.

        Raises BadFrame when the header contradicts the tensor's first chunk, when its last chunk
        was already seen, or when too many tensors are open.
        """
        partial = self._open.get(header.tensor_id)
        if partial is None:
            if len(self._open) >= MAX_OPEN_TENSORS:
                raise BadFrame(f"More than {MAX_OPEN_TENSORS} tensors are open at once.", fix=_FIX)
            return header.size_bytes
        if partial.header.encoded != header.encoded:
            raise BadFrame("A tensor changed its shape or dtype between chunks.", fix=_FIX)
        if partial.final:
            raise BadFrame("A chunk follows the final chunk of its tensor.", fix=_FIX)
        return header.size_bytes - len(partial.data)

    def add(
        self, header: TensorHeader, data: bytes | memoryview, *, final: bool, gradient: bool
    ) -> None:
        """Take one chunk that `room_for` admitted.

        Raises BadFrame for an empty or surplus chunk or a changed gradient flag, FrameTooLarge when
        all incomplete tensors together exceed the limit.
        """
        partial = self._open.get(header.tensor_id)
        if partial is None:
            partial = self._open[header.tensor_id] = _Partial(header, gradient)
        if partial.gradient != gradient:
            raise BadFrame("A tensor changed its gradient flag between chunks.", fix=_FIX)
        if not data:
            raise BadFrame("A data frame bears no bytes.", fix=_FIX)
        if len(partial.data) + len(data) > header.size_bytes:
            raise BadFrame("A tensor has more bytes than its shape says.", fix=_FIX)
        if self.size_bytes + len(data) > self._limit:
            raise FrameTooLarge(
                f"Incomplete tensors exceed {self._limit} bytes.",
                fix="Use the same limits on both machines.",
            )
        partial.data += data
        partial.final = final
        self.size_bytes += len(data)

    def end(self, tensor_id: int) -> WireTensor:
        """The finished tensor. Raises BadFrame when it is unknown or incomplete."""
        partial = self._open.pop(tensor_id, None)
        if partial is None:
            raise BadFrame(f"END for tensor {tensor_id}, which nobody started.", fix=_FIX)
        self.size_bytes -= len(partial.data)
        if not partial.final:
            raise BadFrame(f"END for tensor {tensor_id} before its final chunk.", fix=_FIX)
        return partial.header.tensor(partial.data, gradient=partial.gradient)
