"""The reference pages say what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from typer.main import get_command

from mesh.cli.main import app
from tests.test_config import sentences

ROOT = Path(__file__).parent.parent


def test_reference_pages_are_up_to_date() -> None:
    run = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


def test_texts_name_only_verbs_that_exist() -> None:
    named = re.compile(r"`hearthnet((?: [a-z]+)+)")
    found = {
        (match[1], file)
        for file, text in sentences(named)
        if not file.startswith("models/builtin/")  # what the model is taught is its own affair
        for match in named.finditer(text)
    }
    assert (" config show", "config.py") in found
    assert {(words, file) for words, file in found if not _is_command(words.split())} == set()


def _is_command(words: list[str]) -> bool:
    command = get_command(app)
    for word in words:
        verbs = getattr(command, "commands", None)
        if verbs is None:
            return True  # an argument
        if word not in verbs:
            return False
        command = verbs[word]
    return True


def test_the_readme_names_only_verbs_that_exist() -> None:
    commands = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    for verb in ("up", "down", "chat", "run", "status", "peers", "models", "demo", "config show"):
        assert f"## `hearthnet {verb}`" in commands
