"""Which model a key means, and which keys mean none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mesh.api.ndif.model_keys import ModelKey, ServedModel, find
from mesh.errors import BadRequest, ModelNotFound
from mesh.types import ModelId

CLASS = "nnsight.modeling.transformers.TransformersModel"
SNAPSHOT = "0" * 40


def key(repo_id: str, *, of: str = CLASS, **parts: object) -> str:
    return f"{of}:{json.dumps({'repo_id': repo_id, 'revision': None, **parts})}"


@pytest.fixture
def served(tmp_path: Path) -> list[ServedModel]:
    """A model by its own id, one from the hub's cache, one whose config names its origin."""
    plain = tmp_path / "models/Qwen2.5-3B"
    cached = tmp_path / f"hub/models--openai-community--gpt2/snapshots/{SNAPSHOT}"
    named = tmp_path / "models/mine"
    for directory in (plain, cached, named):
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
    (named / "config.json").write_text('{"_name_or_path": "org/origin"}')
    pairs = (("qwen", plain), ("gpt2", cached), ("mine", named))
    return [ServedModel.read(ModelId(model_id), directory) for model_id, directory in pairs]


@pytest.mark.parametrize(
    ("repo_id", "meant"),
    [
        ("qwen", "qwen"),
        ("Qwen/Qwen2.5-3B", "qwen"),
        ("/home/anna/models/Qwen2.5-3B", "qwen"),
        ("/home/anna/models/Qwen2.5-3B/", "qwen"),
        (r"C:\Users\anna\Qwen2.5-3B", "qwen"),
        ("openai-community/gpt2", "gpt2"),
        ("OpenAI-Community/GPT2", "gpt2"),
        ("org/origin", "mine"),
        ("mine", "mine"),
    ],
)
def test_names_that_mean_a_model(served: list[ServedModel], repo_id: str, meant: str) -> None:
    assert find(ModelKey.parse(key(repo_id)), served).model_id == meant


def test_its_own_directory_means_a_model(served: list[ServedModel]) -> None:
    for model in served:
        assert find(ModelKey.parse(key(str(model.directory))), served) == model
        assert find(ModelKey.parse(model.key), served) == model


@pytest.mark.parametrize("repo_id", ["other", "somebody/gpt2", "somebody/mine", "", "/", "Qwen/x"])
def test_names_that_mean_none(served: list[ServedModel], repo_id: str) -> None:
    with pytest.raises(ModelNotFound, match=r"it has: mine|it has: .*qwen") as caught:
        find(ModelKey.parse(key(repo_id)), served)
    assert "hearthnet deploy" in caught.value.fix


def test_main_and_none_and_the_snapshot_are_the_same_revision(served: list[ServedModel]) -> None:
    for revision in (None, "main", SNAPSHOT):
        assert find(ModelKey.parse(key("gpt2", revision=revision)), served).model_id == "gpt2"
    with pytest.raises(BadRequest, match="not served at revision 'v2'"):
        find(ModelKey.parse(key("gpt2", revision="v2")), served)
    with pytest.raises(BadRequest, match="not served at revision"):
        find(ModelKey.parse(key("qwen", revision=SNAPSHOT)), served)


def test_a_name_of_two_models_is_refused(tmp_path: Path) -> None:
    twins = []
    for parent in ("a", "b"):
        (tmp_path / parent / "twin").mkdir(parents=True)
        twins.append(ServedModel.read(ModelId(parent), tmp_path / parent / "twin"))
    with pytest.raises(BadRequest, match="any of a, b"):
        find(ModelKey.parse(key("org/twin")), twins)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a model key"),
        ("gpt2", "not a model key"),
        (f"{CLASS}:", "not a model key"),
        (f"{CLASS}:[1]", "not a model key"),
        (CLASS + ":" + "[" * 100_000, "not a model key"),
        (f'{CLASS}:{{"repo_id": 1}}', "not a model key"),
        (key("x", other=1), "not a model key"),
        (key("x", of="nnsight.modeling.diffusion.DiffusionModel"), "DiffusionModel"),
        (key("x", task="fill-mask"), "task 'fill-mask'"),
        (key("x", trust_remote_code=True), "never runs code"),
    ],
)
def test_keys_that_are_refused(text: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        ModelKey.parse(text)


def test_the_class_and_the_task_may_be_spelled_otherwise() -> None:
    own = "__main__.Standardized"
    for name in ("nnsight.LanguageModel", "nnsight.modeling.language.LanguageModel", CLASS, own):
        assert ModelKey.parse(key("x", of=name, task="text-generation")) == ModelKey("x")
