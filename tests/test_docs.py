"""The reference pages say what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_reference_pages_are_up_to_date() -> None:
    run = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


def test_the_readme_names_only_verbs_that_exist() -> None:
    commands = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    for verb in ("up", "down", "chat", "run", "status", "peers", "models", "demo", "config show"):
        assert f"## `hearthnet {verb}`" in commands
