"""Which stored tensors are one tensor of the model: codes, with their scales and zero points.

From names, dtypes and shapes alone; whatever does not fit together is refused here, before a byte
of it is read. Layouts: transformers' integrations `finegrained_fp8` and `mxfp4`, AutoAWQ's gemm,
GPTQ's two (https://github.com/ModelCloud/GPTQModel), and compressed-tensors'.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from mesh.errors import BadCheckpoint
from mesh.models.coded.scheme import Scheme
from mesh.models.header import Coding, TensorEntry, made_of

_FP8 = ("F8_E4M3", "F8_E5M2")
_FLOATS = ("F32", "F16", "BF16")
_SCALES = ("_scale_inv", "_scale")
"""What follows the name of a tensor in fp8 or in integers in that of its scales."""
_OF_ACTIVATIONS = (
    ".input_scale", "activation_scale", ".input_zero_point", ".output_scale", ".k_scale",
    ".v_scale", ".q_scale", ".kv_scale",
)  # fmt: skip
_UNUSED = (*_OF_ACTIVATIONS, ".weight_shape")
_LEFT = (
    ".qweight", ".qzeros", ".scales", ".g_idx", "_packed", "_blocks", "_scales", "_scale_inv",
    ".weight_scale", ".weight_zero_point", ".weight_g_idx",
)  # fmt: skip
"""Of names of parts: alone they are of no use."""
_WORD = 32
_BLOCK = 32
"""Columns that share a scale in mxfp4, and in what graphs compute with."""


EXPERT = re.compile(
    r"\.experts\.(?P<number>\d{1,6})\.(?P<part>gate_proj|up_proj|down_proj)\.weight$"
)
"""How a matrix of one expert is called that becomes blocks by itself."""
_SMALL = 64
"""What has less than this part of the largest matrix' numbers."""
_ROUTERS = (".gate.weight", ".router.weight", ".router.proj.weight")
"""What chooses experts, and is never rounded."""


def gathered(stored: Mapping[str, TensorEntry], scheme: Scheme | None) -> Mapping[str, TensorEntry]:
    """The tensors of the model by name: those that are stored, and, with a `coding`, those that
    several stand for. Without a scheme it is `stored` itself. Raises BadCheckpoint."""
    if scheme is None:
        return stored
    made = {each.name: each for each in _coded(stored, scheme)}
    if not made:
        raise BadCheckpoint(
            f"The config says that weights are stored quantised ({scheme.method}), and none of the"
            f" {len(stored)} tensors is.",
            fix="Download config and weights again, from one revision.",
        )
    taken = {part.name for each in made.values() for part in parts_of(each)}
    plain = {
        name: entry
        for name, entry in stored.items()
        if name not in taken and not name.endswith(_UNUSED)
    }
    for entry in plain.values():
        if entry.name.endswith(_LEFT) or (
            entry.name.endswith(".weight") and entry.dtype not in _FLOATS
        ):
            _require(False, entry)
    return plain | made


def parts_of(entry: TensorEntry) -> tuple[TensorEntry, ...]:
    """The stored tensors of one of the model's: itself, or all that it stands for."""
    return (entry,) if entry.coding is None else tuple(entry.coding.parts.values())


def all_fit_int4(weights: Iterable[TensorEntry]) -> bool:
    """Whether that is true of all matrices among these weights of layers that would be rounded."""
    matrices = _rounded(weights)
    return bool(matrices) and all(
        fits_int4(entry) and (".experts." not in entry.name or EXPERT.search(entry.name))
        for entry in matrices
    )


def all_are_blocks(weights: Iterable[TensorEntry], kind: str) -> bool:
    """Whether all these matrices are GGUF's blocks of this type, but for what is small, which files
    have in 16 bit."""
    matrices = {entry.name: entry for entry in _rounded(weights)}
    sizes = {name: math.prod(entry.shape) for name, entry in matrices.items()}
    least = max(sizes.values(), default=0) / _SMALL
    return bool(matrices) and all(
        entry.dtype == kind for name, entry in matrices.items() if sizes[name] >= least
    )


def _rounded(weights: Iterable[TensorEntry]) -> list[TensorEntry]:
    return [
        entry
        for entry in weights
        # A convolution of each channel by itself is no matrix.
        if len(entry.shape) > 1 and entry.shape[1] > 1 and not entry.name.endswith(_ROUTERS)
    ]


