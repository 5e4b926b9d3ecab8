"""Tensor headers, their limits, and the way between torch and the wire."""

from __future__ import annotations

import math
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import BadFrame, BadRequest, FrameTooLarge
from mesh.types import WireDtype
from mesh.wire.activations import to_torch, to_wire
from mesh.wire.messages import WireTensor
from mesh.wire.tensors import CODES, ITEMSIZE, TensorHeader, checked_bytes, pack_header
from tests.wire.support import tensor

LIMIT = 1 << 20
shapes = st.lists(st.integers(0, 4), max_size=8).map(tuple)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@given(dtype=st.sampled_from(sorted(CODES)), shape=shapes, tensor_id=st.integers(0, 65535))
def test_a_header_survives_the_round_trip(
    dtype: str, shape: tuple[int, ...], tensor_id: int
) -> None:
    wire = tensor(dtype, shape)
    packed = pack_header(wire, tensor_id)
    header = TensorHeader.unpack(memoryview(packed + b"rest"), LIMIT)
    assert (header.tensor_id, header.dtype, header.shape) == (tensor_id, dtype, shape)
    assert header.encoded == packed
    assert header.size_bytes == len(wire.data) == math.prod(shape) * ITEMSIZE[dtype]


@pytest.mark.parametrize(
    ("payload", "error", "reason"),
    [
        (b"\0\0\1", BadFrame, "cut short"),
        (b"\0\0\1\1\0\0\0", BadFrame, "cut short"),
        (b"\0\0\0\0", BadFrame, "Unknown tensor dtype 0"),
        (b"\0\0\5\0", BadFrame, "Unknown tensor dtype 5"),
        (b"\0\0\1\x09" + bytes(36), BadFrame, "rank 9"),
        (b"\0\0\2\1\0\4\0\1", FrameTooLarge, "the limit is"),
        (b"\0\0\1\x08" + b"\xff" * 32, FrameTooLarge, "the limit is"),
    ],
)
def test_a_wrong_header_is_refused_before_anything_is_allocated(
    payload: bytes, error: type[Exception], reason: str
) -> None:
    tracemalloc.start()
    with pytest.raises(error, match=reason):
        TensorHeader.unpack(memoryview(payload), LIMIT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (WireTensor("fp64", (1,), bytes(8)), "cannot be sent"),
        (WireTensor("fp16", (1,) * 9, bytes(2)), "cannot be sent"),
        (WireTensor("fp16", (2,), bytes(2)), "has 2 bytes"),
        (WireTensor("int8", (LIMIT + 1,), bytes(LIMIT + 1)), "exceeds the link's limit"),
    ],
)
def test_a_tensor_that_contradicts_itself_is_not_sent(wire: WireTensor, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        checked_bytes(wire, LIMIT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wire_dtype", list(WireDtype))
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 5), (), (0, 4)])
def test_activations_survive_the_round_trip(
    dtype: torch.dtype, wire_dtype: WireDtype, shape: tuple[int, ...]
) -> None:
    values = torch.randint(-8, 8, shape).to(dtype)  # exact in every dtype
    back = to_torch(to_wire(values, wire_dtype))
    assert back.shape == values.shape
    assert torch.equal(back.float(), values.float())


def test_a_strided_tensor_with_a_gradient_goes_out_dense() -> None:
    values = torch.arange(12.0, requires_grad=True).reshape(3, 4).T
    assert torch.equal(to_torch(to_wire(values, WireDtype.FP32)), values)


def test_only_what_would_round_to_infinity_goes_as_fp32() -> None:
    for value, dtype in ((65519.0, "fp16"), (-65519.0, "fp16"), (65520.0, "fp32")):
        assert to_wire(torch.tensor([1.0, value]), WireDtype.FP16).dtype == dtype
    assert to_wire(torch.empty(0), WireDtype.FP16).dtype == "fp16"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", [[], [math.nan], [math.inf], [-math.inf, math.nan]])
def test_what_overflows_fp16_goes_as_fp32(dtype: torch.dtype, odd: list[float]) -> None:
    fits = torch.tensor([1.0, -60000.0, *odd], dtype=dtype)
    overflows = torch.tensor([1.0, -1e6, *odd], dtype=dtype)
    assert to_wire(fits, WireDtype.FP16).dtype == "fp16"
    wire = to_wire(overflows, WireDtype.FP16)
    assert wire.dtype == "fp32"
    assert torch.equal(to_torch(wire).isinf(), overflows.isinf())


@pytest.mark.parametrize("writable", [True, False])
def test_a_received_tensor_may_be_written_to(writable: bool) -> None:
    data = (bytearray if writable else bytes)(b"\0" * 8)
    received = to_torch(WireTensor("fp32", (2,), memoryview(data)))
    received += 1
    assert received.tolist() == [1.0, 1.0]
    assert (bytes(data) == bytes(8)) is not writable


@pytest.mark.parametrize("wire", [WireTensor("fp16", (3,), bytes(4)), WireTensor("x", (), b"")])
def test_bytes_that_are_no_tensor_are_refused(wire: WireTensor) -> None:
    with pytest.raises(BadRequest):
        to_torch(wire)
