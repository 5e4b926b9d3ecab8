"""Headers of GGUF files that nobody vouches for: refused with the reason, in little memory."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesh.errors import BadCheckpoint, MeshError, UnsupportedFamily
from mesh.models.gguf.container import Long, header_of_beginning, read_gguf_header
from mesh.models.gguf.contents import settings_of
from mesh.models.manifest import read_manifest

_F32, _Q8_0, _STRING, _ARRAY, _U32, _FLOAT = 0, 8, 8, 9, 4, 6
_HUGE = (1 << 64) - 1


def _text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def _said(key: str | bytes, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _tensor(name: str | bytes, shape: tuple[int, ...], kind: int = _F32, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _text(name) + sizes + struct.pack("<IQ", kind, offset)


def _file(
    said: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    data: int = 256,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    tensor_count, pair_count = counts or (len(tensors), len(said))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, pair_count)
    body = head + b"".join(said) + b"".join(tensors)
    return body + bytes(-len(body) % 32) + bytes(data)


_GOOD = (
    _said("general.architecture", _STRING, _text("llama")),
    _said("a.number", _U32, struct.pack("<I", 7)),
    _said("words", _ARRAY, struct.pack("<IQ", _STRING, 2) + _text("one") + _text("two")),
    _said("numbers", _ARRAY, struct.pack("<IQ2I", _U32, 2, 3, 4)),
)
_TENSORS = (_tensor("a", (32, 2), _Q8_0), _tensor("b", (3,), offset=96))

_HOSTILE = {
    "is empty": b"",
    "does not begin as a GGUF file": b"GGML" + bytes(100),
    "its version is 9": _file(version=9),
    "big-endian": b"GGUF" + struct.pack(">I", 3) + bytes(100),
    "truncated": _file(_GOOD, _TENSORS)[:90],
    "truncated: tensor": _file(_GOOD, _TENSORS, data=100),
    "truncated: tensors that are not there": _file(_GOOD, counts=(9, 4))[:150],
    "truncated: settings that are not there": _file(_GOOD, counts=(0, 9))[:150],
    "claims 18446744073709551615 tensors": _file(_GOOD, counts=(_HUGE, 4)),
    "claims 65537 tensors": _file(_GOOD, counts=(65_537, 4)),
    "claims 0 tensors and 4097 settings": _file(_GOOD, counts=(0, 4097)),
    "a text of 18446744073709551615 bytes": _file((struct.pack("<Q", _HUGE),)),
    "a text of 4611686018427387904 bytes": _file(
        (_said("k", _STRING, struct.pack("<Q", 1 << 62)),)
    ),
    "an array of 18446744073709551615 texts": _file(
        (_said("k", _ARRAY, struct.pack("<IQ", _STRING, _HUGE)),)
    ),
    "truncated: many numbers": _file((_said("k", _ARRAY, struct.pack("<IQ", _U32, 1 << 60)),)),
    "an array of the unknown type 9": _file((_said("k", _ARRAY, struct.pack("<IQ", _ARRAY, 1)),)),
    "a value of the unknown type 77": _file((_said("k", 77, b""),)),
    "not UTF-8": _file((_said(b"\xff\xfe", _U32, struct.pack("<I", 1)),)),
    "says a.number twice": _file((_GOOD[1], _GOOD[1])),
    "holds tensor a twice": _file((), (_TENSORS[0], _TENSORS[0])),
    "over one another": _file((), (_TENSORS[0], _tensor("b", (3,), offset=64))),
    "has 0 dimensions": _file((), (_tensor("a", ()),)),
    "has 9 dimensions": _file((), (_tensor("a", (1,) * 9),)),
    "is not made of blocks": _file((), (_tensor("a", (33, 2), _Q8_0),)),
    "not made of blocks of 1": _file((), (_tensor("a", (0, 2)),)),
    "is of type 4, which is not read": _file((), (_tensor("a", (32,), 4),)),
    "truncated: a tensor without end": _file((), (_tensor("a", (1 << 62, 1 << 62)),)),
    "truncated: a tensor far away": _file((), (_tensor("a", (3,), offset=_HUGE),)),
    "its alignment is 24": _file(
        (_said("general.alignment", _U32, struct.pack("<I", 24)),), _TENSORS
    ),
    "its alignment is 'x'": _file((_said("general.alignment", _STRING, _text("x")),), _TENSORS),
    "tensor 'a\\x1b'": _file((), (_tensor("a\x1b", (3,)),)),
    "its alignment is 0": _file((_said("general.alignment", _U32, bytes(4)),), _TENSORS),
}


def test_a_header(tmp_path: Path) -> None:
    file = tmp_path / "good.gguf"
    file.write_bytes(_file(_GOOD, _TENSORS))
    header = read_gguf_header(file)
    assert header.metadata == {
        "general.architecture": "llama", "a.number": 7, "words": Long(2), "numbers": [3, 4],
    }  # fmt: skip
    entries = header.tensors
    assert [(e.dtype, e.shape, e.nbytes) for e in entries.values()] == [
        ("Q8_0", (2, 32), 68),
        ("F32", (3,), 12),
    ]
    assert entries["b"].offset == entries["a"].offset + 96
    assert entries["a"].offset % 32 == 0


def test_long_lists_are_passed_over_and_short_ones_of_fractions_are_found_again(
    tmp_path: Path,
) -> None:
    raw = _file(
        (
            _said("long", _ARRAY, struct.pack("<IQ", _U32, 4097) + bytes(4 * 4097)),
            _said("scales", _ARRAY, struct.pack("<IQ2f", _FLOAT, 2, 0.5, 1.5)),
            *_GOOD,
        ),
        _TENSORS,
    )
    file = tmp_path / "long.gguf"
    file.write_bytes(raw)
    header = read_gguf_header(file)
    assert (header.metadata["long"], header.metadata["scales"]) == (Long(4097), [0.5, 1.5])
    assert header.metadata["a.number"] == 7
    assert header.floats.keys() == {"scales"}
    assert struct.unpack_from("<2f", raw, header.floats["scales"]) == (0.5, 1.5)


def test_of_what_is_there_of_a_file_the_header_is_read_once_all_of_it_is() -> None:
    raw, file = _file(_GOOD, _TENSORS), Path("far.gguf")
    whole = header_of_beginning(file, raw, len(raw))
    assert whole is not None
    assert whole.end == len(raw) - 256
    ends = len(raw[: whole.end].rstrip(b"\0"))
    for there in range(ends):
        assert header_of_beginning(file, raw[:there], len(raw)) is None
    assert header_of_beginning(file, raw[: whole.end], len(raw)) == whole


def test_a_tensor_that_is_read_with_the_header_is_small() -> None:
    for numbers in (1 << 18, (1 << 18) + 1):
        tensors = (_tensor("rope_freqs.weight", (numbers,)), _tensor("b", (3,), offset=1 << 21))
        header = header_of_beginning(Path("far.gguf"), _file(_GOOD, tensors), 1 << 22)
        assert header is not None
        if numbers == 1 << 18:
            assert [entry.name for entry in settings_of(header)] == ["rope_freqs.weight"]
        else:
            with pytest.raises(BadCheckpoint, match="a setting, has 1048580 bytes"):
                settings_of(header)


def test_a_header_without_end_is_not_read(tmp_path: Path) -> None:
    file, size = tmp_path / "long.gguf", 1 << 29
    file.write_bytes(_file((_said("k", _ARRAY, struct.pack("<IQ", _U32, size // 8)),)))
    os.truncate(file, size)
    with pytest.raises(BadCheckpoint, match="its header is longer than 268435456 bytes"):
        read_gguf_header(file)


@pytest.mark.parametrize("what", _HOSTILE)
def test_hostile_files_are_refused_with_the_reason(what: str, tmp_path: Path) -> None:
    file = tmp_path / "hostile.gguf"
    file.write_bytes(_HOSTILE[what])
    read_gguf_header_once(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(BadCheckpoint) as caught:
            read_gguf_header(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert what.partition(":")[0].removeprefix("is ") in caught.value.message
    assert str(file) in caught.value.message
    assert caught.value.fix


def read_gguf_header_once(directory: Path) -> None:
    """So that what is imported is not counted."""
    file = directory / "good.gguf"
    file.write_bytes(_file(_GOOD, _TENSORS))
    read_gguf_header(file)


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(place=st.integers(0, 300), value=st.integers(0, 255), cut=st.integers(0, 600))
def test_damage_anywhere_is_refused_or_read(
    place: int, value: int, cut: int, tmp_path: Path
) -> None:
    raw = bytearray(_file(_GOOD, _TENSORS))
    raw[place % len(raw)] = value
    file = tmp_path / "damaged.gguf"
    file.write_bytes(raw[: len(raw) - cut] if cut < 100 else raw)
    refused: list[MeshError] = []
    for read in (read_gguf_header, read_manifest):
        try:
            read(file)
        except (BadCheckpoint, UnsupportedFamily) as error:
            refused.append(error)
    assert all(error.fix for error in refused)