def fits_int4(entry: TensorEntry) -> bool:
    """Whether a matrix is stored as integers of 4 bits for which blocks of 32 columns have room;
    a few of its zero points may be beyond them all the same."""
    coding = entry.coding
    return (
        coding is not None
        and coding.bits == 4
        and coding.kind in ("awq", "gptq", "packed")
        and coding.in_order
        and not entry.shape[1] % _BLOCK
        and not coding.columns % _BLOCK
    )


def _coded(stored: Mapping[str, TensorEntry], scheme: Scheme) -> Iterator[TensorEntry]:
    for name, entry in stored.items():
        if entry.dtype in _FP8:
            yield _fp8(stored, entry, scheme)
        elif scheme.method == "mxfp4" and name.endswith("_blocks"):
            yield _mxfp4(stored, entry)
        elif scheme.method in ("awq", "gptq") and name.endswith(".qweight"):
            yield _words(stored, entry, scheme)
        elif scheme.method == "compressed-tensors" and name.endswith(".weight_packed"):
            yield _packed(stored, entry, scheme)
        elif scheme.method == "compressed-tensors" and entry.dtype == "I8" and _is_weight(name):
            yield _integers(stored, entry)


def _is_weight(name: str) -> bool:
    return name.endswith(".weight")


def _fp8(stored: Mapping[str, TensorEntry], codes: TensorEntry, scheme: Scheme) -> TensorEntry:
    scales = _scales_of(stored, codes)
    rows, columns = _share(codes, scales, scheme.block)
    parts = {"codes": codes, "scales": scales}
    return made_of(codes.name, codes.shape, "FP8", Coding("fp8", parts, rows, columns))


def _integers(stored: Mapping[str, TensorEntry], codes: TensorEntry) -> TensorEntry:
    scales = _scales_of(stored, codes)
    _require(len(codes.shape) == 2, codes)
    rows, columns = _share(codes, scales, None)
    parts = {"codes": codes, "scales": scales}
    zeros = stored.get(f"{codes.name}_zero_point")
    if zeros is not None:
        _require(zeros.dtype == "I8" and zeros.shape == scales.shape, zeros)
        parts["zeros"] = zeros
    coding = Coding("integers", parts, rows, columns)
    return made_of(codes.name, codes.shape, "INT8", coding)


def _scales_of(stored: Mapping[str, TensorEntry], codes: TensorEntry) -> TensorEntry:
    for suffix in _SCALES:
        if (found := stored.get(codes.name + suffix)) is not None:
            _require(found.dtype in _FLOATS, found)
            return found
    raise BadCheckpoint(
        f"{codes.file} has tensor {codes.name} in {codes.dtype}, and no scales for it.",
        fix="Download the checkpoint again, from one revision.",
    )


