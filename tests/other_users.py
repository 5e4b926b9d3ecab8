"""Threads whose sockets belong to other users of the machine, as far as the kernel is concerned."""

from __future__ import annotations

import ctypes

# Loaded by now: those who are not root may be unable to read where Python is installed.
import encodings.idna  # noqa: F401
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

NEEDS_ROOT = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root makes sockets for other users"
)
ANNA, BEN = 23001, 23002


def as_user(uid: int) -> ThreadPoolExecutor:
    """Runs one thing at a time; what it opens is `uid`'s."""

    def become() -> None:
        libc = ctypes.CDLL(None)
        libc.setfsuid(uid)
        assert libc.setfsuid(-1) == uid

    return ThreadPoolExecutor(1, f"user {uid}", initializer=become)
