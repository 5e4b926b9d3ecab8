"""The log's tables, as an append-only list of named steps. Never change or reorder one."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from mesh.errors import SchemaTooNew

Step = Callable[[sqlite3.Connection], object]

_STEPS: list[Step] = []


def _step(function: Step) -> Step:
    _STEPS.append(function)
    return function


@_step
def create_decisions(connection: sqlite3.Connection) -> None:
    """Bodies and signatures as received; in the order of rows parents come first.

    `digest` notices a changed byte in any column.
    """
    connection.execute(
        "CREATE TABLE decisions (id BLOB NOT NULL UNIQUE, digest BLOB NOT NULL, body BLOB NOT NULL,"
        " signature BLOB NOT NULL)"
    )


@_step
def create_chains(connection: sqlite3.Connection) -> None:
    """Events, as decisions are kept. Rows of one author come in the order of its chain."""
    connection.execute(
        "CREATE TABLE events (author TEXT NOT NULL, generation INTEGER NOT NULL,"
        " seq INTEGER NOT NULL, lamport INTEGER NOT NULL, id BLOB NOT NULL, digest BLOB NOT NULL,"
        " body BLOB NOT NULL, signature BLOB NOT NULL)"
    )
    connection.execute("CREATE UNIQUE INDEX events_by_chain ON events (author, generation, seq)")


@_step
def create_forks(connection: sqlite3.Connection) -> None:
    """Evidence: two signed events by one author in one place, the lowest known."""
    connection.execute(
        "CREATE TABLE forks (author TEXT PRIMARY KEY, generation INTEGER NOT NULL,"
        " seq INTEGER NOT NULL, first_body BLOB NOT NULL, first_signature BLOB NOT NULL,"
        " second_body BLOB NOT NULL, second_signature BLOB NOT NULL)"
    )


@_step
def create_notes(connection: sqlite3.Connection) -> None:
    """Single values: the hearth, this node's own head, the snapshot of the state."""
    connection.execute("CREATE TABLE notes (name TEXT PRIMARY KEY, value BLOB NOT NULL)")


@_step
def create_orphans(connection: sqlite3.Connection) -> None:
    """Valid events that a repair saved, but whose predecessor it did not find."""
    connection.execute(
        "CREATE TABLE orphans (author TEXT NOT NULL, generation INTEGER NOT NULL,"
        " seq INTEGER NOT NULL, body BLOB NOT NULL, signature BLOB NOT NULL,"
        " PRIMARY KEY (author, generation, seq))"
    )


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the file up to date, by all steps it lacks or by none. Raises SchemaTooNew."""
    connection.execute("CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY)")
    applied = {name for (name,) in connection.execute("SELECT name FROM migrations")}
    unknown = applied - {step.__name__ for step in _STEPS}
    if unknown:
        raise SchemaTooNew(
            f"A newer hearthnet has written this event log ({', '.join(sorted(unknown))}).",
            fix="Run that version, or a newer one.",
        )
    missing = [step for step in _STEPS if step.__name__ not in applied]
    if missing:
        connection.execute("BEGIN IMMEDIATE")
        for step in missing:
            step(connection)
            connection.execute("INSERT INTO migrations VALUES (?)", (step.__name__,))
        connection.execute("COMMIT")
