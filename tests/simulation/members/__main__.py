"""`python -m tests.simulation.members SEED...`: show what happens in runs with eve."""

from __future__ import annotations

from tests.simulation.members.run import Report, run
from tests.simulation.repeating import show


def facts(report: Report) -> list[object]:
    return [report.plan, dict(report.most), dict(report.tally)]


if __name__ == "__main__":
    raise SystemExit(show(__doc__, run, facts))
