"""The one way in for what comes from outside: bytes to bounded plain values, those to a class.

A form is a dataclass (or a msgspec Struct) whose annotations say all that its fields may be:
`msgspec.Meta` for sizes and ranges, any function in `Annotated` for more, `__post_init__` for what
the fields may not be together. Functions and `__post_init__` refuse with ValueError. Conversion is
strict: no type is made of another, except an enum, a tuple or a time of what carries it.

Whatever is wrong is one `Fault`, which names the field, what was expected and what came; the reader
turns it into its own typed error. Knows nothing of what is read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, KeysView, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgpack
import msgspec

T = TypeVar("T")


class SignedForm(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="version"
):
    """The fields of something signed in their order behind the version, which is the `tag`. One is
    called `payload`."""


Form = TypeVar("Form", bound=SignedForm)

Buffer = bytes | bytearray | memoryview
MAX_ELEMENTS = 1024
"""Elements of any one array or map. Each nested array may make msgpack reserve this many slots
before it sees that the input ends: at `MAX_DEPTH` 8 MiB."""
MAX_DEPTH = 12
MAX_TEXT = 256
MAX_FILE_BYTES = 1 << 20
_MAX_SHOWN = 60

_AS_THEY_ARE = (bytes, bytearray, memoryview)
"""Without these msgspec would read text as base64 where bytes are expected."""


class Fault(ValueError):
    """Why something from outside is unusable. `field` is the innermost name, '' for the whole."""

    def __init__(self, why: str, field: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.field = field


def printable(text: str) -> None:
    """For names that end up on terminals."""
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")


def finite(number: float) -> None:
    """For numbers that are computed with."""
    if not math.isfinite(number):
        raise ValueError("is not finite")


Int63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
UInt32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT), printable]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


# Bytes to plain values.


def unpack_map(body: Buffer) -> dict[str, Any]:
    """Exactly one msgpack map, as `unpack`. Raises Fault."""
    value = unpack(body)
    if type(value) is not dict:
        raise Fault("is not a map")
    return value


def unpack(body: Buffer) -> Any:
    """Exactly one msgpack value; keys of maps are text, each once. Raises Fault.

    Extension types, timestamps, trailing bytes and what is deep or wide enough to cost memory are
    refused.
    """
    try:
        value = msgpack.unpackb(
            body, raw=False, strict_map_key=True, ext_hook=_refuse_extension,
            object_pairs_hook=_unique_keys, max_array_len=MAX_ELEMENTS, max_map_len=MAX_ELEMENTS,
            max_ext_len=0,
        )  # fmt: skip
    except ValueError as error:  # every msgpack error is one, and so is a wrong UTF-8 sequence
        raise Fault(f"is not strict msgpack: {error!s:.200}") from error
    _check_depth(value)
    return value


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code} with {len(data)} bytes")


def _unique_keys(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    if not all(type(key) is str for key in result):
        raise ValueError("a key that is not text")
    return result


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            if type(parent) in (dict, list)
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) in (dict, list)
        ]
        if not level:
            return
    raise Fault(f"is nested deeper than {MAX_DEPTH}")


class Canonical(Generic[Form]):
    """What is signed: a msgpack array in a fixed order, of which there is one encoding only.

    `payload` may hold plain values down to `depth` levels; `check` refuses, with Fault, what the
    fields may not be together.
    """

    def __init__(
        self,
        form: type[Form],
        check: Callable[[Form], None] | None = None,
        *,
        max_bytes: int,
        depth: int,
    ) -> None:
        self._check = check
        self._version = form.__struct_config__.tag
        self._names = ("version", *form.__struct_fields__)
        self._decoder = msgspec.msgpack.Decoder(form)
        self._encoder = msgspec.msgpack.Encoder()
        self._max_bytes = max_bytes
        self._depth = depth

    def pack(self, value: Form) -> bytes:
        """The bytes to sign. Raises Fault for what msgpack has no form for; `unpack` the rest."""
        try:
            return bytes(msgpack.packb([self._version, *msgspec.structs.astuple(value)]))
        except (TypeError, ValueError, OverflowError) as error:
            raise Fault(f"cannot be written: {error}") from error

    def unpack(self, body: bytes) -> Form:
        """What the bytes say, strictly. Raises Fault.

        Refused: too many bytes, anything that is not the one canonical encoding of its content, a
        field of another form, and in the payload extension types, NaN and infinities, map keys that
        are not text, too many elements or levels.
        """
        if len(body) > self._max_bytes:
            raise Fault(f"has {len(body)} bytes, more than {self._max_bytes}")
        try:
            value = self._decoder.decode(body)
        # It raises whatever the input provokes: all of it means that this is not what it says.
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise _fault(error, None, self._names) from error
        if not is_plain(value.payload, self._depth):  # type: ignore[attr-defined]
            raise Fault("has more in it than plain values, or is too large or too deep", "payload")
        if self._encoder.encode(value) != body:
            raise Fault("is not in its one canonical encoding")
        if self._check is not None:
            self._check(value)
        return value


def is_plain(value: object, depth: int) -> bool:
    """Whether a decoded value is made of msgpack's plain types only, not deeper than `depth`."""
    if value is None or type(value) in (str, int, bytes, bool):
        return True
    if type(value) is float:
        return math.isfinite(value)
    if depth == 0:
        return False
    if type(value) is list:
        return len(value) <= MAX_ELEMENTS and all(is_plain(item, depth - 1) for item in value)
    if type(value) is dict:
        return len(value) <= MAX_ELEMENTS and all(
            type(key) is str and is_plain(item, depth - 1) for key, item in value.items()
        )
    return False


