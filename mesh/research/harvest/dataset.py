"""The prompts of a harvest: a text file, one prompt a line, or JSON lines with a ``text``.

Reads line by line, so that a data set need not fit the memory. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import BadRequest

BATCH_CHARS = 256 << 10
_FORM = "Use UTF-8 with one prompt a line, or .jsonl with a `text` in each line."


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts that are run together; `lines` are their numbers in the file, from 0."""

    number: int
    lines: tuple[int, ...]
    texts: tuple[str, ...]


def digest(path: Path) -> str:
    """The SHA-256 of the file. Raises BadRequest when it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise BadRequest(
            f"{path} cannot be read: {error.strerror}.",
            fix="Name a readable file.",
            param="dataset",
        ) from error


def batches(path: Path, size: int) -> Iterator[PromptBatch]:
    """The same batches every time: up to `size` prompts each. Empty lines are left out.

    Raises BadRequest, naming the line, for text that is not UTF-8 or JSON without a ``text``, and
    for a file without a prompt.
    """
    lines: list[int] = []
    texts: list[str] = []
    chars = number = 0
    for line, text in _prompts(path):
        if texts and (len(texts) == size or chars + len(text) > BATCH_CHARS):
            yield PromptBatch(number, tuple(lines), tuple(texts))
            lines, texts, chars, number = [], [], 0, number + 1
        lines.append(line)
        texts.append(text)
        chars += len(text)
    if not texts:  # a line that is not empty always leaves some
        raise BadRequest(f"{path} has no prompt.", fix=_FORM, param="dataset")
    yield PromptBatch(number, tuple(lines), tuple(texts))


def _prompts(path: Path) -> Iterator[tuple[int, str]]:
    is_json = path.suffix in {".jsonl", ".ndjson"}
    with path.open("rb") as stream:
        for number, raw in enumerate(stream):
            try:
                text = raw.decode().rstrip("\r\n")
                if is_json and text.strip():
                    text = _text_of(text)
            except UnicodeDecodeError as error:
                raise _bad(path, number, "this is no UTF-8") from error
            except ValueError as error:
                raise _bad(path, number, str(error)) from error
            if text.strip():
                yield number, text


def _text_of(line: str) -> str:
    """Raises ValueError with the reason."""
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"this is no JSON ({error})") from error
    text = fields.get("text") if isinstance(fields, dict) else None
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError("its `text` has half a surrogate pair") from error
        return text
    raise ValueError("this is no object with a `text` that is a string")


def _bad(path: Path, number: int, why: str) -> BadRequest:
    return BadRequest(
        f"{path}, line {number + 1}: {why}.",
        fix=_FORM,
        param="dataset",
    )
