"""What the settings say reaches the process that it is about."""

from __future__ import annotations

from dataclasses import replace

from mesh.config import Config
from mesh.models.builtin import checkpoint_dir
from mesh.models.local import LocalModel
from mesh.node.wiring import shard
from mesh.types import LayerRange, ModelId


def test_a_shard_that_computes_every_row_alone_is_a_setting() -> None:
    said = {"research": {"distributed_inference": {"host": {"batch_invariant": True}}}}
    for config, alone in ((Config(), False), (Config(**said), True)):
        model = LocalModel(
            ModelId("tiny"), str(checkpoint_dir()), "a" * 64, 4, None, LayerRange(0, 2)
        )
        asked = shard(config, model, LayerRange(0, 2))
        assert asked.settings.batch_invariant is alone


def test_a_model_is_computed_in_the_format_of_its_deployment() -> None:
    config, layers = Config(quant="int8"), LayerRange(0, 2)
    model = LocalModel(ModelId("tiny"), str(checkpoint_dir()), "a" * 64, 4, None, layers)
    assert shard(config, model, layers).quant == "int8"
    assert shard(config, replace(model, quant="none"), layers).quant == "none"
