"""Coverage-guided search for inputs that break a target: ``python -m tests.fuzz TARGET SECONDS``.

Ends with another status than 0 when one is found, or when it takes too much memory or time.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["mesh"]):
    from tests.fuzz.seeds import seeds
    from tests.fuzz.targets import attempt

MEMORY_MB = 1024
INPUT_SECONDS = 5


def main() -> None:
    """Search until the time is over."""
    target, seconds = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        for number, seed in enumerate(seeds()[target]):
            (Path(directory) / str(number)).write_bytes(seed)
        # The most that libFuzzer reads is that of whoever started this as well, where it was more.
        before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        limits = [
            f"-max_total_time={seconds}", f"-rss_limit_mb={MEMORY_MB + before_mb}",
            "-max_len=20000", f"-timeout={INPUT_SECONDS}", "-print_final_stats=1",
            f"-artifact_prefix={directory}/",
        ]  # fmt: skip
        atheris.Setup(["fuzz", directory, *limits], lambda data: attempt(target, data))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
