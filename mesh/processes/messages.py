"""The messages between the daemon and its processes: one frozen class each, and their codec.

On the channel a message is a msgpack map with its class's name as ``type``. Reading is strict: a
message that is not among those asked for, a field that nobody knows, is missing or has another type
refuses it. Here stands what all processes have in common; what one of them is told and says stands
beside it (`mesh.shard.commands`, `mesh.pipeline.commands`, `mesh.interventions.jobs.commands`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Union

import msgspec

from mesh.codec import from_text, to_text
from mesh.errors import BadRequest, MeshError, from_dict
from mesh.identity.tls import TlsMaterial
from mesh.processes.lifecycle import LoadNeed
from mesh.wire.messages import Hello


class ProcessMessage(
    msgspec.Struct, frozen=True, tag=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One message. Fields are plain data, dataclasses of it, paths and `MeshError`."""


class Start(ProcessMessage, frozen=True):
    """The first command of a process, which each kind of process extends.

    Its links say `hello` and prove it with `tls`, whose members are trusted until a `Trust` comes.
    """

    hello: Hello
    tls: TlsMaterial


class Trust(ProcessMessage, frozen=True):
    """Command: these members (certificates, DER) are trusted from now on, and nobody else."""

    members: tuple[bytes, ...]


class Stop(ProcessMessage, frozen=True):
    """Command: take nothing new, give what runs `grace_s` to end, then end the process."""

    grace_s: float = 0.0


class Cancel(ProcessMessage, frozen=True):
    """Command: end what was begun under this id; nobody waits for it."""

    id: str


class Failed(ProcessMessage, frozen=True):
    """Answer: the start failed."""

    error: MeshError


class Alive(ProcessMessage, frozen=True):
    """Answer: the event loop of the process turns."""


class Loads(ProcessMessage, frozen=True):
    """Answer: what the process begins to load, which may cost it its life; None: it is done."""

    loading: LoadNeed | None


class LoadProgress(ProcessMessage, frozen=True):
    """Answer: how far the load under way is; what is done now, and bytes of it."""

    phase: str
    done_bytes: int
    total_bytes: int


class LastWords(ProcessMessage, frozen=True):
    """Answer: why the process can do nothing any more, before it ends itself."""

    error: MeshError


Handlers = dict[type[ProcessMessage], Callable[[Any], object]]
"""What a side understands: by the class of a message what is done with it, on the event loop."""


def encode(message: ProcessMessage) -> bytes:
    """The bytes of a message."""
    return _ENCODER.encode(message)


class Inbox:
    """Hands each message to its handler; `handlers` are all that is understood."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers
        self._decoder = _decoder(handlers)

    def read(self, body: bytes) -> None:
        """Decode one message and handle it. Raises BadRequest for one that is not understood."""
        try:
            message = self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise BadRequest(
                f"A message between the daemon and its process is not understood: {error}.",
                fix="Start the daemon anew: hearthnet may have been updated while it ran.",
            ) from error
        self.take(message)

    def take(self, message: ProcessMessage) -> None:
        """Handle one message."""
        self._handlers[type(message)](message)


def rehearse() -> None:
    """Have msgspec learn each kind of message that is known by now, which a forked process then
    need not: it remembers what it has found about a class."""
    kinds = [ProcessMessage]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
        _decoder([kind])


def _decoder(kinds: Iterable[type[ProcessMessage]]) -> msgspec.msgpack.Decoder[Any]:
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
