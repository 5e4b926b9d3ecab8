"""What the fields of a chat are called by other forms of it, where errors name them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mesh.errors import MeshError

_SAID = re.compile(r"messages(\[\d+\])?|prompt")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """`renamed` are patterns of a chat's fields and what stands for them; `said` is the field with
    what is said."""

    renamed: Sequence[tuple[re.Pattern[str], str]]
    said: str

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Have errors that are raised meanwhile name fields so."""
        try:
            yield
        except MeshError as error:
            for chat, here in self.renamed:
                error.message = chat.sub(here, error.message)
                error.fix = chat.sub(here, error.fix)
                error.param = error.param and chat.sub(here, error.param)
            if error.param and _SAID.fullmatch(error.param):
                error.param = self.said
            raise
