"""`python -m tests.simulation SEED...`: show what happens in simulated runs, line by line."""

from __future__ import annotations

from tests.simulation.repeating import show
from tests.simulation.run import Report, run


def facts(report: Report) -> list[object]:
    return [*report.schedule.nodes, *report.schedule.faults]


if __name__ == "__main__":
    raise SystemExit(show(__doc__, run, facts))
