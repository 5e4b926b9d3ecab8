"""Reading request bodies: bounded in size and time, strict JSON, problems named by field."""

from __future__ import annotations

import asyncio
import difflib
import gc
import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn, TypeVar
from weakref import WeakValueDictionary

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from mesh.api.auth import Access, caller_of
from mesh.api.services import ApiSettings
from mesh.errors import BadRequest, BodyTooLarge
from mesh.types import Principal

_Body = TypeVar("_Body", bound=BaseModel)
_Any = TypeVar("_Any")
_SHOWN_CHARS = 100
_SHORT_BYTES = 64 << 10
"""So many take up to ten milliseconds; the most that a body may have, above a second."""
_MAX_WHY = 1000
"""Some reasons repeat what was sent."""
_HIGH_ALONE = re.compile(r"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])")
_LOW_ALONE = re.compile(r"\\u[dD](?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F]")
"""Escapes of half a character, in JSON that is valid otherwise and has no escaped backslash."""
_MOST_SIGNS = 100_000
"""Lists, objects and names in a body: the longest chats have half as many. While they are made,
which takes a tenth of a second, nothing else in this process runs; of a million it is a second."""
_SIGNS = b"[", b"{", b":"
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


NOT_SUPPORTED = "not_supported"
"""The kind of pydantic's errors for what is known and not done here."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """What is said of something that is not done here: `why`, for the message, and `fix`."""

    why: str = ""
    fix: str = "Leave it out."


def only(*accepted: object, otherwise: Unsupported = Unsupported()) -> BeforeValidator:
    """A field of OpenAI's that hearthnet takes at null and at the values that change nothing."""

    def check(value: object) -> None:
        if value is None or any(
            value == known and type(value) is type(known) for known in accepted
        ):
            return
        what = f"values other than {accepted[0]!r} are" if accepted else "this field is"
        raise _not_supported(what, otherwise)

    return BeforeValidator(check)


def only_types(what: str, *known: str, **others: Unsupported) -> BeforeValidator:
    """Objects of OpenAI's, called `what`, of which hearthnet takes those whose `type` is `known`;
    what is said of `others`, by their types."""
    there = Unsupported(f"there are: {', '.join(known)}")

    def check(value: object) -> object:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind in known:
            return value
        shown = repr(kind[:_SHOWN_CHARS])
        raise _not_supported(f"{what} of the type {shown} are", others.get(kind, there))

    return BeforeValidator(check)


def _not_supported(what: str, refusal: Unsupported) -> PydanticCustomError:
    why = f"; {refusal.why}" if refusal.why else ""
    said = {"what": what, "why": why, "fix": refusal.fix}
    return PydanticCustomError(NOT_SUPPORTED, "{what} not supported{why}", said)


_MAX_DEPTH = 64
_INTEGERS = range(-(2**63), 2**64)
"""What the messages between a node's processes have."""


def require_plain(value: _Any) -> _Any:
    """A value of JSON as it came; ValueError for one nested more deeply than people write, or with
    integers of more than 64 bits."""
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return value
        if any(type(each) is int and each not in _INTEGERS for each in level):
            raise ValueError("has an integer of more than 64 bits")
    raise ValueError(f"nested more than {_MAX_DEPTH} deep")


def is_plain(value: object) -> bool:
    """Whether `require_plain` takes it."""
    try:
        require_plain(value)
    except ValueError:
        return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


class Strict(BaseModel):
    """A request body: known fields only, of their own types, finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_stranger(cls, fields: Any) -> Any:
        """Without the unknown fields that are null, which mean nothing (clients of the time to come
        send those of their own along), and those after the first: each would become an error of its
        own."""
        if not isinstance(fields, dict):
            return fields
        if len(fields) <= len(cls.model_fields) and None not in fields.values():
            return fields
        names = {field.alias or name for name, field in cls.model_fields.items()}
        strangers = (name for name in fields if name not in names and fields[name] is not None)
        kept = names.union(islice(strangers, 1))
        return {name: value for name, value in fields.items() if name in kept}


class LongBodies:
    """Reads bodies that take long beside the loop, of each principal one at a time."""

    def __init__(self) -> None:
        self._turns = WeakValueDictionary[Principal, asyncio.Lock]()

    async def read(self, principal: Principal, reading: Callable[[], _Body]) -> _Body:
        """What `reading` gives, or raises, on a thread."""
        async with self._turns.setdefault(principal, asyncio.Lock()):
            return await asyncio.to_thread(reading)


async def read_body(request: Request, model: type[_Body], settings: ApiSettings) -> _Body:
    """The request's JSON object as `model`. Raises BadRequest and BodyTooLarge, and Unauthorized
    where the caller's key was revoked while it came."""
    raw, caller = await _read(request, settings), caller_of(request)
    if len(raw) <= _SHORT_BYTES:
        body = _understood(raw, model)
    else:
        beside: LongBodies = request.app.state.long_bodies
        body = await beside.read(caller.principal, lambda: _understood(raw, model))
    access: Access = request.app.state.access
    access.require_known(caller)
    return body


