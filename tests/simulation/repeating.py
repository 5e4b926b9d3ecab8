"""What both simulations share: running seeds, showing one again, and that a seed says it all."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar


class Shown(Protocol):
    """What a run's report has for whoever looks at it: `broken` are the promises it broke."""

    @property
    def broken(self) -> Sequence[str]: ...
    @property
    def trace_hash(self) -> str: ...
    @property
    def lines(self) -> Sequence[str]: ...


R = TypeVar("R", bound=Shown)


def show(
    description: str | None, run: Callable[..., R], facts: Callable[[R], Iterable[object]]
) -> int:
    """Be the command line of a simulation; the exit status, 1 when a run broke something.

    `facts` are printed above a run's lines.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--hash", action="store_true", help="only the hash of each trace")
    options = parser.parse_args()
    broken = 0
    for seed in options.seeds:
        report = run(seed, keep_lines=not options.hash)
        if not options.hash:
            print(*facts(report), *report.lines, sep="\n")
        print(seed, report.trace_hash, *report.broken, sep="\n  ")
        broken += bool(report.broken)
    return 1 if broken else 0


def unbroken(module: str, run: Callable[[int], R], seeds: range) -> Iterator[R]:
    """The report of each seed; fails at the end with how to see again what was broken."""
    broken = []
    for seed in seeds:
        report = run(seed)
        if report.broken:
            broken.append(f"python -m {module} {seed}   # {report.broken[0]}")
        yield report
    assert not broken, "\n".join([f"{len(broken)} of {len(seeds)} runs:", *broken[:10]])


def repeats(run: Callable[[int], Shown], seeds: Iterable[int]) -> None:
    """Fail unless each seed gives the same trace twice, and no two the same one."""
    hashes = [run(seed).trace_hash for seed in seeds]
    assert hashes == [run(seed).trace_hash for seed in seeds]
    assert len(set(hashes)) == len(hashes)


def same_in_other_processes(module: str, run: Callable[[int], Shown], seeds: Sequence[int]) -> None:
    """Fail unless processes that hash strings otherwise print the traces that this one gets."""
    printed = [
        subprocess.run(
            [sys.executable, "-m", module, "--hash", *map(str, seeds)],
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            check=True,
            text=True,
            timeout=300,
        ).stdout
        for salt in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert run(seeds[-1]).trace_hash in printed[0]
