"""Files of edits, places in a model, and how both travel."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import BadSteering
from mesh.models.edits import (
    MAX_EDIT_BYTES,
    MAX_EDITS,
    assemble,
    check_edits,
    describe,
    parse_site,
    read_edit,
)
from mesh.types import Edit, Site
from tests.research.steering.local import low_rank_file, vector_file


def ones(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.ones(shape, dtype)


def test_both_forms_are_read() -> None:
    vector, low_rank = read_edit(vector_file(64)), read_edit(low_rank_file(64, 3))
    assert (vector.kind, vector.hidden_size) == ("vector", 64)
    assert (low_rank.kind, low_rank.hidden_size) == ("low_rank", 64)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"vector": ones(4, 4)},
        {"vector": ones(0)},
        {"vector": ones(4, dtype="float16")},
        {"vector": ones(4) * np.float32(np.nan)},
        {"vector": ones(4) * np.float32(np.inf)},
        {"a": ones(4, 2)},
        {"a": ones(4, 2), "b": ones(3, 4)},
        {"a": ones(4, 2), "b": ones(2, 5)},
        {"a": ones(4, 0), "b": ones(0, 4)},
        {"a": ones(4, 2), "b": ones(2, 4), "vector": ones(4)},
        {"vector": ones(MAX_EDIT_BYTES // 4 + 1)},
    ],
    ids=lambda tensors: str({name: array.shape for name, array in tensors.items()}),
)
def test_anything_else_is_refused(tensors: dict[str, np.ndarray]) -> None:
    with pytest.raises(BadSteering):
        read_edit(safetensors.numpy.save(tensors))


@given(st.binary(max_size=200))
def test_nonsense_is_refused_and_nothing_worse(data: bytes) -> None:
    with pytest.raises(BadSteering):
        read_edit(data)


@given(st.data())
def test_a_damaged_file_is_refused_or_still_whole(data: st.DataObject) -> None:
    whole = bytearray(vector_file(8))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = read_edit(bytes(whole))
    except BadSteering:
        return
    assert found.vector is not None
    assert found.vector.shape == (8,)


@pytest.mark.parametrize(
    ("path", "prefix", "site"),
    [
        ("model.layers.0", "model.layers.", Site(0)),
        ("model.layers.7.mlp", "model.layers.", Site(7, "mlp")),
        ("transformer.h.3.attn", "transformer.h.", Site(3, "attn")),
    ],
)
def test_paths_are_read(path: str, prefix: str, site: Site) -> None:
    assert parse_site(path, "output", prefix, 8) == site


@pytest.mark.parametrize(
    "path",
    ["model.layers.8", "model.layers.-1", "model.layers", "layers.1", "model.layers.1.mlp.act",
     "model.layers.1.norm", "model.layers.1.", "x.model.layers.1", "model.layers.00000001"],
)  # fmt: skip
def test_other_paths_are_refused(path: str) -> None:
    with pytest.raises(BadSteering) as caught:
        parse_site(path, "output", "model.layers.", 8)
    assert caught.value.param == "path"


TENSORS = (
    "model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.mlp.experts.3.up_proj.bias", "model.layers.10.norm.weight", "model.norm.weight",
)  # fmt: skip


def test_whatever_has_weights_is_a_place() -> None:
    def parse(path: str) -> Site:
        return parse_site(f"model.layers.{path}", "input", "model.layers.", 11, TENSORS)

    for layer, part in (
        (0, "mlp"), (0, "mlp.down_proj"), (1, "mlp.experts"), (1, "mlp.experts.3.up_proj"),
        (10, "norm"), (7, ""),
    ):  # fmt: skip
        assert parse(f"{layer}.{part}".rstrip(".")) == Site(layer, part, "input")
    for path in (
        "0.mlp.down_proj.weight", "0.mlp.down", "0.mlp.down_proj.", "1.norm", "2.mlp.experts",
        "0..mlp", "embed_tokens", "0.mlp.down_proj/x",
    ):  # fmt: skip
        with pytest.raises(BadSteering):
            parse(path)


EDITS = (
    Edit(Site(1), 0.5, b"abc"),
    Edit(Site(2, "mlp", "input"), -1.0, b"defgh"),
    Edit(Site(1), 2.0, b"i"),
)


def test_what_is_described_is_assembled_again() -> None:
    assert assemble(describe(EDITS), b"abcdefghi") == EDITS
    assert assemble([], b"") == ()


@pytest.mark.parametrize("data", [b"", b"abcdefgh", b"abcdefghij"])
def test_bytes_that_do_not_fit_are_refused(data: bytes) -> None:
    with pytest.raises(BadSteering):
        assemble(describe(EDITS), data)


@pytest.mark.parametrize(
    "change",
    [{"layer": "1"}, {"layer": True}, {"part": "mlp."}, {"part": "mlp/.."}, {"part": ["mlp"]},
     {"side": "x"}, {"side": {}}, {"strength": 1}, {"strength": float("nan")}, {"strength": None},
     {"size": -1}, {"size": 0}, {"size": None}],
    ids=str,
)  # fmt: skip
def test_garbled_descriptions_are_refused(change: dict[str, object]) -> None:
    (described,) = describe(EDITS[:1])
    with pytest.raises(BadSteering):
        assemble([described | change], b"abc")


def test_too_many_edits_are_refused() -> None:
    check_edits(EDITS[:1] * MAX_EDITS)
    with pytest.raises(BadSteering):
        check_edits(EDITS[:1] * (MAX_EDITS + 1))
    with pytest.raises(BadSteering):
        check_edits([Edit(Site(0), 1.0, bytes(MAX_EDIT_BYTES))] * 3)