def _understood(raw: bytes, model: type[_Body]) -> _Body:
    if _has_more_signs(raw, _MOST_SIGNS):
        raise BadRequest(
            f"The body has more than {_MOST_SIGNS} lists, objects and names of fields.",
            fix="Send less in one request; numbers and text may be as many as fit.",
        )
    try:
        fields = _parse(raw)
    except RecursionError:
        raise BadRequest("The body is nested too deeply.", fix="Send a flat object.") from None
    except ValueError as error:
        raise BadRequest(
            f"The body is not valid JSON: {error}.", fix="Send one JSON object in UTF-8."
        ) from None
    if not isinstance(fields, dict):
        raise BadRequest("The body is not a JSON object.", fix="Send one JSON object.")
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _bad_request(error, fields, list(model.model_fields)) from None


async def _read(request: Request, settings: ApiSettings) -> bytes:
    limit = settings.max_body_bytes
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise BadRequest(
            f"The body is compressed ({encoding[:_SHOWN_CHARS]}).",
            fix="Switch off the client's compression of requests.",
            param="Content-Encoding",
        )
    too_large = BodyTooLarge(
        f"The body is larger than {limit} bytes.", fix="Send less text in one request."
    )
    if int(request.headers.get("content-length", 0)) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise BadRequest(
            f"The body did not arrive within {settings.body_timeout_s:g} s.", fix="Try again."
        ) from None
    return bytes(body)


def _parse(raw: bytes) -> Any:
    """Raises ValueError, RecursionError."""
    # Python reads its codec "utf-8-sig" from a file, which may be one too many to have open.
    text = raw.removeprefix(BOM_UTF8).decode()
    with _no_collecting():
        fields = json.loads(text, parse_constant=_refuse_constant)
    if "\\u" in text:
        # What is left of a backslash begins an escape.
        escapes = text.replace(r"\\", "--")
        if _HIGH_ALONE.search(escapes) or _LOW_ALONE.search(escapes):
            raise ValueError("half a surrogate pair is no text")
    return fields


def _has_more_signs(raw: bytes, most: int) -> bool:
    """Whether more than so many of `_SIGNS` are outside of its strings."""
    if sum(map(raw.count, _SIGNS)) <= most:
        return False
    found = at = 0
    for string in _STRING.finditer(raw):
        found += sum(raw.count(sign, at, string.start()) for sign in _SIGNS)
        if found > most:
            return True
        at = string.end()
    return found + sum(raw.count(sign, at) for sign in _SIGNS) > most


@contextmanager
def _no_collecting() -> Iterator[None]:
    """A million small values come to the garbage collector's notice again and again while they are
    made, which takes far longer than to make them; none of them is garbage yet."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _bad_request(error: ValidationError, fields: dict[str, Any], known: list[str]) -> BadRequest:
    """The first problem, by the name of its field as the client wrote it."""
    first, *others = error.errors(include_url=False, include_input=False)
    problems: list[Any] = [first, *(p for p in others if p["loc"][:1] == first["loc"][:1])]
    # Every branch of a union reports; the one that got furthest is the one that was meant.
    paths = [_path(problem["loc"], fields) for problem in problems]
    path = max(paths, key=len)
    problem = problems[paths.index(path)]
    param = ".".join(map(str, path))[:_SHOWN_CHARS] or None
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(path[-1])[:_SHOWN_CHARS], known, n=1)
        hint = f"Did you mean {near[0]}?" if near and len(path) == 1 else "Leave it out."
        return BadRequest(f"Unknown field: {param}.", fix=hint, param=param)
    if problem["type"] == "missing":
        missing = ".".join(map(str, [*path, problem["loc"][-1]]))
        return BadRequest(f"The field {missing} is missing.", fix="Add it.", param=missing)
    same = [p["msg"] for p, its in zip(problems, paths, strict=True) if its == path]
    why = " / ".join(dict.fromkeys(same)).replace("Value error, ", "")[:_MAX_WHY]
    where = f"{param}: " if param else ""
    fix = problem["ctx"]["fix"] if problem["type"] == NOT_SUPPORTED else "Correct the request."
    return BadRequest(f"{where}{why}.", fix=fix, param=param)


def _path(location: tuple[int | str, ...], fields: dict[str, Any]) -> list[int | str]:
    """The part of `location` that is in the body; names of a union's branches are not."""
    path: list[int | str] = []
    place: Any = fields
    for part in location:
        in_list = isinstance(place, list) and isinstance(part, int)
        if in_list or (isinstance(place, dict) and part in place):
            place = place[part]
            path.append(part)
    return path
