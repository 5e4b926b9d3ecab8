"""The Hugging Face hub: what is in a repository, and ranges of its files, over HTTP.

Waits when it is told to (429, 503 with Retry-After) and when the connection breaks, and goes on
where it stopped. Protocol: https://huggingface.co/docs/hub/api, ``/api/models`` with ``blobs=true``
and ``/resolve``, which redirects to whatever stores the file. Runs no code of a repository.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

from msgspec import Meta

from mesh import codec
from mesh.codec import Fault, Int63, Sha256
from mesh.errors import HubRefused, MeshError, ModelNotFound, TransferFailed

if TYPE_CHECKING:
    import httpx  # as late as possible: few nodes ever ask the hub, and all import this module

logger = logging.getLogger(__name__)

REPOSITORY = re.compile(r"[\w][\w.-]{0,95}(/[\w][\w.-]{0,95})?")
_TIMEOUT_S, _CONNECT_TIMEOUT_S = 30.0, 10.0
_RETRY_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
_LONGEST_WAIT_S = 300.0
_REACH_S = _RETRY_S[:2]
"""Without a connection somebody waits in vain who has only just asked."""
_MAX_LISTING_BYTES = 32 << 20
_CHECK_NETWORK = "Check HF_ENDPOINT, and whether this network wants you to log in first."
_CHECK_CERTIFICATE = (
    "Check this machine's clock, and whether this network wants you to log in first; a proxy that"
    " opens TLS has a certificate, which SSL_CERT_FILE names. What came is kept."
)


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Where the hub is, and how one shows who one is; `offline`: it is not to be asked."""

    endpoint: str
    token: str | None = None
    offline: bool = False


def hub_settings() -> HubSettings:
    """As this user has them for all programs that use the hub. Reads a file; blocks."""
    from huggingface_hub import constants, get_token

    return HubSettings(constants.ENDPOINT, get_token(), constants.HF_HUB_OFFLINE)


