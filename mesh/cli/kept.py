"""What `chat` keeps on this machine: what was typed, and saved conversations. All of it is 0600."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mesh.cli.conversation import SETTINGS, Conversation
from mesh.codec import Fault, convert, parse_json
from mesh.errors import BadValue, MeshError, NotFound
from mesh.private_files import read_private, write_private

HISTORY_ENTRIES = 1000
HISTORY_ENTRY_CHARS = 8 << 10
HISTORY_BYTES = 1 << 20
_CHAT_BYTES = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class TypedLines:
    """The texts that were typed, oldest first, in a file with a JSON text on each line.

    Several chats may add to one file; cutting it down may lose what another adds at that moment.
    """

    def __init__(
        self, path: Path, *, max_bytes: int = HISTORY_BYTES, max_entries: int = HISTORY_ENTRIES
    ) -> None:
        """A file that grows beyond `max_bytes` is cut to half of that."""
        self._path = path
        self._max_bytes = max_bytes
        self._max_entries = max_entries

    def read(self) -> list[str]:
        """The last `max_entries`.

        Raises KeyUnreadable when others could read the file, BadValue when it is no history.
        """
        try:
            content = read_private(self._path, 2 * self._max_bytes)
            texts = [convert(parse_json(line), str) for line in content.splitlines()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unusable(self._path, error) from error
        except Fault as fault:
            raise BadValue(
                f"{self._path} is no history of chats: {fault}.",
                fix="Remove it, or use --no-history.",
            ) from fault
        return texts[-self._max_entries :]

    def add(self, text: str) -> None:
        """One more; a text that is longer than what one types is left out. Raises as `read`."""
        if len(text) > HISTORY_ENTRY_CHARS:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(self._path, flags, 0o600), "ab", buffering=0) as file:
                before, line = file.tell(), _line(text)
                try:
                    while line:
                        line = line[file.write(line) :]
                except OSError:
                    file.truncate(before)  # a part of a line would make it no history
                    raise
                size = file.tell()
            if size > self._max_bytes:
                self._shorten()
        except OSError as error:
            raise _unusable(self._path, error) from error

    def _shorten(self) -> None:
        lines: list[bytes] = []
        size = 0
        for text in reversed(self.read()):
            size += len(_line(text))
            if size > self._max_bytes // 2:
                break
            lines.append(_line(text))
        write_private(self._path, b"".join(reversed(lines)))


def _line(text: str) -> bytes:
    return json.dumps(text).encode() + b"\n"


@dataclass(frozen=True)
class _Turn:
    role: Literal["user", "assistant"]
    content: str


@dataclass(frozen=True)
class _Saved:
    model: str
    system: str
    options: dict[str, str]
    turns: list[_Turn]
    version: Literal[1] = 1


class SavedChats:
    """Conversations by name, each in a file of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def names(self) -> list[str]:
        """What can be loaded."""
        found = self._directory.glob("*.json")
        return sorted(path.stem for path in found if _NAME.fullmatch(path.stem))

    def save(self, name: str, chat: Conversation) -> Path:
        """Keep it under this name, in the place of what had the name. Raises BadValue."""
        path = self._path(name)
        options = {key: _spelled(value) for key, value in chat.options.items()}
        turns = [_Turn(turn["role"], turn["content"]) for turn in chat.turns]  # type: ignore[arg-type]
        content = json.dumps(asdict(_Saved(chat.model, chat.system, options, turns))).encode()
        if len(content) > _CHAT_BYTES:
            raise BadValue(f"{name} would have {len(content)} bytes.", fix="/undo some of it.")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(path, content)
        except OSError as error:
            raise _unusable(path, error) from error
        return path

    def load(self, name: str, chat: Conversation) -> None:
        """Go on where the saved one ended. Raises NotFound, BadValue, KeyUnreadable."""
        path = self._path(name)
        try:
            saved = convert(parse_json(read_private(path, _CHAT_BYTES)), _Saved, closed=True)
            options = {key: SETTINGS[key](value) for key, value in saved.options.items()}
        except FileNotFoundError:
            known = ", ".join(self.names()) or "none"
            raise NotFound(
                f"No chat is saved as {name}; there are: {known}.", fix="/save NAME keeps one."
            ) from None
        except OSError as error:
            raise _unusable(path, error) from error
        except (KeyError, ValueError) as error:
            raise BadValue(f"{path} is no saved chat: {error}.", fix="Remove it.") from error
        chat.forget()
        chat.model, chat.system, chat.options = saved.model, saved.system, options
        chat.turns = [asdict(turn) for turn in saved.turns]

    def _path(self, name: str) -> Path:
        if _NAME.fullmatch(name) is None:
            raise BadValue(
                f"{name!r} is no name for a chat.",
                fix="Use up to 64 letters, digits, dots, dashes and underscores.",
            )
        return self._directory / f"{name}.json"


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unusable(path: Path, error: OSError) -> MeshError:
    return BadValue(f"{path}: {error.strerror}.", fix="Check the state directory.")
