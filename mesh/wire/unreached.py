"""Why no connection could be opened, in words."""

from __future__ import annotations

import errno
import os
import sys

_UNNAMED = "Connect call failed"
"""What asyncio says instead of the system's words, with the address."""
_MACOS = (
    ", or macOS keeps this program from the local network: it lets what Terminal starts reach it,"
    " and services only where Local Network in the settings of Privacy & Security says so"
)


def why_unreached(error: Exception, platform: str = sys.platform) -> str:
    """What is wrong where opening a connection raised `error`, without a full stop."""
    if not isinstance(error, OSError) or not error.errno or _UNNAMED not in str(error):
        return str(getattr(error, "strerror", None) or error).rstrip(".")
    is_kept_away = platform == "darwin" and error.errno == errno.EHOSTUNREACH
    return os.strerror(error.errno) + (_MACOS if is_kept_away else "")
