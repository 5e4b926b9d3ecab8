"""A daemon whose asker has a draft model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mesh.models.builtin import checkpoint_dir
from tests.warm.daemons import WarmNode

DRAFT_MODEL = "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__DRAFT_MODEL"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_the_answer_is_the_same_and_status_says_what_drafts(tmp_path: Path) -> None:
    small = shutil.copytree(checkpoint_dir(), tmp_path / "small")
    with WarmNode("sofa", tmp_path / "sofa", (), {DRAFT_MODEL: str(small)}) as sofa:
        sofa.wait_ready()

        def answered(*, draft: bool) -> dict[str, Any]:
            # At this temperature the text does not repeat itself: lookup has nothing to say.
            body = {
                "model": "builtin", "prompt": "Once upon a time", "max_tokens": 60, "seed": 3,
                "temperature": 0.8, "ignore_eos": True, "hearthnet": {"draft": draft},
            }  # fmt: skip
            response = sofa.post("/v1/completions", body)
            response.raise_for_status()
            facts: dict[str, Any] = response.json()["hearthnet"]
            return facts

        plain, drafted = answered(draft=False), answered(draft=True)
        assert drafted["token_ids"] == plain["token_ids"]
        assert plain["timings"]["drafted_tokens"] == 0
        assert 0 < drafted["timings"]["accepted_tokens"] <= drafted["timings"]["drafted_tokens"]
        reasons = sofa.get("/mesh/v1/status")["reasons"]
        assert any("draft model small: 8 layers in " in reason for reason in reasons), reasons
