"""Weights come from a neighbour, and what was fetched answers as the whole checkpoint does."""

from __future__ import annotations
