"""Which session tokens the hearth has revoked, kept up with its log.

Reads again only what changed, and only when the log's change can have changed it: an author may
have said much, and the log changes often.
"""

from __future__ import annotations

from mesh.events.log import LogChange
from mesh.events.state import AuthorFold, State
from mesh.events.types import TOKEN_REVOKED
from mesh.types import NodeId

_MAX_ID_CHARS = 256
"""As many as the API takes; a token's own id is shorter."""


class Revocations:
    """Begins with the log's state, and is to be told of every change of it."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._tokens: frozenset[str] = frozenset()
        self._read: dict[NodeId, tuple[AuthorFold, frozenset[str]]] = {}
        self._is_due = True

    def note(self, change: LogChange) -> None:
        """The log has changed."""
        before, self._state = self._state, change.state
        self._is_due |= (
            bool(change.decisions)
            or before.frozen != change.state.frozen
            # The first event of a chain may end another one.
            or any(event.type == TOKEN_REVOKED or event.seq == 1 for event in change.events)
        )

    @property
    def tokens(self) -> frozenset[str]:
        """The ids of tokens that count no longer; the same object where they are the same."""
        if self._is_due:
            self._is_due = False
            authors = self._state.authors.items()
            self._read = {author: (fold, self._of(author, fold)) for author, fold in authors}
            tokens = frozenset[str]().union(*(found for _, found in self._read.values()))
            if tokens != self._tokens:
                self._tokens = tokens
        return self._tokens

    def _of(self, author: NodeId, fold: AuthorFold) -> frozenset[str]:
        before = self._read.get(author)
        if before is not None and before[0] is fold:
            return before[1]
        return frozenset(
            name
            for kind, name in fold.facts
            if kind == TOKEN_REVOKED and len(name) <= _MAX_ID_CHARS
        )
