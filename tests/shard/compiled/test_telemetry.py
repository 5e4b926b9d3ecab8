"""Whoever computes with onnxruntime does not have it tell its makers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_onnxruntime_is_told_to_keep_to_itself(tmp_path: Path) -> None:
    # What it would send lies below the home first. Variables of a build server would hold it back.
    passed_on = {name: text for name, text in os.environ.items() if name in ("PATH", "PYTHONPATH")}
    program = "import mesh.shard.compiled, onnxruntime; onnxruntime.SessionOptions()"
    subprocess.run(
        [sys.executable, "-c", program], env={**passed_on, "HOME": str(tmp_path)}, check=True
    )
    assert not list(tmp_path.iterdir())
