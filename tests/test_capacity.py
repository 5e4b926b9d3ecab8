"""How devices are named, and what of the machine they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh.capacity import cores_of, named_devices
from mesh.processes.cards import all_cards


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("auto", ["auto"]),
        ("all", ["all"]),
        ("cuda", ["cuda:0"]),
        ("cuda:1, cuda:0,cpu", ["cuda:1", "cuda:0", "cpu"]),
        ("cpu:0-3,cpu:4", ["cpu:0-3", "cpu:4"]),
    ],
)
def test_devices_are_named_in_the_order_in_which_they_are_filled(
    text: str, names: list[str]
) -> None:
    assert list(named_devices(text)) == names


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gpu", "no device"),
        ("", "no device"),
        ("cpu:", "no device"),
        ("cpu:3-1", "no device"),
        ("cuda:0,auto", "given alone"),
        ("cuda,cuda:0", "not two"),
        ("cpu,cpu:1", "not two"),
        ("cpu:0-3,cpu:3", "not two"),
    ],
)
def test_what_is_no_device_and_what_is_one_twice_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        named_devices(text)


def test_cores_are_counted_with_both_ends() -> None:
    assert cores_of("cpu:2-3") == range(2, 4)
    assert cores_of("cpu:5") == range(5, 6)
    assert cores_of("cpu") is None
    assert cores_of("cuda:0") is None


def test_all_cards_are_those_that_torch_may_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert all_cards(tmp_path) == ("cuda:0", "cuda:1", "cuda:2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert all_cards(tmp_path) == ("cuda:0", "cuda:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert all_cards(tmp_path) == ()
