"""The messages between the daemon and its processes: one frozen class each, and their codec.

Some are notices; a `Request` is answered, and its class says with what, as in ``class
Load(Request[Loaded])`` (`exchange` does the rest). On the channel a message is a msgpack map with
its class's name as ``type``. Reading is strict: a message that is not among those understood, a
field that nobody knows, is missing or has another type refuses it. Here stands what all processes
have in common; what one of them is told and says stands beside it (`mesh.shard.commands`,
`mesh.pipeline.commands`, `mesh.interventions.jobs.commands`, `mesh.transfers.commands`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, Union, get_args

import msgspec

from mesh.codec import from_text, to_text
from mesh.errors import BadRequest, MeshError, from_dict
from mesh.identity.tls import TlsMaterial
from mesh.processes.lifecycle import LoadNeed
from mesh.wire.messages import Hello

A = TypeVar("A")


class ProcessMessage(
    msgspec.Struct, frozen=True, tag=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One message. Fields are plain data, dataclasses of it, paths and `MeshError`."""


class Request(ProcessMessage, Generic[A], frozen=True, kw_only=True):
    """What the other side answers, with an `A` or with a `MeshError`. Its number is given to it
    when it is asked."""

    number: int = 0


class Answer(ProcessMessage, frozen=True):
    """To the request of this number: its result, encoded, or why there is none."""

    number: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: MeshError | None = None

    @classmethod
    def to(cls, request: Request[A], result: A) -> Self:
        """This result."""
        return cls(request.number, msgspec.Raw(_ENCODER.encode(result)))

    def result_of(self, request: Request[A]) -> A:
        """What `to` was given. Raises BadRequest for what is no answer to that."""
        decoder = _decoder([_answer_type(type(request))])
        try:
            result: A = decoder.decode(self.result)
        except msgspec.MsgspecError as error:
            raise _not_understood(error) from error
        return result


class Cancel(ProcessMessage, frozen=True):
    """The request of this number is to be given up."""

    number: int


class Start(Request[A], Generic[A], frozen=True, kw_only=True):
    """The first command of a process, which each kind of process extends; it is answered once the
    process is ready for work.

    Its links say `hello` and prove it with `tls`, whose members are trusted until a `Trust` comes.
    `nice` is its niceness.
    """

    hello: Hello
    tls: TlsMaterial
    nice: int = 0


class Trust(ProcessMessage, frozen=True):
    """These members (certificates, DER) are trusted from now on, and nobody else."""

    members: tuple[bytes, ...]


class Stop(ProcessMessage, frozen=True):
    """Take nothing new, give what runs `grace_s` to end, then end the process."""

    grace_s: float = 0.0


class Alive(ProcessMessage, frozen=True):
    """The event loop of the process turns."""


class Loads(ProcessMessage, frozen=True):
    """What the process loads, which may cost it its life, None once it is done; how far that is:
    what is done now, and bytes of it."""

    loading: LoadNeed | None = None
    phase: str = ""
    done_bytes: int = 0
    total_bytes: int = 0

    def row(self, age_s: float) -> dict[str, Any] | None:
        """For `status`, JSON-able; it began `age_s` ago."""
        if self.loading is None:
            return None
        return {
            "name": self.loading.name,
            "need_mb": self.loading.need_mb,
            "age_s": round(age_s, 1),
            "phase": self.phase,
            "done_bytes": self.done_bytes,
            "total_bytes": self.total_bytes,
        }


class LastWords(ProcessMessage, frozen=True):
    """Why the process can do nothing any more, before it ends itself."""

    error: MeshError


Handlers = dict[type[ProcessMessage], Callable[[Any], Any]]
"""What a side understands: by the class of a message what is done with it, on the event loop. For a
request that is a coroutine, which returns the result."""


def encode(message: ProcessMessage) -> bytes:
    """The bytes of a message."""
    return _ENCODER.encode(message)


def reader(kinds: Iterable[type[ProcessMessage]]) -> Callable[[bytes], ProcessMessage]:
    """What reads a message of one of these kinds. Raises BadRequest for any other."""
    decoder = _decoder(kinds)

    def read(body: bytes) -> ProcessMessage:
        try:
            message: ProcessMessage = decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise _not_understood(error) from error
        return message

    return read


def rehearse() -> None:
    """Have msgspec learn each kind of message that is known by now, which a forked process then
    need not: it remembers what it has found about a class."""
    kinds = [ProcessMessage]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
        _decoder([kind])


def _not_understood(error: msgspec.MsgspecError) -> BadRequest:
    return BadRequest(
        f"A message between the daemon and its process is not understood: {error}.",
        fix="Start the daemon anew: hearthnet may have been updated while it ran.",
    )


def _answer_type(kind: type[Request[Any]]) -> Any:
    """The `A` of ``class Kind(Request[A])``."""
    (answer,) = get_args(kind.__orig_bases__[0])  # type: ignore[attr-defined]
    return answer


def _decoder(kinds: Iterable[Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(Union[tuple(kinds)], dec_hook=_from_plain)  # noqa: UP007


def _to_plain(value: object) -> object:
    if isinstance(value, MeshError):
        return value.to_dict()
    if isinstance(value, Path):
        return str(value)
    return to_text(value)


def _from_plain(kind: type[Any], value: Any) -> object:
    if issubclass(kind, MeshError):
        return from_dict(msgspec.convert(value, dict[str, Any]))
    if issubclass(kind, Path):
        return Path(msgspec.convert(value, str))
    return from_text(kind, value)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)
