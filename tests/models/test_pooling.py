"""How a checkpoint says that it makes one vector of a text, in each form that there is."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from mesh.errors import BadCheckpoint
from mesh.models.manifest import read_manifest
from mesh.models.pooling import MODULES, POOLING_CONFIG, read_pooling
from mesh.pipeline.checkpoint import load_asker
from mesh.pipeline.commands import AskerOptions
from mesh.types import GenerationRequest, ModelId
from tests.checkpoints import make_checkpoint, make_embedding_model
from tests.gguf_files import write_gguf

LAST = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}


def steps(*types: str, where: str = "1_Pooling") -> list[dict[str, Any]]:
    """As sentence-transformers writes it."""
    paths = ["", where, *(f"{number}_Step" for number in range(2, len(types)))]
    return [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.{each}"}
        for number, (each, path) in enumerate(zip(types, paths, strict=True))
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("toy") / "toy", "llama", layers=2)


USUAL = steps("models.Transformer", "models.Pooling", "models.Normalize")


@pytest.mark.parametrize(
    ("modules", "config", "kind", "why_not"),
    [
        (USUAL, LAST, "last", ""),
        (USUAL[:2], {"pooling_mode_mean_tokens": True}, "mean", ""),
        (USUAL, {"pooling_mode": "mean"}, "mean", ""),
        (USUAL, {"pooling_mode_max_tokens": True}, "", "max_tokens"),
        (USUAL, LAST | {"pooling_mode_mean_tokens": True}, "", "lasttoken, mean"),
        (steps("models.Transformer", "models.Pooling", "models.Dense"), LAST, "", "Dense"),
        (steps("models.Transformer", "models.Pooling", where="pool"), LAST, "", "elsewhere"),
        (USUAL, [], "", "cannot be read"),
        ([3], LAST, "", "cannot be read"),
        (None, None, "", "does not say"),
    ],
)
def test_pooling_is_read_as_sentence_transformers_writes_it(
    checkpoint: Path, modules: Any, config: Any, kind: str, why_not: str
) -> None:
    (checkpoint / POOLING_CONFIG).parent.mkdir(exist_ok=True)
    for name, content in ((MODULES, modules), (POOLING_CONFIG, config)):
        (checkpoint / name).write_text(json.dumps(content))
        if content is None:
            (checkpoint / name).unlink()
    pooling = read_pooling(read_manifest(checkpoint))
    assert pooling.kind == kind
    assert why_not in pooling.why_not
    assert bool(pooling.why_not) == (not kind)


def test_what_makes_vectors_needs_no_head(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "toy", "qwen3", layers=2, tied=False)
    whole = AutoModel.from_pretrained(directory, dtype=torch.float32)
    settings = json.loads((directory / "config.json").read_text())
    whole.save_pretrained(directory)  # names without a prefix, and no head
    (directory / "config.json").write_text(json.dumps(settings))
    options = AskerOptions("fp32", "cpu", 1, tmp_path / "cache")
    with pytest.raises(BadCheckpoint, match="lm_head"):
        load_asker(directory, ModelId("toy"), options)
    make_embedding_model(directory)
    model, _ = load_asker(directory, ModelId("toy"), options)
    assert model.abilities() == ("embedding",)
    hidden = torch.randn(1, 3, model.hidden_size)
    assert torch.equal(model.own_ends.norm(hidden), whole.norm(hidden))


def test_a_text_ends_as_the_checkpoint_has_it(checkpoint: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint, tmp_path / "toy")
    make_embedding_model(directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    ends = {}
    for said in (False, True):
        (directory / "tokenizer_config.json").write_text(
            json.dumps(settings | {"add_eos_token": said})
        )
        options = AskerOptions("fp32", "cpu", 1, tmp_path / "cache")
        model, _ = load_asker(directory, ModelId("toy"), options)
        request = GenerationRequest("r", ModelId("toy"), prompt="The kettle", embeds=True)
        ends[said] = model.text.prompt_ids(request, None)
        assert model.text.prompt_ids(replace(request, embeds=False), None) == ends[False]
    (end,) = ends[True][len(ends[False]) :]
    assert (ends[True][:-1], end in model.text.eos_ids) == (ends[False], True)


@pytest.mark.parametrize(
    ("said", "kind", "why_not"),
    [(3, "last", ""), (1, "mean", ""), (0, "", "does not say"), (2, "", "pooling_type 2")],
)
def test_pooling_is_read_from_gguf_files(
    checkpoint: Path, tmp_path: Path, said: int, kind: str, why_not: str
) -> None:
    file = write_gguf(
        checkpoint,
        tmp_path / "toy.gguf",
        edit=lambda writer: writer.add_uint32("llama.pooling_type", said),
    )
    pooling = read_pooling(read_manifest(file))
    assert pooling.kind == kind
    assert why_not in pooling.why_not
