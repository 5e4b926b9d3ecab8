"""What a failed dial over real TLS says of whoever is there."""

from __future__ import annotations

import errno
import socket

import pytest

from mesh.discovery.sightings import PeerState, why_not
from mesh.errors import ConnectFailed
from mesh.identity.tls import TlsContexts
from mesh.wire.unreached import why_unreached
from mesh.wire.websocket import connect, serve
from tests.identity.support import Party, contexts
from tests.wire.house import House
from tests.wire.support import Recorder

HOME, GUEST = Party("home"), Party("guest")


KNOWS_HOME, KNOWS_NOBODY = contexts(GUEST, HOME), contexts(GUEST)
HOME_ALONE, HOME_WITH_GUEST = contexts(HOME), contexts(HOME, GUEST)


@pytest.mark.parametrize(
    ("home", "guest", "reason"),
    [
        (HOME_ALONE, KNOWS_HOME, "does not know this node as a member"),
        (HOME_WITH_GUEST, KNOWS_NOBODY, "are not members of one hearth"),
    ],
    ids=["it does not know us", "we do not know it"],
)
async def test_who_is_of_another_hearth_is_no_peer(
    home: TlsContexts, guest: TlsContexts, reason: str
) -> None:
    house = House()
    server = await serve("127.0.0.1", 0, accept=house.accept, hello=HOME.hello(), ssl=home.server)
    with pytest.raises(ConnectFailed) as caught:
        await connect(
            "127.0.0.1", server.port, hello=GUEST.hello(), handler=Recorder(), ssl=guest.client()
        )
    await server.close()
    state, why = why_not(caught.value)
    assert state is PeerState.NOT_A_PEER
    assert reason in why
    assert house.handlers == []


async def test_who_does_not_answer_is_unreachable() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and nobody listens
        port = bound.getsockname()[1]
        with pytest.raises(ConnectFailed) as caught:
            await connect(
                "127.0.0.1", port, hello=GUEST.hello(), handler=Recorder(),
                ssl=KNOWS_HOME.client(),
            )  # fmt: skip
    state, why = why_not(caught.value)
    assert state is PeerState.UNREACHABLE
    assert f"No link to 127.0.0.1:{port}: Connection refused." in why


def test_macos_may_keep_a_program_from_the_local_network() -> None:
    """And says what it says of a machine that is not there."""
    error = OSError(errno.EHOSTUNREACH, "Connect call failed ('192.0.2.7', 8421)")
    assert why_unreached(error, "linux") == "No route to host"
    assert "Local Network" in why_unreached(error, "darwin")
    refused = OSError(errno.ECONNREFUSED, "Connect call failed ('192.0.2.7', 8421)")
    assert why_unreached(refused, "darwin") == "Connection refused"
