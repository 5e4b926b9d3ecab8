"""Envelopes: what no honest hop answers is seen, what one does is not."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from mesh.pipeline.watch.sanity import CAP, FACTOR, Envelope, impossible, rows_as_floats
from mesh.pipeline.wire_dtype import WireVerdict, read_verdict, write_verdict
from mesh.shard.ends import strongest
from mesh.types import WireDtype
from mesh.wire.activations import to_wire
from mesh.wire.messages import WireTensor

DTYPES = [WireDtype.FP32, WireDtype.FP16, WireDtype.BF16]


def wire(values: torch.Tensor, dtype: WireDtype = WireDtype.FP32) -> WireTensor:
    return to_wire(values.reshape(1, -1, values.shape[-1]), dtype)


def rows(count: int, norm: float, hidden: int = 64) -> torch.Tensor:
    values = torch.randn(count, hidden, generator=torch.Generator().manual_seed(5))
    return values / values.norm(dim=-1, keepdim=True) * norm


def recorded(**norms: float) -> Envelope:
    envelope = Envelope()
    with envelope.recording():
        for boundary, norm in norms.items():
            assert envelope.check(int(boundary[1:]), wire(rows(4, norm)), "attic") == ""
    return envelope


@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_are_what_torch_says(dtype: WireDtype) -> None:
    tensor = wire(rows(3, 7.0), dtype)
    data = memoryview(tensor.data)
    found = rows_as_floats(WireTensor(tensor.dtype, tensor.shape, data))
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    expected = rows(3, 7.0).to(kinds[tensor.dtype]).float().numpy()
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "Inf")])
def test_one_value_that_is_not_finite_is_seen(
    dtype: WireDtype, count: int, value: float, word: str
) -> None:
    values = rows(count, 7.0)
    values[-1, 13] = value
    for envelope in (Envelope(), recorded(b4=7.0)):
        assert word in envelope.check(4, wire(values, dtype), "attic")


def test_forgotten_bounds_are_forgotten_on_disk_too(tmp_path: Path) -> None:
    envelope = recorded(b4=7e9)
    envelope.write(tmp_path, "weights")
    envelope.forget()
    assert not envelope.is_known
    assert envelope.is_dirty
    assert envelope.check(4, wire(rows(1, 1e13)), "attic") == "", "nor is there a cap"
    envelope.write(tmp_path, "weights")
    found = Envelope.read(tmp_path, "weights")
    assert not found.is_known
    with found.recording():
        assert found.check(4, wire(rows(1, 7.0)), "attic") == ""
    assert found.check(4, wire(rows(1, 7e9)), "attic"), "the cap went with the bounds"


@pytest.mark.parametrize(("token", "is_possible"), [(-1, False), (7, True), (8, False)])
def test_candidates_are_tokens_of_the_vocabulary(token: int, is_possible: bool) -> None:
    said = strongest(torch.arange(8.0, 0.0, -1.0)[None], 3).copy()
    assert impossible(said, 8) == ""
    said["ids"][0, 2] = token
    fault = "" if is_possible else "candidates that are not different tokens of 8"
    assert impossible(said, 8) == fault


def test_several_nodes_may_write_the_same_bounds_at_once(tmp_path: Path) -> None:
    def write(_: int) -> None:
        for _ in range(100):
            recorded(b4=7.0).write(tmp_path, "weights")
            write_verdict(tmp_path, "weights", WireVerdict(WireDtype.FP16, "fine"))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(write, range(4))) == [None] * 4
    assert Envelope.read(tmp_path, "weights").is_known
    assert read_verdict(tmp_path, "weights") == WireVerdict(WireDtype.FP16, "fine")


def test_values_whose_squares_overflow_are_seen() -> None:
    assert "overflow" in Envelope().check(4, wire(rows(2, 1.0) * 1e30), "attic")


def test_a_norm_beyond_the_bound_is_refused_and_named() -> None:
    envelope = recorded(b4=10.0)
    assert envelope.check(4, wire(rows(1, 10.0 * FACTOR * 0.9)), "attic") == ""
    envelope = recorded(b4=10.0)
    assert "norm" in envelope.check(4, wire(rows(1, 10.0 * FACTOR * 1.1)), "attic")


def test_honest_traffic_widens_a_bound_up_to_the_cap() -> None:
    envelope = recorded(b4=10.0)
    norm = 10.0
    while norm * FACTOR / 2 < 10.0 * CAP:
        norm *= FACTOR / 2
        assert envelope.check(4, wire(rows(1, norm)), "attic") == ""
    assert envelope.is_dirty
    assert envelope.check(4, wire(rows(1, 10.0 * CAP * 1.1)), "attic") != ""


def test_a_boundary_never_recorded_has_the_bound_of_the_largest() -> None:
    envelope = recorded(b2=10.0, b4=40.0)
    assert envelope.check(3, wire(rows(1, 40.0 * FACTOR * 1.1)), "attic") != ""
    assert envelope.check(3, wire(rows(1, 5.0)), "attic") == ""
    assert envelope.check(3, wire(rows(1, 5.0 * FACTOR * 1.1)), "attic") != "", "known by now"


def test_what_two_hosts_compute_alike_is_the_models_own() -> None:
    envelope = recorded(b4=10.0)
    absurd = wire(rows(1, 5000.0))
    assert envelope.check(4, absurd, "attic") != ""
    assert envelope.check(4, absurd, "attic") != "", "the same host does not confirm itself"
    assert envelope.check(4, wire(rows(1, 9000.0)), "kitchen") != "", "another absurdity neither"
    assert envelope.check(4, absurd, "attic") != ""
    assert envelope.check(4, wire(rows(1, 5001.0)), "kitchen") == ""


def test_bounds_survive_a_restart(tmp_path: Path) -> None:
    recorded(b4=10.0).write(tmp_path, "f" * 64)
    again = Envelope.read(tmp_path, "f" * 64)
    assert again.is_known
    assert again.check(4, wire(rows(1, 10.0 * FACTOR * 1.1)), "attic") != ""
    assert not Envelope.read(tmp_path, "0" * 64).is_known


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"norms": 3}', '{"norms": {"x": 1}}', "\x00"])
def test_a_damaged_file_is_no_record(tmp_path: Path, text: str) -> None:
    file = tmp_path / "envelope" / "x.json"
    file.parent.mkdir()
    file.write_text(text)
    assert not Envelope.read(tmp_path, "x").is_known


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    recorded(b4=10.0).write(tmp_path, "x")
    fields = json.loads((tmp_path / "envelope" / "x.json").read_text())
    assert fields["norms"]["4"] == pytest.approx(10.0)


def test_a_decode_step_is_checked_for_less_than_two_copies_of_its_frame_cost() -> None:
    """As a ratio: machines differ. A step's frame is copied about that often on its way."""
    envelope = recorded(b4=10.0)
    step = wire(rows(1, 9.0, hidden=4096), WireDtype.FP16)

    def best(call: object) -> float:
        times = []
        for _ in range(300):
            start = time.perf_counter()
            call()  # type: ignore[operator]
            times.append(time.perf_counter() - start)
        return min(times)

    hidden = rows(1, 9.0, hidden=4096)
    encode = best(lambda: to_wire(hidden.reshape(1, 1, -1), WireDtype.FP16))
    check = best(lambda: envelope.check(4, step, "attic"))
    print(f"\ncheck {check * 1e6:.1f} us, encoding the step {encode * 1e6:.1f} us")
    assert check < 4 * encode
