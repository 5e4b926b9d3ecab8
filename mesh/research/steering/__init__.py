"""Named steering edits of the hearth: who published which, and their files."""

from __future__ import annotations
