"""Importing torch and transformers without what nobody uses, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mesh.codec import MAX_FILE_BYTES
from mesh.processes.warm_parent import WITHOUT_THREADS

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

HEAVY = ("torch._dynamo", "sympy", "torch.distributed.tensor", "torch.onnx", "torch._refs",
    "torch._prims", "torch.ao.quantization", "torch.nn.quantized.modules")
manifest = read_manifest(checkpoint_dir(), cache_dir=Path(sys.argv[1]))
where = {{"dtype": torch.float32, "device": torch.device("cpu")}}
ends = load_ends(manifest, **where)
span = load_span(manifest, LayerRange(0, manifest.total_layers), **where)
hidden = ends.embed(torch.tensor([[5, 6, 7]]), 0)
out = span.module(inputs_embeds=hidden, use_cache=False).last_hidden_state
logits = ends.logits(out)
drawn = torch.rand(3, generator=torch.Generator().manual_seed(1)).tolist()
imported = [name for name in HEAVY if name in sys.modules]

import torch.ao.quantization.observer
from torch.masked import masked_tensor
import transformers
from torch.nn.quantized import Linear
classes = [transformers.LlamaForCausalLM.__name__, transformers.models.gpt2.GPT2Model.__name__]
parts = [torch.ao.quantization.MinMaxObserver.__name__, masked_tensor.__name__, Linear.__name__]
from mesh.processes.postponed import import_meta_kernels
import_meta_kernels()
on_meta = torch.fft.rfft(torch.empty(4, 6, device="meta")).shape
from torch.nn.attention.flex_attention import flex_attention
flexed = flex_attention(*torch.ones(3, 1, 2, 4, 16)).sum().item()
compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.ones(2)).tolist()
print(json.dumps({{"imported": imported, "logits": logits[0, -1].tolist(), "compiled": compiled,
    "drawn": drawn, "flexed": flexed, "classes": classes, "parts": parts, "on_meta": on_meta}}))
"""
LEAN = "from mesh.processes.lean import import_modelling; import_modelling()"


def run(script: str, *arguments: str, **variables: str) -> Any:
    """What the script says last, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True, text=True, timeout=120, check=False, env=variables or None,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_what_is_left_out_is_not_missed_and_can_be_had_later(tmp_path: Path) -> None:
    lean = run(SCRIPT.format(first=LEAN), str(tmp_path))
    plain = run(SCRIPT.format(first=""), str(tmp_path))
    assert lean.pop("imported") == []
    assert {"torch._dynamo", "torch._refs"} < {*plain.pop("imported")}
    assert lean == plain
    assert lean["on_meta"] == [4, 4]
    assert lean["compiled"] == [3, 3]


META = f"""
import json
{LEAN}
import torch
from mesh.shard.taps.extents import extent_of

operator = torch.ops.aten._fft_r2c.default
try:
    operator(torch.empty(4, 6, device="meta"), [1], 0, True)
    before = True
except NotImplementedError:
    before = False
bytes_ = extent_of(operator)(operator, (torch.ones(4, 6), [1], 0, True), {{}})
print(json.dumps([before, bytes_]))
"""


def test_what_an_operator_makes_is_told_by_kernels_that_were_postponed() -> None:
    assert run(META) == [False, 4 * 4 * 8]


NEEDY = f"""
import json, logging, sys
logging.basicConfig(stream=sys.stderr)
from mesh.processes import postponed
postponed._try = lambda torch: torch.no_such_thing
{LEAN}
kept = [sys.modules[name] for name in postponed.POSTPONED if name in sys.modules]
print(json.dumps([type(each).__name__ for each in kept]))
"""


def test_a_torch_that_cannot_do_without_is_imported_as_a_whole() -> None:
    assert {*run(NEEDY)} == {"module"}


FAILING = """
import json, sys
from mesh.processes import entry, postponed
def refuse(finder, module):
    raise AttributeError("another torch")
postponed._Postponing.exec_module = refuse
{main}
"""


def test_where_torch_cannot_be_imported_so_a_process_begins_again_without() -> None:
    as_shards = 'sys.argv[1:1] = ["mesh.shard.process"]; entry.main()'
    done = subprocess.run(
        [sys.executable, "-c", FAILING.format(main=as_shards)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "plainly" in done.stderr
    assert "part of the hearthnet daemon" in done.stderr  # it has become the shards' process

    as_warm_parent = "from mesh.processes import nursery; print(json.dumps(nursery.warm(())))"
    assert run(FAILING.format(main=as_warm_parent), **WITHOUT_THREADS) is None


NAMES = """
import json, sys
from pathlib import Path
{first}
import transformers
from transformers.utils import import_utils
find = import_utils.define_import_structure
if hasattr(find, "cache_clear"):
    find.cache_clear()  # transformers writes into what it was given
folder = Path(transformers.__file__).parent / "models"
found = [
    sorted((sorted(backends), file, sorted(names))
        for backends, files in given.items() for file, names in files.items())
    for given in (find(folder, prefix="models"), find(str(folder / "__init__.py")),
        find(folder / "llama"))
]
print(json.dumps([found, sorted(dir(transformers))]))
"""


KEPT = """
from mesh.paths import cache_dir
from mesh.processes.model_names import remembered
with remembered(cache_dir()):
    import transformers
"""


def test_names_that_were_kept_are_the_names_that_are_found(tmp_path: Path) -> None:
    kept_only = NAMES.format(first=KEPT)
    plain = run(NAMES.format(first=""))
    own = {"XDG_CACHE_HOME": str(tmp_path), "PATH": ""}
    assert run(NAMES.format(first=LEAN), **own) == plain
    (kept,) = (tmp_path / "hearthnet" / "transformers").iterdir()
    text = kept.read_text()
    other = text.replace("LlamaModel", "LlamaOdel")
    kept.write_text(other)
    assert run(kept_only, **own) != plain  # so it was read
    for damaged in (text[:-9], other + " " * MAX_FILE_BYTES):
        kept.write_text(damaged)
        assert run(kept_only, **own) == plain
        assert len(kept.read_text()) == len(text)
    assert [*kept.parent.iterdir()] == [kept]
