"""Records: what they hold, how they are put together, how they are written as JSON."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.codec import Fault
from mesh.coordination.forms import record_from, worker_from, worker_json, worker_map
from mesh.coordination.records import (
    MAX_TENSORS,
    ModelRecord,
    ModelRef,
    TensorDescriptor,
    WorkerKind,
    WorkerPlace,
    merged,
    worker_rank,
)
from mesh.errors import RankTaken
from mesh.types import LayerRange, ModelId, NodeId
from tests.coordination.holders import MODEL, OTHER, worker


def test_workers_are_merged_by_rank_and_sorted() -> None:
    record = merged(MODEL, None, [worker(5), worker(2)])
    again = merged(MODEL, record, [replace(worker(5), published_at=1_800_000_000), worker(3)])
    assert [each.worker_rank for each in again.workers] == [2, 3, 5]
    assert again.workers[2].published_at == again.published_at == 1_800_000_000


def test_a_rank_is_not_taken_from_another_node() -> None:
    record = merged(MODEL, None, [worker(5)])
    with pytest.raises(RankTaken, match="attic"):
        merged(MODEL, record, [worker(5, holder="study")])


@given(st.lists(st.permutations(range(6)), min_size=1, max_size=4))
def test_the_order_of_publishing_makes_no_difference(orders: list[list[int]]) -> None:
    results = set()
    for order in orders:
        record: ModelRecord | None = None
        for rank in order:
            record = merged(MODEL, record, [worker(rank)])
        results.add(record)
    assert len(results) == 1


def test_a_rank_follows_the_layers_and_tells_replicas_apart() -> None:
    def rank(holder: str, layers: str, kind: WorkerKind = WorkerKind.SHARD) -> int:
        return worker_rank(WorkerPlace(NodeId(holder), kind, LayerRange.parse(layers), "wss://a:1"))

    assert rank("a", "0-3") == rank("a", "0-3")
    assert rank("a", "0-7") < rank("b", "4-7") < rank("a", "8-9") < 1 << 32
    few = {rank(f"n{n}", "0-3", kind) for n in range(50) for kind in WorkerKind}
    assert len(few) == 100
    assert rank("a", "9998-9998") < rank("a", "9999-9999") < rank("a", "99998-99999") < 1 << 32


def test_a_record_is_of_one_exact_checkpoint() -> None:
    assert MODEL.key != OTHER.key
    assert ModelRef.parse(MODEL.key) == MODEL
    at = ModelRef(ModelId("a@b"), "ef" * 32)
    assert ModelRef.parse(at.key) == at
    for name, digest in (("", "ab" * 32), ("x\n", "ab" * 32), ("x", "AB" * 32), ("x", "ab")):
        with pytest.raises(ValueError, match="is"):
            ModelRef(ModelId(name), digest)


def test_a_worker_is_written_as_modelexpress_writes_it() -> None:
    fields = json.loads(worker_json(worker(7)))
    assert fields["tensors"][1] == {
        "name": "model.layers.1.weight",
        "addr": "18446744073709551615",
        "size": "9223372036854775809",
        "device_id": 0,
        "dtype": "bfloat16",
    }
    assert json.loads(base64.b64decode(fields["nixl_metadata"]))["layers"] == "0-3"
    assert worker_from(worker_json(worker(7))) == worker(7)
    bare = replace(worker(7), tensors=())
    assert "tensors" not in worker_map(bare)
    assert worker_from(worker_json(bare)) == bare


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker_rank", 1 << 32),
        ("worker_rank", "7"),
        ("holder", "study"),
        ("nixl_metadata", "%%%"),
        ("nixl_metadata", base64.b64encode(b"[]").decode()),
        ("published_at", -1),
        ("tensors", {}),
        ("tensors", [{"name": "a", "size": 12, "dtype": "bfloat16"}]),
        ("tensors", [{"name": "a", "size": "18446744073709551616", "dtype": "bfloat16"}]),
        ("tensors", [{"name": "a", "size": "012", "dtype": "bfloat16"}]),
    ],
)
def test_what_is_no_worker_is_refused(field: str, value: object) -> None:
    fields = worker_map(worker(7))
    assert worker_from(json.dumps(fields)) == worker(7)
    with pytest.raises(Fault):
        worker_from(json.dumps({**fields, field: value}))


def test_what_is_no_record_is_refused() -> None:
    form = {
        "model_name": MODEL.name,
        "weights_sha256": MODEL.weights_sha256,
        "published_at": 1,
        "workers": [worker_map(worker(2)), worker_map(worker(1))],
    }
    found = record_from(json.dumps(form), MODEL)
    assert [each.worker_rank for each in found.workers] == [1, 2]
    with pytest.raises(Fault, match="record of"):
        record_from(json.dumps(form), OTHER)
    with pytest.raises(Fault, match="one rank"):
        record_from(json.dumps({**form, "workers": [worker_map(worker(2))] * 2}), MODEL)
    with pytest.raises(Fault, match="not JSON"):
        record_from(b"\xff{", MODEL)


def test_a_size_beyond_64_bits_is_refused() -> None:
    most = (1 << 64) - 1
    assert TensorDescriptor("a", most, "bfloat16", most).addr == most
    for size, addr in ((1 << 64, 0), (0, 1 << 64), (0, -1)):
        with pytest.raises(ValueError, match="2\\^64"):
            TensorDescriptor("a", size, "bfloat16", addr)


def test_a_worker_has_a_rank_of_32_bits_and_a_bounded_number_of_tensors() -> None:
    one = TensorDescriptor("a", 0, "bfloat16")
    most = replace(worker((1 << 32) - 1), tensors=(one,) * MAX_TENSORS)
    with pytest.raises(ValueError, match="2\\^32"):
        replace(most, worker_rank=1 << 32)
    with pytest.raises(ValueError, match=f"more than {MAX_TENSORS}"):
        replace(most, tensors=(*most.tensors, one))
