"""Receiving a request: a small JSON part, and a blob that goes to a file as it arrives.

The blob is never whole in memory and never looked into. Sizes and time are bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from mesh.errors import BadRequest, BodyTooLarge
from mesh.interventions.jobs.queue.service import JobQueue
from mesh.interventions.jobs.queue.spool import Incoming, unstored
from mesh.types import Principal

_MAX_DATA_BYTES = 64 << 10
_MAX_HEADER_BYTES = 4 << 10
_BATCH_BYTES = 256 << 10


class UploadDescription(BaseModel):
    """The JSON part: which model, whose session, and how the blob is packed."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model_key: str = Field(max_length=4096)
    session_id: str = Field(default="", max_length=64)
    compress: bool = False
    env: dict[str, Any] = Field(default_factory=dict)


async def receive(
    request: Request, queue: JobQueue, owner: Principal
) -> tuple[UploadDescription, Incoming]:
    """The two parts of a request of `owner`'s; the caller disposes of the file, which is among the
    queue's `uploads` until then.

    Raises BadRequest, BodyTooLarge, StorageFull.
    """
    most = queue.settings.max_payload_bytes
    await queue.results.make_room(
        owner, min(int(request.headers.get("content-length", most)), most)
    )
    try:
        incoming = await asyncio.to_thread(queue.spool.receive)
    except OSError as error:
        raise unstored("The payload could not be stored", error) from error
    queue.uploads[incoming] = owner
    try:
        upload = _Upload(incoming, most, partial(queue.require_share, owner))
        envelope = await upload.read(request)
    except BaseException as error:
        del queue.uploads[incoming]
        queue.spool.release(incoming.size_bytes)
        await asyncio.to_thread(incoming.discard)
        if isinstance(error, OSError):
            raise unstored("The payload could not be stored", error) from error
        raise
    return envelope, incoming


class _Upload:
    """One body on its way: what the parser finds goes to the part it belongs to."""

    def __init__(
        self, incoming: Incoming, limit_bytes: int, require_share: Callable[[int], None]
    ) -> None:
        self._incoming = incoming
        self._require_share = require_share
        self._limit_bytes = limit_bytes
        self._data = bytearray()
        self._blob = bytearray()
        self._field = bytearray()
        self._value = bytearray()
        self._part = ""
        self._seen: list[str] = []
        self._is_whole = False

    async def read(self, request: Request) -> UploadDescription:
        """All of it. Raises BadRequest, BodyTooLarge, StorageFull, OSError."""
        limit_s = request.app.state.settings.body_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._parse(request)
        except TimeoutError:
            raise BadRequest(
                f"The request did not arrive within {limit_s:g} s.", fix="Send less in one job."
            ) from None
        except ClientDisconnect:
            raise BadRequest("The client went away.", fix="Try again.") from None
        except MultipartParseError as error:
            raise _malformed(str(error)) from None
        if not self._is_whole or self._seen.count("data") != 1 or self._seen.count("blob") != 1:
            raise _malformed("it needs one part `data` and one part `blob`, and an end")
        if not self._incoming.size_bytes:
            raise _malformed("its blob is empty")
        return _envelope(bytes(self._data))

    async def _parse(self, request: Request) -> None:
        parser = self._parser(request)
        async for chunk in request.stream():
            parser.write(chunk)
            if len(self._blob) >= _BATCH_BYTES:
                await self._flush()
        await self._flush()

    def _parser(self, request: Request) -> MultipartParser:
        kind, options = parse_options_header(request.headers.get("content-type"))
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise _malformed("it is not multipart/form-data")
        return MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": lambda data, start, end: self._head(
                    self._field, data[start:end]
                ),
                "on_header_value": lambda data, start, end: self._head(
                    self._value, data[start:end]
                ),
                "on_header_end": self._on_header_end,
                "on_part_data": self._on_part_data,
                "on_end": self._on_end,
            },
        )

    def _on_part_begin(self) -> None:
        self._part = ""

    def _head(self, part: bytearray, data: bytes) -> None:
        part += data
        if len(part) > _MAX_HEADER_BYTES:
            raise _malformed("a part's header is too long")

    def _on_header_end(self) -> None:
        if self._field.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self._part = options.get(b"name", b"").decode("latin-1")
            if len(self._seen) < 8:
                self._seen.append(self._part)
        self._field.clear()
        self._value.clear()

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part == "blob":
            self._require_share(end - start)
            self._incoming.grow(end - start, self._limit_bytes)
            self._blob += data[start:end]
        elif self._part == "data":
            self._data += data[start:end]
            if len(self._data) > _MAX_DATA_BYTES:
                raise BodyTooLarge(f"`data` is over {_MAX_DATA_BYTES} bytes.", fix="Send less.")
        else:
            raise _malformed(f"it has a part {self._part[:50]!r}")

    def _on_end(self) -> None:
        self._is_whole = True

    async def _flush(self) -> None:
        blob = bytes(self._blob)
        self._blob.clear()
        if blob:
            await asyncio.to_thread(self._incoming.write, blob)


def _envelope(data: bytes) -> UploadDescription:
    try:
        return UploadDescription.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or None
        raise BadRequest(
            f"The part `data` is not as nnsight sends it: {where or 'JSON'}: {first['msg']}.",
            fix="Use an nnsight 0.8 client.",
            param=where,
        ) from None


def _malformed(why: str) -> BadRequest:
    return BadRequest(
        f"The request is not as nnsight 0.8 sends it: {why}.", fix="Use an nnsight 0.8 client."
    )
