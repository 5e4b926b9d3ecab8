"""The shortcut past the websocket parser."""

from __future__ import annotations

import pytest
from websockets.client import ClientProtocol
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.uri import WebSocketURI

from mesh.wire.framing import frame_size, unwrap, wrap


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("size", [0, 1, 125, 126, 1792, 65535, 65536, 70000])
def test_the_shortcut_past_websockets_agrees_with_websockets(masked: bool, size: int) -> None:
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    data = wrap(payload, masked=masked)
    assert len(data) == frame_size(size, masked=masked)
    theirs = (
        ServerProtocol(state=State.OPEN)
        if masked
        else ClientProtocol(WebSocketURI(False, "h", 1, "/", ""), state=State.OPEN)
    )
    theirs.receive_data(data)
    (event,) = theirs.events_received()
    assert bytes(event.data) == payload  # type: ignore[union-attr]
    plain = unwrap(data, masked=masked)
    assert (plain is not None) is (126 <= size <= 65535)
    assert plain is None or bytes(plain) == payload
    assert unwrap(data[:-1], masked=masked) is None
    assert unwrap(data + b"\0", masked=masked) is None
    assert unwrap(data, masked=not masked) is None
