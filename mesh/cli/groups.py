"""What a group of verbs says of them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class VerbGroup(TyperGroup):
    """Its help has each verb's first sentence to its end, over as many lines as that takes."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """As click does, which cuts every sentence to what a line has room for."""
        named = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [
            (name, verb.get_short_help_str(limit=1000))
            for name, verb in named
            if verb is not None and not verb.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
