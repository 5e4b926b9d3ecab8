"""How narrow activations may travel; and what happens to those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mesh.health.metrics import Metrics
from mesh.pipeline.wire_dtype import WireVerdict, read_verdict, write_verdict
from mesh.types import WireDtype
from tests.checkpoints import make_checkpoint
from tests.mesh_e2e.spread import greedy, hugging_face, split, spread

LAYERS = 4
PROMPT = [7, 300, 41, 5, 88]
COUNT = 8


def scale(directory: Path, factor: float, *names: str) -> None:
    """Multiply these tensors of a checkpoint."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in names:
        tensors[name] = tensors[name] * factor
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.slow
async def test_a_model_that_keeps_within_fp16_travels_in_fp16(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama", layers=LAYERS)
    spans = split(LAYERS, 2)
    async with spread(directory, spans, tmp_path / "cache") as mesh:
        await mesh.use(spans)
        verdict = await mesh.probe()
        assert verdict.dtype is WireDtype.FP16, verdict.reason
        done = await mesh.generate(greedy(PROMPT, COUNT), verdict.dtype)
        assert done.widened == 0


@pytest.mark.slow
async def test_a_model_that_overflows_fp16_travels_wider(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama", layers=LAYERS)
    first = "model.layers.0.{}.weight"
    scale(directory, 1e5, first.format("self_attn.o_proj"), first.format("mlp.down_proj"))
    spans = split(LAYERS, 2)
    ids, _ = hugging_face(directory, PROMPT, COUNT)
    async with spread(directory, spans, tmp_path / "cache") as mesh:
        await mesh.use(spans)
        verdict = await mesh.probe()
        assert verdict.dtype is not WireDtype.FP16, verdict.reason
        assert "fp16" in verdict.reason
        assert "overflow" in verdict.reason
        done = await mesh.generate(greedy(PROMPT, COUNT), WireDtype.FP16)
        assert done.widened > 0
        assert list(done.token_ids) == ids  # nothing was cut to infinity on the way
    metrics = Metrics()
    metrics.frame(done)
    assert f"hearthnet_tensors_widened_total {done.widened}.0" in metrics.render().decode()


def test_a_verdict_is_kept_with_the_checkpoint(tmp_path: Path) -> None:
    verdict = WireVerdict(WireDtype.BF16, "fp16: 3 tensors overflow; bf16: fine")
    write_verdict(tmp_path, "0" * 64, verdict)
    assert read_verdict(tmp_path, "0" * 64) == verdict
    assert read_verdict(tmp_path, "1" * 64) is None


@pytest.mark.parametrize("text", ["", "{}", '{"dtype": "fp99", "reason": ""}'])
def test_a_verdict_of_another_version_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wire-dtype" / f"{'0' * 64}.json"
    path.parent.mkdir()
    path.write_text(text)
    assert read_verdict(tmp_path, "0" * 64) is None
