"""Bytes that are no tensor, in parts, with the flow control of tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh.errors import BadRequest
from mesh.wire.messages import Blob, BlobKind
from tests.wire.support import SMALL, exchange, session_pair


@pytest.mark.parametrize("size", [0, 1, 64, 65, 640])
def test_a_blob_arrives_whole_and_what_it_bears_is_credited_at_once(size: int) -> None:
    a, b = session_pair(SMALL)
    data = bytes(range(256)) * 4
    for number in range(40):
        sent = Blob(number, BlobKind.ANSWER, 4096, 8, data[:size])
        a.send(sent)
        (found,) = exchange(a, b)[1]
        assert isinstance(found, Blob)
        assert replace(found, data=bytes(found.data)) == sent
        assert (found.end, b.held_bytes) == (8 + size, 0)
    with pytest.raises(BadRequest, match="Blob of session 1"):
        a.send(Blob(1, BlobKind.ANSWER, 1 << 32, 0, b""))