def parse_json(text: bytes | str, map_type: type[dict[str, Any]] | None = None) -> Any:
    """The value of a JSON text, as of a record on disk. Raises Fault."""
    try:
        return json.loads(text, object_hook=map_type)
    except (ValueError, RecursionError) as error:
        raise Fault(f"is not JSON: {error!s:.200}") from error


def read_file(path: Path, form: type[T], max_bytes: int = MAX_FILE_BYTES) -> T:
    """The record that a JSON file holds. Raises Fault, and OSError where it cannot be read."""
    with path.open("rb") as stream:
        text = stream.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise Fault(f"has more than {max_bytes} bytes")
    return convert(parse_json(text), form)


# Plain values to a class, and back.


def convert(values: object, form: type[T], *, complete: bool = False, closed: bool = False) -> T:
    """`values` as `form` has it. Raises Fault.

    `complete`: the map has all fields of the form, also those with a default. `closed`: it has no
    others; without it they are ignored, so that older nodes understand newer ones.
    """
    if (complete or closed) and isinstance(values, dict):
        _require_keys(values.keys(), field_names(form), complete=complete, closed=closed)
    try:
        result = msgspec.convert(values, form, builtin_types=_AS_THEY_ARE, dec_hook=from_text)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _fault(error, values) from error
    if (check := _check_of(form)) is not None:
        check(result, "")
    return result


def _require_keys(
    given: KeysView[Any], known: KeysView[str], *, complete: bool, closed: bool
) -> None:
    if complete and (lacking := sorted(known - given)):
        raise Fault(f"missing or unknown keys: {str(lacking)[:200]}", lacking[0])
    if closed and (more := sorted(map(str, given - known))):
        raise Fault(f"missing or unknown keys: {str(more)[:200]}", more[0][:64])


def plain(value: object) -> dict[str, Any]:
    """The map that `convert` reads a dataclass from: its fields in order, nested ones too."""
    said: dict[str, Any] = msgspec.to_builtins(value, builtin_types=_AS_THEY_ARE, enc_hook=to_text)
    return said


def to_text(value: object) -> str:
    """A value without fields, for msgspec: it is the text that its class's `parse` reads."""
    if not hasattr(value, "parse"):
        raise NotImplementedError(f"{type(value).__name__} has no form")
    return str(value)


