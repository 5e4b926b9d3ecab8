"""A fetcher that gives its bytes without a look at them, as one that means to lie does."""

from __future__ import annotations

from mesh.transfers import process
from mesh.transfers.rereading import Rereading


class Unread(Rereading):
    """Says of nothing that it has changed."""

    async def before_giving(self, sha256: str, name: str) -> None:
        """Whatever is there will do."""


def main() -> None:
    """Be the process."""
    process.main(Unread)
