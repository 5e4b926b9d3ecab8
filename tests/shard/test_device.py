from __future__ import annotations

import os

import pytest
import torch

from mesh.errors import BadValue
from mesh.shard import device as devices
from mesh.shard.device import (
    Timed,
    choose_device,
    choose_dtype,
    choose_quant,
    choose_threads,
    determinism_class,
)

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")


def test_a_device_that_is_not_here_is_refused_by_name() -> None:
    core = min(os.sched_getaffinity(0))
    assert choose_device("cpu").value == choose_device(f"cpu:{core}").value == CPU
    for wrong in ("cuda:99", "tpu", f"cpu:{core}-9999", "cpu:", ""):
        with pytest.raises(BadValue):
            choose_device(wrong)


def test_every_choice_has_a_reason() -> None:
    assert choose_device().reason.startswith(f"device {choose_device().value}")
    assert "requested" in choose_device("cpu").reason
    assert "requested" in choose_threads(3, CPU).reason
    assert "requested" in choose_dtype("fp16", "bf16", CPU).reason


@pytest.mark.parametrize(
    ("stored", "fast", "expected"),
    [
        ("fp32", {"bf16"}, torch.float32),
        ("bf16", {"bf16"}, torch.bfloat16),
        ("bfloat16", {"bf16"}, torch.bfloat16),
        ("bf16", set(), torch.float32),
        ("fp16", {"bf16"}, torch.float32),
        ("fp16", {"bf16", "fp16"}, torch.float16),
    ],
)
def test_the_cpu_computes_16_bit_only_where_that_is_fast(
    stored: str, fast: set[str], expected: torch.dtype
) -> None:
    assert choose_dtype("auto", stored, CPU, frozenset(fast)).value == expected


def test_a_gpu_keeps_fp16_and_refuses_unknown_dtypes() -> None:
    assert choose_dtype("auto", "fp16", CUDA).value == torch.float16
    with pytest.raises(BadValue):
        choose_dtype("int3", "fp16", CPU)


@pytest.mark.parametrize(("together", "expected"), [(5.0, 2), (9.5, 1), (30.0, 1)])
def test_more_threads_are_taken_only_when_clearly_faster(together: float, expected: int) -> None:
    took = {1: 10.0, 2: together}
    choice = choose_threads(0, CPU, 2, lambda threads: Timed(took[threads], 1.0))
    assert choice.value == expected
    assert "measured" in choice.reason
    assert not choice.is_passing


def test_the_gemv_measures_something() -> None:
    before = torch.get_num_threads()
    took = devices.timed_gemv(1)
    assert took.ms > 0
    assert took.ran > 0
    torch.set_num_threads(before)


def test_what_changes_bits_changes_the_class() -> None:
    classes = {
        determinism_class(CPU, dtype, kernels, threads)
        for dtype in (torch.float32, torch.bfloat16)
        for kernels in ("plain+hearthnet", "onednn-packed+hearthnet")
        for threads in (1, 2)
    }
    assert len(classes) == 8
    assert all(torch.__version__ in name for name in classes)


@pytest.mark.parametrize(
    ("requested", "device", "expected"),
    [
        ("none", CPU, None), ("auto", CPU, "int8"), ("int8", CPU, "int8"), ("int4", CPU, "int4"),
        ("none", CUDA, None), ("auto", CUDA, None),
    ],
)  # fmt: skip
def test_few_bits_are_for_cpus(requested: str, device: torch.device, expected: str | None) -> None:
    assert choose_quant(requested, device).value == expected


@pytest.mark.parametrize(("requested", "device"), [("int3", CPU), ("", CPU), ("int8", CUDA)])
def test_other_bits_and_other_devices_are_refused(requested: str, device: torch.device) -> None:
    with pytest.raises(BadValue) as refused:
        choose_quant(requested, device)
    assert refused.value.param == "quant"
