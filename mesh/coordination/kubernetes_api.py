"""Requests to a Kubernetes API server: where it is, who asks, and what its refusals mean.

Needs the package ``kubernetes-asyncio`` (the extra ``kubernetes``), imported when connecting. Knows
nothing of records.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mesh.codec import Fault
from mesh.coordination.store import client_missing
from mesh.errors import BadRecord, CoordinationError, StoreRefused, StoreUnavailable

REQUEST_TIMEOUT_S = 10.0
_NOT_FOUND, _CONFLICT = 404, 409
_REFUSALS = (401, 403, 405, 422)
_WITHOUT_NAME = ("list_", "create_")
"""Requests to a collection: where they find nothing, it is the collection that is missing."""


class NoSuchObject(Exception):
    """404: there is no object of that name."""


class Conflict(Exception):
    """409: the object is there already, or has changed meanwhile."""


class KubernetesApi:
    """`connect` first, `close` last; `about` names in errors what is read.

    `kubeconfig` is the file that says where the API server is; without one, the pod's service
    account does, or the user's own file.
    """

    def __init__(self, kubeconfig: Path | None, about: str) -> None:
        self._kubeconfig = kubeconfig
        self._about = about
        self._client: Any = None

    async def connect(self) -> None:
        """Find the API server; nothing is asked yet. Raises StoreUnavailable."""
        await self.close()
        library = await asyncio.to_thread(_library)
        async with self.translated():
            configuration = await asyncio.to_thread(self._configuration, library)
            self._client = library.client.ApiClient(configuration)

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    @property
    def custom(self) -> Any:
        """The client's methods for custom resources. Raises StoreUnavailable."""
        return _library().client.CustomObjectsApi(self._connected())

    @property
    def core(self) -> Any:
        """The client's methods for ConfigMaps and the like. Raises StoreUnavailable."""
        return _library().client.CoreV1Api(self._connected())

    async def ask(self, function: Callable[..., Awaitable[Any]], *args: Any, **more: Any) -> Any:
        """What a method of the client gives, in time. Raises NoSuchObject, Conflict, and within
        `translated` CoordinationError."""
        library = _library()
        try:
            return await function(*args, **{"_request_timeout": REQUEST_TIMEOUT_S, **more})
        except library.client.ApiException as error:
            if error.status == _NOT_FOUND and not function.__name__.startswith(_WITHOUT_NAME):
                raise NoSuchObject from error
            if error.status == _CONFLICT:
                raise Conflict from error
            raise

    @asynccontextmanager
    async def translated(self) -> AsyncIterator[None]:
        """Errors of the client and of what is read, as CoordinationError."""
        library = _library()
        try:
            yield
        except library.client.ApiException as error:
            raise _refused(error) from error
        except Fault as fault:
            raise BadRecord(
                f"{self._about} is no record: {fault}.",
                fix="Apply the definition that comes with hearthnet, or delete the resource.",
                param=fault.field or None,
            ) from fault
        except (*library.errors, TimeoutError, OSError, ValueError) as error:
            raise StoreUnavailable(
                f"Kubernetes does not answer: {str(error) or type(error).__name__}.",
                fix="Check coordination.kubeconfig and that the API server can be reached.",
            ) from error

    def _connected(self) -> Any:
        if self._client is None:
            raise StoreUnavailable("Kubernetes is not connected.", fix="Wait: it is tried again.")
        return self._client

    def _configuration(self, library: Any) -> Any:
        """In a thread, with a loop of its own: it reads files and may run a program for a token."""
        configuration = library.client.Configuration()
        if self._kubeconfig is None:
            with suppress(library.config.ConfigException):
                library.config.load_incluster_config(client_configuration=configuration)
                return configuration
        file = None if self._kubeconfig is None else str(self._kubeconfig)
        asyncio.run(
            library.config.load_kube_config(config_file=file, client_configuration=configuration)
        )
        return configuration


def _refused(error: Any) -> CoordinationError:
    said = f"{error.status} {error.reason}"
    if error.status == _NOT_FOUND:
        return StoreRefused(
            f"The API server has no such resource or namespace ({said}).",
            fix="Apply the definition that comes with hearthnet: see docs/how-to/coordination.md.",
        )
    if error.status in _REFUSALS:
        return StoreRefused(
            f"The API server refuses: {said}.",
            fix="Apply the role that comes with hearthnet to this node's account: see"
            " docs/how-to/coordination.md.",
        )
    return StoreUnavailable(f"The API server failed: {said}.", fix="Wait: it is tried again.")


def _library() -> Any:
    try:
        import aiohttp
        from kubernetes_asyncio import client, config
    except ImportError as error:
        raise client_missing("kubernetes-asyncio", "kubernetes") from error
    errors = (aiohttp.ClientError, config.ConfigException)
    return SimpleNamespace(client=client, config=config, errors=errors)
