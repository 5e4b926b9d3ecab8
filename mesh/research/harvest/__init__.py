"""Harvests: activations of many prompts, left as files on the nodes that computed them."""

from __future__ import annotations
