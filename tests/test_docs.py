"""The reference pages say what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

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
    found = {(match[1], file) for file, text in sentences(named) for match in named.finditer(text)}
    assert (" up", "config/sections.py") in found
    assert {(words, file) for words, file in found if not _is_command(words.split())} == set()


@cache
def _hearthnet() -> Any:
    return get_command(app)


def _is_command(words: list[str]) -> bool:
    command = _hearthnet()
    for word in words:
        verbs = getattr(command, "commands", None)
        if verbs is None:
            return True  # an argument
        if word not in verbs:
            return False
        command = verbs[word]
    return True


def test_pages_name_only_options_that_exist() -> None:
    typed = re.compile(r"(?:`|^|\$ +)hearthnet ([^`#|&\n]*)", re.MULTILINE)
    option = re.compile(r"(?<!\S)\[?(--[a-z-]+)")
    named = {
        (page.name, words, each)
        for page in pages()
        if page.name != "CHANGELOG.md"  # which tells of those that were, too
        for words in typed.findall(page.read_text("utf-8"))
        for each in option.findall(words)
    }
    assert {"--layers", "--host", "--wait-ready"} <= {each for _, _, each in named}
    assert {one for one in named if one[2] not in _options_of(one[1].split())} == set()


def _options_of(words: list[str]) -> set[str]:
    command: Any = _hearthnet()
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return options | {"--help"}


def pages() -> list[Path]:
    """Every page that people read."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_links_between_pages_lead_somewhere() -> None:
    links = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")
    found = [(page, link) for page in pages() for link in links.findall(page.read_text("utf-8"))]
    assert len(found) > 20
    assert [(p.name, link) for p, link in found if not (p.parent / link).exists()] == []


def test_every_decision_is_in_the_index() -> None:
    decisions = ROOT / "docs/decisions"
    index = (decisions / "README.md").read_text("utf-8")
    named = {page.name for page in decisions.glob("*.md")} - {"README.md"}
    assert {name for name in named if f"({name})" not in index} == set()


def test_files_that_pages_name_exist() -> None:
    """A path of the code in backticks is one; generated files and other repositories are not."""
    paths = re.compile(r"`((?:mesh|tui|tests|tools|docs)/[\w./{},]+)`")
    gone = {
        (page.name, path)
        for page in pages()
        for path in paths.findall(page.read_text("utf-8"))
        if "{" not in path and not (ROOT / path).exists()
    }
    assert gone == set()
