"""Requests to a Kubernetes API server: where it is, who asks, and what its refusals mean.

Needs the package ``kubernetes-asyncio`` (the extra ``kubernetes``), imported when connecting. Knows
nothing of records.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mesh import codec
from mesh.codec import Fault
from mesh.coordination.store import client_missing
from mesh.errors import BadRecord, CoordinationError, StoreRefused, StoreUnavailable

REQUEST_TIMEOUT_S = 10.0
Query = Mapping[str, str | int]

_NOT_FOUND, _CONFLICT = 404, 409
_REFUSALS = (401, 403, 405, 422)


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
        try:
            configuration = await asyncio.to_thread(self._configuration, library)
            self._client = library.client.ApiClient(configuration)
        except Exception as error:  # whatever foreign code raises over a file that somebody wrote
            why = " ".join(str(error).split()) or type(error).__name__
            raise StoreUnavailable(
                f"What leads to the Kubernetes API server cannot be used: {why.rstrip('.')}.",
                fix="Check coordination.kubeconfig, or the file that this account has.",
            ) from error

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def ask(
        self,
        method: str,
        collection: str,
        name: str = "",
        body: object = None,
        query: Query | None = None,
    ) -> Any:
        """What the server answers about a collection, by its path, or about the object in it.

        Raises Conflict, NoSuchObject where the object is missing and not the collection, and within
        `translated` CoordinationError.
        """
        path = f"{collection}/{name}" if name else collection
        response = await self._request(method, path, body, query or {}, REQUEST_TIMEOUT_S)
        text = await response.read()
        if response.status == _NOT_FOUND and name:
            raise NoSuchObject
        if response.status == _CONFLICT:
            raise Conflict
        if not response.ok:
            raise _refused(response)
        return codec.parse_json(text)

    async def watch(self, collection: str, version: str, timeout_s: float) -> AsyncGenerator[bytes]:
        """The events since this version, a line each, until `timeout_s` are over. Raises within
        `translated` CoordinationError."""
        query: Query = {
            "watch": "true",
            "resourceVersion": version,
            "timeoutSeconds": max(1, int(timeout_s)),
        }
        limit_s = timeout_s + REQUEST_TIMEOUT_S
        response = await self._request("GET", collection, None, query, limit_s)
        try:
            if not response.ok:
                raise _refused(response)
            async for line in response.content:
                yield line
        finally:
            response.close()

    @asynccontextmanager
    async def translated(self) -> AsyncIterator[None]:
        """Errors of the client and of what is read, as CoordinationError."""
        library = _library()
        try:
            yield
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

    async def _request(
        self, method: str, path: str, body: object, query: Query, timeout_s: float
    ) -> Any:
        if self._client is None:
            raise StoreUnavailable("Kubernetes is not connected.", fix="Wait: it is tried again.")
        return await self._client.call_api(
            path,
            method,
            query_params=list(query.items()),
            header_params={"Accept": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=timeout_s,
        )

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


def _refused(response: Any) -> CoordinationError:
    said = f"{response.status} {response.reason}"
    if response.status == _NOT_FOUND:
        return StoreRefused(
            f"The API server has no such resource or namespace ({said}).",
            fix="Apply the definition that comes with hearthnet: see docs/how-to/coordination.md.",
        )
    if response.status in _REFUSALS:
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