@dataclass(frozen=True, slots=True)
class _Lfs:
    sha256: Sha256
    size: Int63


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository; a large one with its `lfs`, a small one with git's hash alone."""

    rfilename: Annotated[str, Meta(max_length=512)]
    size: Int63 | None = None
    blobId: Annotated[str, Meta(max_length=64)] | None = None
    lfs: _Lfs | None = None

    @property
    def name(self) -> str:
        """What it is called here, where a GGUF file lies in no folder of its repository's."""
        return self.rfilename.rpartition("/")[2]

    @property
    def length(self) -> int:
        """How long it is. Raises HubRefused where the hub does not say."""
        size = self.lfs.size if self.lfs is not None else self.size
        if size is None:
            raise HubRefused(
                f"The hub does not say how long {self.rfilename} is.", fix="Try again."
            )
        return size

    def is_content(self, content: bytes) -> bool:
        """Whether this is the file."""
        if self.lfs is not None:
            return hashlib.sha256(content).hexdigest() == self.lfs.sha256
        blob = b"blob %d\0" % len(content) + content
        return hashlib.sha1(blob, usedforsecurity=False).hexdigest() == self.blobId

    def check(self, content: bytes) -> None:
        """Raise TransferFailed unless this is the file."""
        if not self.is_content(content):
            raise TransferFailed(
                f"{self.rfilename} came from the hub with other bytes than it says.",
                fix="Try again; a proxy in between may have changed it.",
            )


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository at one commit."""

    id: Annotated[str, Meta(max_length=256)]
    sha: Annotated[str, Meta(pattern=r"\A[0-9a-f]{40}\Z")]
    siblings: tuple[HubFile, ...]

    @property
    def files(self) -> dict[str, HubFile]:
        """By name."""
        return {file.rfilename: file for file in self.siblings}

    def named(self, name: str) -> HubFile | None:
        """What is called so here."""
        inside = (file for file in self.siblings if file.name == name)
        return self.files.get(name) or next(inside, None)


class Hub:
    """A connection to the hub, from its first request on; `close` at the end."""

    def __init__(self, settings: HubSettings) -> None:
        self._settings = settings
        self._http: httpx.AsyncClient | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()

    async def repository(self, name: str, revision: str = "main") -> Repository:
        """What is in it. Raises ModelNotFound, HubRefused."""
        if REPOSITORY.fullmatch(name) is None:
            raise ModelNotFound(f"{name!r} is no repository's name.", fix="Give ORG/NAME.")
        quoted = quote(revision, safe="")
        url = f"{self._settings.endpoint}/api/models/{name}/revision/{quoted}"
        body = await self._whole(f"{url}?blobs=true", name)
        try:
            return codec.convert(codec.parse_json(body), Repository)
        except Fault as fault:
            what = fault.field or "it"
            raise HubRefused(
                f"What the hub says of {name} is not understood: {what} {fault.why}.",
                fix=_CHECK_NETWORK,
            ) from fault

    async def read(self, repository: Repository, file: str, start: int, stop: int) -> bytes:
        """These bytes of a file. Raises as `stream`."""
        data = bytearray()
        async for chunk in self.stream(repository, file, start, stop):
            data += chunk
        return bytes(data)

    async def stream(
        self, repository: Repository, file: str, start: int, stop: int
    ) -> AsyncGenerator[bytes, None]:
        """The bytes [start, stop) of a file, all of them, in chunks.

        Raises HubRefused, ModelNotFound, and TransferFailed when it breaks off again and again.
        """
        quoted = quote(file)
        url = f"{self._settings.endpoint}/{repository.id}/resolve/{repository.sha}/{quoted}"
        failures = 0
        while start < stop:
            with self._failing() as failure:
                async for chunk in self._once(url, repository.id, start, stop):
                    start += len(chunk)
                    failures = 0
                    yield chunk
            if start < stop:
                failures += 1
                await _pause(failures, failure, repository.id, start)

    async def _whole(self, url: str, name: str) -> bytes:
        """What it answers, from one connection: what breaks off is asked for from its beginning."""
        failures = 0
        while True:
            body, is_all = bytearray(), False
            with self._failing() as failure:
                async for chunk in self._once(url, name, 0, None):
                    body += chunk
                    if len(body) > _MAX_LISTING_BYTES:
                        raise HubRefused(
                            f"{name} has too many files.", fix="Use another repository."
                        )
                is_all = True
            if is_all:
                return bytes(body)
            failures += 1
            waits_s = _REACH_S if failure.is_unreachable else _RETRY_S
            await _pause(failures, failure, name, 0, waits_s)

    @contextmanager
    def _failing(self) -> Iterator[_Failure]:
        """What goes wrong and is to be tried again is put down, and no error any more."""
        if self._settings.offline:
            raise HubRefused(
                "The hub is not to be asked: HF_HUB_OFFLINE is set.",
                fix="Unset it, or fetch the model from a neighbour.",
            )
        import httpx

        failure, endpoint = _Failure(), self._settings.endpoint
        try:
            yield failure
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise HubRefused(
                f"{endpoint} is no address of a hub: {error}",
                fix="Start the node with another HF_ENDPOINT, a URL, or with none.",
            ) from error
        except httpx.TooManyRedirects as error:
            raise HubRefused(f"{endpoint} sends on and on.", fix=_CHECK_NETWORK) from error
        except _Wait as wait:
            failure.wait_s, failure.why = wait.seconds, wait.why
        except httpx.TransportError as error:
            failure.why = str(error) or type(error).__name__
            failure.is_unreachable = isinstance(error, httpx.ConnectError)
            if "CERTIFICATE_VERIFY_FAILED" in failure.why:  # httpx tells it in words only
                failure.fix = _CHECK_CERTIFICATE

    async def _once(
        self, url: str, name: str, start: int, stop: int | None
    ) -> AsyncGenerator[bytes, None]:
        headers = {} if stop is None else {"Range": f"bytes={start}-{stop - 1}"}
        headers["Accept-Encoding"] = "identity"
        async with self._client().stream("GET", url, headers=headers) as response:
            _require_ok(response, name)
            skip, left = 0, None if stop is None else stop - start
            if stop is not None and response.status_code == 200:
                skip = start  # it does not know ranges: all of it comes
            async for chunk in response.aiter_bytes():
                data = chunk[skip:] if skip else chunk
                skip = max(0, skip - len(chunk))
                if left is not None:
                    data = data[:left]
                    left -= len(data)
                if data:
                    yield data
                if left == 0:
                    return

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            import httpx

            headers = {"User-Agent": "hearthnet"}
            if self._settings.token:
                headers["Authorization"] = f"Bearer {self._settings.token}"
            timeout = httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
            # Sent on to no other host: what stores the files is not told who asks.
            self._http = httpx.AsyncClient(headers=headers, timeout=timeout, follow_redirects=True)
        return self._http


@dataclass(slots=True)
class _Failure:
    """Why a try did not succeed, and how long the next one is to wait at least."""

    why: str = "it ended early"
    fix: str = "Check the connection to the internet, then try again; what came is kept."
    wait_s: float = 0.0
    is_unreachable: bool = False


async def _pause(
    failures: int, failure: _Failure, name: str, at: int, waits_s: Sequence[float] = _RETRY_S
) -> None:
    """Wait for the next try after so many in vain, at least as long as `waits_s` says of it; raises
    TransferFailed after the last."""
    if failures > len(waits_s):
        raise TransferFailed(
            f"The hub did not give {name}: {failure.why}.",
            fix=failure.fix,
        )
    logger.info("hub: %s for %s; going on at byte %d", failure.why, name, at)
    await asyncio.sleep(max(failure.wait_s, waits_s[failures - 1]))


class _Wait(Exception):
    """The hub asks for patience."""

    def __init__(self, seconds: float, why: str) -> None:
        super().__init__(why)
        self.seconds = min(seconds, _LONGEST_WAIT_S)
        self.why = why


def _require_ok(response: httpx.Response, name: str) -> None:
    status = response.status_code
    if status in (200, 206):
        return
    if status == 429 or status >= 500:
        raise _Wait(_retry_after(response), f"it answered {status}")
    raise _refusal(status, response.headers.get("X-Error-Code", ""), name)


def _refusal(status: int, code: str, name: str) -> MeshError:
    if code == "GatedRepo":
        return HubRefused(
            f"{name} is only for those who accepted its terms.",
            fix=f"Accept them at https://huggingface.co/{name}, then log in: `hf auth login`.",
        )
    if status in (401, 403):  # the hub also says so of what does not exist
        return HubRefused(
            f"The hub does not give {name} to you, or there is no such repository ({status}).",
            fix="Check its name; if it is private, log in (`hf auth login`), or start the node with"
            " HF_TOKEN set.",
        )
    if status == 404:
        return ModelNotFound(
            f"The hub has no {name}, or not that revision or file.", fix="Check the name."
        )
    return HubRefused(f"The hub answered {status} for {name}.", fix="Check HF_ENDPOINT.")


def _retry_after(response: httpx.Response) -> float:
    text = response.headers.get("Retry-After", "")
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return 0.0


class HubSource:
    """The hub as a source of tensors, which lie where the local files' headers say."""

    name = "the hub"

    def __init__(
        self, hub: Hub, repository: Repository, places: dict[str, tuple[str, int]]
    ) -> None:
        """`places`: by tensor the file and where in it the bytes begin."""
        self._hub = hub
        self._repository = repository
        self._places = places

    async def read(self, tensor: str, start: int, stop: int) -> Sequence[bytes]:
        """See `asking.Source`."""
        file, offset = self._places[tensor]
        return [await self._hub.read(self._repository, file, offset + start, offset + stop)]

    def close(self) -> None:
        """See `asking.Source`; whoever made the hub closes it."""


def origin_of(repository: str, commit: str, file: str = "") -> str:
    """``org/name@commit``, with ``/FILE`` behind it for a GGUF model that begins with that file."""
    return f"{repository}@{commit}" + (f"/{file}" if file else "")


def parse_origin(origin: str) -> tuple[str, str] | None:
    """Name and commit of what `origin_of` says."""
    found = re.fullmatch(r"(?P<name>[^@]+)@(?P<commit>[0-9a-f]{40})(/[^/]+)?", origin)
    return (found["name"], found["commit"]) if found else None