def _share(
    codes: TensorEntry, scales: TensorEntry, block: tuple[int, int] | None
) -> tuple[int, int]:
    """How many rows and columns of a matrix share a scale: all, those of a row, or a block; or,
    of stacked experts, one half, where gate and up lie one behind the other."""
    _require(len(codes.shape) in (2, 3) and 0 not in codes.shape, codes)
    *experts, height, width = codes.shape
    if math.prod(scales.shape) == 1:
        return height, width
    *outer, down, across = (*scales.shape, 1) if len(scales.shape) == 1 else scales.shape
    _require(outer == experts, scales)
    if (down, across) == (1, 1):
        return height, width
    if block is not None and (down, across) == (-(-height // block[0]), -(-width // block[1])):
        return block
    if experts and block is None and (down, across) == (2, 1) and height % 2 == 0:
        return height // 2, width
    _require(down == height and across > 0 and width % across == 0, scales)
    return 1, width // across


def _mxfp4(stored: Mapping[str, TensorEntry], codes: TensorEntry) -> TensorEntry:
    name = codes.name.removesuffix("_blocks")
    scales = _part(stored, f"{name}_scales", codes, ("U8",))
    _require_whole(codes, 4, "U8")
    _require(codes.shape[-1] == _BLOCK // 2 and scales.shape == codes.shape[:-1], scales)
    experts, rows, blocks, _ = codes.shape
    parts = {"codes": codes, "scales": scales}
    coding = Coding("mxfp4", parts, 1, _BLOCK, bits=4)
    # The model multiplies from the other side than a linear layer does.
    return made_of(name, (experts, blocks * _BLOCK, rows), "MXFP4", coding)


def _words(stored: Mapping[str, TensorEntry], codes: TensorEntry, scheme: Scheme) -> TensorEntry:
    """A matrix (out, in) of AWQ or GPTQ, which are both stored as (in, out)."""
    before = codes.name.removesuffix("qweight")
    in_word = _WORD // scheme.bits
    scales = _part(stored, f"{before}scales", codes, _FLOATS)
    zeros = _part(stored, f"{before}qzeros", codes, ("I32",))
    _require_whole(codes, 2, "I32")
    _require(len(scales.shape) == 2, scales)
    groups, height = scales.shape
    if scheme.method == "awq":
        width, words = codes.shape[0], (codes.shape[0], height // in_word)
    else:
        width, words = codes.shape[0] * in_word, (codes.shape[0], height)
    _require(codes.shape == words and height % in_word == 0 and groups > 0, codes)
    _require(zeros.shape == (groups, height // in_word), zeros)
    parts = {"codes": codes, "scales": scales, "zeros": zeros}
    order = stored.get(f"{before}g_idx")
    if order is not None:
        _require(order.dtype == "I32" and order.shape == (width,), order)
        parts["order"] = order
    columns = -(-width // groups)
    # The last group of a row may be shorter, which only the order of its columns says.
    fits = width % groups == 0 and scheme.group in (None, width // groups)
    _require(order is not None or fits or groups == 1, scales)
    kind: Literal["awq", "gptq"] = "awq" if scheme.method == "awq" else "gptq"
    coding = Coding(
        kind, parts, 1, columns, scheme.bits, scheme.zero_added, in_order=not scheme.reorders
    )
    return made_of(f"{before}weight", (height, width), f"{kind}-int{scheme.bits}".upper(), coding)


def _packed(stored: Mapping[str, TensorEntry], codes: TensorEntry, scheme: Scheme) -> TensorEntry:
    before = codes.name.removesuffix("_packed")
    _require_whole(codes, 2, "I32")
    _require(scheme.bits > 0, codes)
    in_word = _WORD // scheme.bits
    scales = _part(stored, f"{before}_scale", codes, _FLOATS)
    height, width = codes.shape[0], codes.shape[1] * in_word
    _require(len(scales.shape) == 2 and scales.shape[0] == height, scales)
    groups = scales.shape[1]
    columns = scheme.group or width
    _require(groups == width // columns and width % columns == 0, scales)
    parts = {"codes": codes, "scales": scales}
    zeros = stored.get(f"{before}_zero_point")
    if zeros is not None:
        _require(zeros.dtype == "I32" and zeros.shape == (-(-height // in_word), groups), zeros)
        parts["zeros"] = zeros
    order = stored.get(f"{before}_g_idx")
    if order is not None:
        _require(order.dtype == "I32" and order.shape == (width,), order)
        parts["order"] = order
    coding = Coding("packed", parts, 1, columns, scheme.bits, in_order=order is None)
    return made_of(before, (height, width), f"PACKED-INT{scheme.bits}", coding)


def _part(
    stored: Mapping[str, TensorEntry], name: str, of: TensorEntry, dtypes: tuple[str, ...]
) -> TensorEntry:
    if (found := stored.get(name)) is None:
        raise BadCheckpoint(
            f"{of.file} has tensor {of.name}, and no {name} for it.",
            fix="Download the checkpoint again, from one revision.",
        )
    _require(found.dtype in dtypes, found)
    return found


def _require(fits: bool, entry: TensorEntry) -> None:
    if not fits:
        raise BadCheckpoint(
            f"{entry.file}: tensor {entry.name} of {entry.dtype} {list(entry.shape)} does not fit"
            " what the config says of quantised weights.",
            fix="Download config and weights again, from one revision.",
        )


def _require_whole(codes: TensorEntry, dimensions: int, *dtypes: str) -> None:
    """Raise BadCheckpoint unless it has so many dimensions, of which none is empty."""
    _require(len(codes.shape) == dimensions and 0 not in codes.shape, codes)
    _require(codes.dtype in dtypes, codes)
