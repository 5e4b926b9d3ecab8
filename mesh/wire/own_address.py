"""Whether this machine still has an address, asked of its kernel.

TCP says nothing when an address is taken from an interface: what is sent from there goes nowhere.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

from mesh.errors import AddressLost, LinkLost


def why_unheard(transport: asyncio.BaseTransport | None) -> LinkLost | None:
    """Why nothing can come over it any more, as far as this machine's addresses tell."""
    here = None if transport is None else transport.get_extra_info("sockname")
    if not isinstance(here, tuple) or _is_ours(here):
        return None
    return AddressLost(
        f"This machine is not at {here[0]} any more.", fix="It connects again from where it is."
    )


def _is_ours(here: tuple[Any, ...]) -> bool:
    family = socket.AF_INET if len(here) == 2 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((here[0], 0, *here[2:]))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True
