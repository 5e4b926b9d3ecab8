"""zeroconf, opened on chosen interfaces for one service type. Everything that touches it is here.

Knows sockets and DNS records; knows nothing of what the records mean to hearthnet.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zeroconf import Error as ZeroconfError
from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from mesh.discovery.announcement import SERVICE_TYPE, Announcement, to_txt

_GROUP = "224.0.0.251"
_CLOSE_TIMEOUT_S = 3.0

Record = tuple[Mapping[bytes, bytes | None], list[str]]
"""The TXT entries and the IPv4 addresses of a service instance."""


def joinable(address: str) -> str | None:
    """None when this address can join the mDNS group, else the operating system's reason.

    zeroconf swallows some of these failures and then stays silent for ever; sends nothing.
    """
    interface = socket.inet_aton(address)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, interface)
            member = socket.inet_aton(_GROUP) + interface
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _in_one_line(record: logging.LogRecord) -> bool:
    """What zeroconf says of a network that is away tells nothing more by its traceback."""
    if record.exc_info and isinstance(record.exc_info[1], OSError):
        record.exc_info = None
    return True


class Multicast:
    """One announced service and one browser. Use `open`; `close` says goodbye."""

    def __init__(self, zeroconf: AsyncZeroconf, ttl_s: int) -> None:
        self._zeroconf = zeroconf
        self._ttl_s = ttl_s
        self._browser: AsyncServiceBrowser | None = None
        self._info: AsyncServiceInfo | None = None
        self._saying: asyncio.Future[None] | None = None
        """An announcement is sent several times, over half a second."""

    @classmethod
    async def open(
        cls,
        addresses: Sequence[str],
        own: Announcement | None,
        on_state: Callable[[str, bool], None],
        *,
        ttl_s: int,
    ) -> Multicast:
        """Announce `own` (None: nothing) and browse on these interface addresses only.

        `on_state(instance, alive)` is called in the event loop, for our own instance as well.
        Raises OSError when the sockets cannot be had.
        """
        logging.getLogger("zeroconf").addFilter(_in_one_line)
        multicast = cls(
            AsyncZeroconf(interfaces=list(addresses), ip_version=IPVersion.V4Only), ttl_s
        )
        try:
            await multicast._start(own, on_state)
        except (ZeroconfError, TimeoutError) as error:
            await multicast.close()
            raise OSError(f"zeroconf did not start: {error!r}") from error
        except BaseException:  # whoever gives up: what is left open answers for ever
            await multicast.close()
            raise
        return multicast

    async def _start(self, own: Announcement | None, on_state: Callable[[str, bool], None]) -> None:
        def changed(
            zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
        ) -> None:
            on_state(name, state_change is not ServiceStateChange.Removed)

        self._browser = AsyncServiceBrowser(
            self._zeroconf.zeroconf, SERVICE_TYPE, handlers=[changed]
        )
        if own is None:
            return
        self._info = self._service(own)
        # The instance name holds a nonce of this run, so nothing needs probing for a conflict.
        self._saying = asyncio.ensure_future(
            await self._zeroconf.async_register_service(self._info, cooperating_responders=True)
        )

    async def update(self, own: Announcement) -> None:
        """Announce changed contents of the same instance."""
        self._info = self._service(own)
        self._say_no_more()
        self._saying = asyncio.ensure_future(await self._zeroconf.async_update_service(self._info))

    async def resolve(self, instance: str, timeout_s: float) -> Record | None:
        """Its records, asked for on the network once the known ones expired; None when silent."""
        info = AsyncServiceInfo(SERVICE_TYPE, instance)
        if not await info.async_request(self._zeroconf.zeroconf, timeout_s * 1000):
            return None
        properties: dict[bytes, bytes | None] = info.properties
        addresses: list[str] = info.parsed_addresses(IPVersion.V4Only)
        return properties, addresses

    def instances(self) -> list[str]:
        """Every instance name on record, including those whose host fell silent."""
        records: list[Any] = self._zeroconf.zeroconf.cache.async_entries_with_name(SERVICE_TYPE)
        return [record.alias for record in records if hasattr(record, "alias")]

    async def close(self) -> None:
        """Say goodbye and free the sockets, within a few seconds whatever happens."""
        self._say_no_more()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                if self._browser is not None:
                    await self._browser.async_cancel()
                await self._zeroconf.async_close()
        finally:
            # Where that took too long: one that is left open answers for what has gone.
            if not self._zeroconf.zeroconf.done:
                self._zeroconf.zeroconf.close()

    def _say_no_more(self) -> None:
        """Or others would believe what is sent once more after what comes now."""
        if self._saying is not None:
            self._saying.cancel()

    def _service(self, own: Announcement) -> AsyncServiceInfo:
        host = own.instance.removesuffix(f".{SERVICE_TYPE}")
        return AsyncServiceInfo(
            SERVICE_TYPE,
            own.instance,
            port=own.port,
            properties=to_txt(own),
            server=f"{host}.local.",
            host_ttl=self._ttl_s,
            other_ttl=self._ttl_s,
            parsed_addresses=list(own.addresses),
        )
