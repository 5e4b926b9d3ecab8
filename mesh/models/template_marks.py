"""The text of a chat template with its marks as they come to stand in a prompt.

Templates that make marks of a part and a suffix, as Hunyuan 3's does, have none of them in it.
"""

from __future__ import annotations

import re

_SUFFIX = re.compile(r"set (\w+) = '([^'{}]*)'")
_MADE = re.compile(r"'([^'{}]*)\{\}([^'{}]*)'\.format\((\w+)\)")


def spelled_out(template: str) -> str:
    """The same, each `'<part{}>'.format(NAME)` as `'<part-and-suffix>'` where NAME is set to a
    text in it."""
    suffixes = dict(_SUFFIX.findall(template))

    def made(found: re.Match[str]) -> str:
        suffix = suffixes.get(found[3])
        return found[0] if suffix is None else f"'{found[1]}{suffix}{found[2]}'"

    return _MADE.sub(made, template)
