"""`python -m tests.simulation.members SEED...`: show what happens in runs with eve."""

from __future__ import annotations

import argparse

from tests.simulation.members.run import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--hash", action="store_true", help="only the hash of each trace")
    options = parser.parse_args()
    broken = 0
    for seed in options.seeds:
        report = run(seed, keep_lines=not options.hash)
        if not options.hash:
            print(report.plan)
            print("\n".join(report.lines))
            print(dict(report.most), dict(report.tally))
        print(seed, report.trace_hash, *report.broken, sep="\n  ")
        broken += bool(report.broken)
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
