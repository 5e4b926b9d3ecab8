"""What a failed dial over real TLS says of whoever is there."""

from __future__ import annotations

import socket

import pytest

from mesh.discovery.sightings import PeerState, why_not
from mesh.errors import ConnectFailed
from mesh.identity.tls import TlsContexts
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
        with pytest.raises(ConnectFailed) as caught:
            await connect(
                "127.0.0.1", bound.getsockname()[1], hello=GUEST.hello(), handler=Recorder(),
                ssl=KNOWS_HOME.client(),
            )  # fmt: skip
    assert why_not(caught.value)[0] is PeerState.UNREACHABLE
