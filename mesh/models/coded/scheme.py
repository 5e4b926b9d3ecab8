"""How a config says that its weights are stored quantised, and whether that is read.

A format is read where its numbers follow from codes and scales alone, one tensor after the other:
docs/decisions/stored-quantised.md has which and why. What the config says of activations is not
looked at: they are computed as in any model. Knows no tensors. GGUF files are another matter
(`gguf`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mesh.errors import UnsupportedFamily
from mesh.models.gguf.container import BLOCK_TYPES

KEYS = ("quantization_config", "compression_config")
"""Where configs say it; the second is that of earlier compressed-tensors."""

_CODED_TYPES = frozenset(
    {"FP8", "MXFP4", "INT8", "AWQ-INT4", "GPTQ-INT4", "GPTQ-INT8", "PACKED-INT4", "PACKED-INT8"}
)
"""What the dtype of a tensor of the model is called that stands for codes and scales."""

Method = Literal["fp8", "mxfp4", "awq", "gptq", "compressed-tensors"]

_CT_PACKED, _CT_INT8, _CT_FP8 = "pack-quantized", "int-quantized", "float-quantized"
_CT_FORMATS = (_CT_PACKED, _CT_INT8, _CT_FP8, "naive-quantized", "mixed-precision")
_DENSE = (None, "", "dense")


@dataclass(frozen=True, slots=True)
class Scheme:
    """What the tensors of one checkpoint do not say themselves.

    `bits` are those of integer codes, `group` how many columns share a scale, None for all of a
    row. `block` are rows and columns that share one of fp8. `zero_added` is what is to be added to
    stored zero points. With `reorders` the columns of a group may lie anywhere.
    """

    method: Method
    bits: int = 0
    group: int | None = None
    block: tuple[int, int] | None = None
    zero_added: int = 0
    reorders: bool = False


def is_decoded(dtype: str) -> bool:
    """Whether tensors that are stored as this stand for numbers in another form: a type of GGUF's
    blocks, or codes with their scales. Spelled in capitals or not."""
    return dtype.upper() in BLOCK_TYPES or dtype.upper() in _CODED_TYPES


def scheme_of(config: Mapping[str, Any], name: str) -> Scheme | None:
    """What this config.json of the model `name` says of its weights; None where they are plain.

    Raises UnsupportedFamily, naming the format, for one that is not read.
    """
    said = _said(config)
    if said is None:
        return None
    method = str(said.get("quant_method", ""))
    try:
        return _READERS.get(method, _unknown)(said)
    except _NotReadError as why:
        raise UnsupportedFamily(
            f"The weights of {name} are stored quantised ({method[:40] or 'in an unknown way'}),"
            f" {why}.",
            fix="Use its original checkpoint, or a GGUF file of it.",
        ) from why


class _NotReadError(Exception):
    """Why a format is not read, as the end of a sentence."""


def _said(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    text = config.get("text_config")
    for each in (config, text if isinstance(text, Mapping) else {}):
        for key in KEYS:
            if (said := each.get(key)) is not None:
                return said if isinstance(said, Mapping) else {}
    return None


def _unknown(said: Mapping[str, Any]) -> Scheme:
    raise _NotReadError("which is not read")


def _fp8(said: Mapping[str, Any]) -> Scheme:
    if str(said.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _NotReadError(f"in a kind of fp8 that is not read: {str(said['fmt'])[:40]}")
    block = said.get("weight_block_size")
    return Scheme("fp8", block=None if block is None else _block(block))


def _mxfp4(said: Mapping[str, Any]) -> Scheme:
    return Scheme("mxfp4", bits=4)


def _awq(said: Mapping[str, Any]) -> Scheme:
    version = str(said.get("version", "gemm")).lower()
    if version != "gemm":
        raise _NotReadError(f"packed for {version[:40]}, and only gemm is read")
    return Scheme("awq", bits=_bits(said.get("bits", said.get("w_bit")), 4))


def _gptq(said: Mapping[str, Any]) -> Scheme:
    form = str(said.get("checkpoint_format") or "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise _NotReadError(f"in the form {form[:40]}, and only gptq and gptq_v2 are read")
    rules = said.get("dynamic") or {}
    if not isinstance(rules, Mapping) or any(not str(rule).startswith("-") for rule in rules):
        raise _NotReadError("with rules of their own for some layers, which are not read")
    added = 1 if form == "gptq" else 0
    bits = _bits(said.get("bits"), 4, 8)
    size, reorders = said.get("group_size"), bool(said.get("desc_act"))
    group = size if type(size) is int and size > 0 else None
    return Scheme("gptq", bits, group, zero_added=added, reorders=reorders)


def _compressed(said: Mapping[str, Any]) -> Scheme:
    form, groups = said.get("format"), said.get("config_groups")
    if form not in _CT_FORMATS or not isinstance(groups, Mapping) or not groups:
        raise _NotReadError(f"in the form {str(form)[:40]}, which is not read")
    for key in ("sparsity_config", "transform_config"):
        inner = said.get(key) or {}
        if isinstance(inner, Mapping) and inner.get("format") in _DENSE and not _transforms(inner):
            continue
        raise _NotReadError(f"with a {key}, which is not read")
    schemes = {_compressed_group(each, str(form)) for each in groups.values()}
    integers = {each for each in schemes if each.bits}
    blocks = {each.block for each in schemes if each.block is not None}
    if len(integers) > 1 or len(blocks) > 1:
        raise _NotReadError("in several kinds of groups, which are not read")
    block = next(iter(blocks), None)
    if not integers:
        return Scheme("compressed-tensors", block=block)
    (found,) = integers
    return Scheme("compressed-tensors", found.bits, found.group, block, reorders=found.reorders)


def _transforms(inner: Mapping[str, Any]) -> bool:
    return bool(inner.get("config_groups"))


def _compressed_group(group: Any, form: str) -> Scheme:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _NotReadError("with groups that have no weights")
    own = group.get("format") or form
    kind, strategy = weights.get("type", "int"), weights.get("strategy")
    if own not in _CT_FORMATS:
        raise _NotReadError(f"in the form {str(own)[:40]}, which is not read")
    if kind == "float" and _bits(weights.get("num_bits"), 8):
        block = _block(weights.get("block_structure")) if strategy == "block" else None
        return Scheme("compressed-tensors", block=block)
    if kind != "int" or strategy not in ("group", "channel"):
        raise _NotReadError(f"as {str(kind)[:20]} by {str(strategy)[:20]}, which is not read")
    return Scheme(
        "compressed-tensors",
        _bits(weights.get("num_bits"), 4, 8),
        _size(weights.get("group_size")) if strategy == "group" else None,
        reorders=weights.get("actorder") == "group",
    )


_READERS = {
    "fp8": _fp8, "fbgemm_fp8": _fp8, "mxfp4": _mxfp4, "awq": _awq, "gptq": _gptq,
    "compressed-tensors": _compressed,
}  # fmt: skip


def _bits(value: Any, *read: int) -> int:
    if type(value) is not int or value not in read:
        raise _NotReadError(
            f"in {str(value)[:20]} bits, and only {' and '.join(map(str, read))} are read"
        )
    return value


def _size(value: Any) -> int:
    if type(value) is not int or not 0 < value < 1 << 20:
        raise _NotReadError(f"in blocks of {str(value)[:40]}, which are not read")
    return value


def _block(value: Any) -> tuple[int, int]:
    if isinstance(value, str):
        value = [int(each) if each.isdecimal() else each for each in value.split("x")]
    if not isinstance(value, list) or len(value) != 2:
        raise _NotReadError(f"in blocks of {str(value)[:40]}, which are not read")
    return _size(value[0]), _size(value[1])
