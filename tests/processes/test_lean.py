"""Importing transformers without torch's compiler, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
from pathlib import Path
{first}
import torch
from mesh.models.builtin import checkpoint_dir
from mesh.models.load import load_ends, load_span
from mesh.models.manifest import read_manifest
from mesh.types import LayerRange

HEAVY = ("torch._dynamo", "sympy", "torch.distributed.tensor", "torch.onnx")
manifest = read_manifest(checkpoint_dir(), cache_dir=Path(sys.argv[1]))
where = {{"dtype": torch.float32, "device": torch.device("cpu")}}
ends = load_ends(manifest, **where)
span = load_span(manifest, LayerRange(0, manifest.total_layers), **where)
hidden = ends.embed(torch.tensor([[5, 6, 7]]), 0)
out = span.module(inputs_embeds=hidden, use_cache=False).last_hidden_state
logits = ends.logits(out)
imported = [name for name in HEAVY if name in sys.modules]
compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.ones(2)).tolist()
found = {{"imported": imported, "logits": logits[0, -1].tolist(), "compiled": compiled}}
print(json.dumps(found))
"""


def run(first: str, cache: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(first=first), str(cache)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_compiler_is_left_out_and_can_be_had_later(tmp_path: Any) -> None:
    lean = run("from mesh.processes.lean import import_modelling; import_modelling()", tmp_path)
    plain = run("", tmp_path)
    assert lean["imported"] == []
    assert "torch._dynamo" in plain["imported"]
    assert lean["logits"] == plain["logits"]
    assert lean["compiled"] == plain["compiled"] == [3, 3]