def from_text(kind: type[Any], value: object) -> Any:
    """The inverse of `to_text`; white space is for people. Raises ValueError."""
    if type(value) is not str or value != value.strip():
        raise ValueError(f"expected `str` without white space around it, got {value!r:.100}")
    return kind.parse(value)


_NAMES: dict[type, KeysView[str]] = {}


def field_names(form: type) -> KeysView[str]:
    """The names of a form's fields, in order."""
    if form not in _NAMES:
        _NAMES[form] = {field.name: None for field in fields(form)}.keys()
    return _NAMES[form]


Check = Callable[[Any, str], None]


def _make_check(hint: Any) -> Check | None:
    """What to do with a value of this annotation, and below it; None for nothing."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        below = _check_of(arguments[0])
        own = [extra for extra in arguments[1:] if callable(extra)]
        return _run(own, below) if own or below else None
    if origin in (Union, UnionType):
        inner = [check for one in arguments if (check := _check_of(one)) is not None]
        return _optional(inner[0]) if inner else None
    if origin in (tuple, list, frozenset):
        is_fixed = origin is tuple and arguments[-1] is not Ellipsis
        members = [_check_of(one) for one in (arguments if is_fixed else arguments[:1])]
        return _members(members) if any(members) else None
    if is_dataclass(hint) or hasattr(hint, "_fields"):  # a NamedTuple has its fields' names too
        hints = get_type_hints(hint, include_extras=True)
        found = {name: check for name in hints if (check := _check_of(hints[name])) is not None}
        return _nested(found) if found else None
    return None


_check_of: Callable[[Any], Check | None] = cache(_make_check)


def _run(own: list[Callable[[Any], None]], below: Check | None) -> Check:
    def check(value: Any, name: str) -> None:
        for function in own:
            try:
                function(value)
            except ValueError as error:
                inner = getattr(error, "field", "")
                raise Fault(f"{error}, got {_shown(value)}", inner or name) from error
        if below is not None:
            below(value, name)

    return check


def _optional(inner: Check) -> Check:
    return lambda value, name: None if value in (None, msgspec.UNSET) else inner(value, name)


def _members(members: list[Check | None]) -> Check:
    """`members` are those of a tuple, or the one for all elements."""

    def check(values: Any, name: str) -> None:
        for value, one in zip(values, cycle(members), strict=False):
            if one is not None:
                one(value, name)

    return check


def _nested(checks: dict[str, Check]) -> Check:
    def check(value: Any, _: str) -> None:
        for name, inner in checks.items():
            inner(getattr(value, name), name)

    return check


# What msgspec says, as a fault.

_SAID = re.compile(r"(?P<why>.*?)(?: - at (?P<key>`key` in )?`(?P<path>\$.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+)\]|\[\.\.\.\]")


def _fault(error: Exception, values: object, array: Sequence[str] = ()) -> Fault:
    """The one translation of what msgspec refuses. `array` names the elements of an array."""
    said = _SAID.fullmatch(str(error))
    assert said is not None  # noqa: S101 - the pattern takes any text
    path = list(_STEP.finditer(said["path"] or ""))
    field = next((step["name"] for step in reversed(path) if step["name"]), "")
    if array and path and path[0]["index"]:
        field = array[int(path[0]["index"])]
    if isinstance(cause := error.__cause__, Fault):
        return Fault(cause.why, cause.field or field)
    if missing := _MISSING.fullmatch(said["why"]):
        return Fault("is missing", missing[1])
    why = said["why"]
    why = why[:1].lower() + why[1:] if cause is None else why
    shown = "" if ", got " in why or cause is not None else _got(path, values)
    return Fault(why + shown, field)


def _got(path: list[re.Match[str]], values: Any) -> str:
    try:
        for step in path:  # of a map's values msgspec does not say which: int("") is a ValueError
            values = values[step["name"] or int(step["index"] or "")]
    except (LookupError, TypeError, ValueError):
        return ""
    return f", got {_shown(values)}"


def _shown(value: object) -> str:
    """A value in a sentence: short, and harmless on a terminal."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes"
    if isinstance(value, list | tuple | dict | frozenset):
        return f"{len(value)} elements"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
