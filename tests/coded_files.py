"""Checkpoints whose weights are codes with scales in safetensors, as their quantisers write them.

Each writer makes codes of a matrix, packs them by the words of the format, and says which numbers
they stand for, in fp32. Nothing here comes from what reads them: a mistake there is not repeated.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
_LINEAR = re.compile(r".*\.\d+\..*(_proj|experts\.\d+\.\w+)\.weight")
_BOTH = 128
"""Rows of what experts of `make_checkpoint` have rows go through first, gate and up."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Written:
    """Of one weight: what is stored, by the ends of its names, and the numbers that it means."""

    stored: Tensors
    numbers: torch.Tensor


@dataclass(frozen=True)
class Form:
    """A way to store weights: the config's words, and how a matrix is written."""

    config: dict[str, Any]
    write: Callable[[torch.Tensor], Written]
    names: re.Pattern[str] = _LINEAR
    """Of the weights that are written so."""


def write_coded(directory: Path, target: Path, form: Form) -> Path:
    """The checkpoint in `directory` with its layers' matrices in this form, in `target`; returns
    one beside it that stores the same numbers as they are."""
    plain = target.with_name(f"{target.name}-plain")
    for each in (target, plain):
        shutil.copytree(directory, each)
    tensors, meant = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in load_file(directory / "model.safetensors").items():
        if not form.names.fullmatch(name):
            tensors[name] = meant[name] = weight
            continue
        written = form.write(weight)
        before = name.removesuffix("weight")
        made = {before + end: each.contiguous() for end, each in written.stored.items()}
        tensors = made | tensors  # a bias of the model stays
        meant[name] = written.numbers.contiguous()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    file = target / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": form.config}
    file.write_text(json.dumps(config))
    return plain


def fp8(block: tuple[int, int] | None, *, old: bool = False) -> Form:
    """DeepSeek's fp8 in blocks; without them one scale for all, by the `old` name or the new."""

    def write(weight: torch.Tensor) -> Written:
        height, width = weight.shape
        down, across = block or (height, width)
        scales = torch.empty(-(-height // down), -(-width // across))
        codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        meant = torch.empty(weight.shape)
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                at = np.s_[row * down : (row + 1) * down, column * across : (column + 1) * across]
                scales[row, column] = weight[at].abs().max() / 448
                codes[at] = (weight[at] / scales[row, column]).to(torch.float8_e4m3fn)
                meant[at] = codes[at].float() * scales[row, column]
        stored = scales if block else scales.reshape(())
        name = "weight_scale" if old else "weight_scale_inv"
        extra = {} if block else {"input_scale" if old else "activation_scale": torch.tensor(0.5)}
        return Written({"weight": codes, name: stored} | extra, meant)

    said = {"quant_method": "fp8", "activation_scheme": "dynamic" if block else "static"}
    size = list(block) if block else None
    return Form(said | {"fmt": "e4m3", "weight_block_size": size}, write)


def stacks_of_fp8() -> Form:
    """Experts that are stacked, as transformers writes them: a scale for each matrix of each, of
    which two lie one behind the other where rows go through first."""

    def write(weight: torch.Tensor) -> Written:
        matrices = weight.unflatten(1, (2, -1)) if weight.shape[1] == _BOTH else weight[:, None]
        scales = matrices.abs().amax((2, 3), keepdim=True) / 448
        codes = (matrices / scales).to(torch.float8_e4m3fn)
        stored = {
            "": codes.flatten(1, 2), "_scale_inv": scales.squeeze(-1),
            "_activation_scale": torch.full((len(weight),), 0.5),
        }  # fmt: skip
        return Written(stored, (codes.float() * scales).flatten(1, 2))

    said = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    return Form(said, write, re.compile(r".*\.experts\.(gate_up|down)_proj"))


@dataclass(frozen=True)
class Integers:
    """Codes (out, in) from 0, with zero points and scales (out, groups); `order` (in,) says in
    which group a column is."""

    codes: np.ndarray[Any, Any]
    zeros: np.ndarray[Any, Any]
    scales: torch.Tensor
    order: np.ndarray[Any, Any]

    @property
    def numbers(self) -> torch.Tensor:
        steps = torch.from_numpy((self.codes - self.zeros[:, self.order]).astype(np.float32))
        return steps * self.scales.float()[:, self.order]


def integers(
    weight: torch.Tensor,
    bits: int,
    group: int,
    dtype: torch.dtype,
    *,
    symmetric: bool,
    order: Any = None,
) -> Integers:
    """The nearest codes of a matrix."""
    height, width = weight.shape
    order = np.arange(width) // group if order is None else order
    groups, most = int(order.max()) + 1, (1 << bits) - 1
    scales = torch.empty(height, groups, dtype=dtype)
    zeros = np.full((height, groups), 1 << (bits - 1))
    codes = np.empty((height, width), dtype=np.int64)
    for number in range(groups):
        columns = order == number
        part = weight[:, torch.from_numpy(columns)].double()
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scales[:, number] = (part.abs().amax(1) / ((most - 1) / 2)).to(dtype)
        else:
            scales[:, number] = ((high - low) / most).to(dtype)
            own = (-low / scales[:, number].double()).round()
            # The first versions of GPTQ cannot write a zero point of 0.
            zeros[:, number] = own.clamp(1, most).numpy()
        steps = (part / scales[:, number, None].double()).round().numpy()
        codes[:, columns] = np.clip(steps + zeros[:, number, None], 0, most)
    return Integers(codes, zeros, scales, order)


def _words(
    codes: np.ndarray[Any, Any], bits: int, order: Iterable[int] | None = None
) -> torch.Tensor:
    """(rows, columns) as int32, several columns in each, the first or that of `order` lowest."""
    in_word = 32 // bits
    places = list(order or range(in_word))
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % in_word)))
    words = np.zeros((codes.shape[0], padded.shape[1] // in_word), dtype=np.uint32)
    for place, column in enumerate(places):
        words |= padded[:, column::in_word].astype(np.uint32) << np.uint32(place * bits)
    return torch.from_numpy(words.view(np.int32).copy())


def awq(group: int) -> Form:
    """AutoAWQ's gemm: 4 bit with zero points."""

    def write(weight: torch.Tensor) -> Written:
        made = integers(weight, 4, group, torch.float16, symmetric=False)
        stored = {
            "qweight": _words(made.codes.T, 4, _AWQ_ORDER),
            "qzeros": _words(made.zeros.T, 4, _AWQ_ORDER),
            "scales": made.scales.t(),
        }
        return Written(stored, made.numbers)

    said = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return Form(said | {"version": "gemm"}, write)


def gptq(
    bits: int, group: int, *, symmetric: bool, shuffled: bool = False, second: bool = False
) -> Form:
    """GPTQ's first form or its `second`; `shuffled` as with `desc_act`."""

    def write(weight: torch.Tensor) -> Written:
        order = np.arange(weight.shape[1]) // group
        if shuffled:
            order = np.random.default_rng(weight.shape[1]).permutation(order)
        made = integers(weight, bits, group, torch.float16, symmetric=symmetric, order=order)
        stored = {
            "qweight": _words(made.codes, bits).t(),
            "qzeros": _words(made.zeros.T - (0 if second else 1), bits),
            "scales": made.scales.t(),
            "g_idx": torch.from_numpy(order.astype(np.int32)),
            "bias": torch.zeros(len(weight), dtype=torch.float16),
        }
        return Written(stored, made.numbers)

    said = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric}
    form = {"checkpoint_format": "gptq_v2"} if second else {}
    return Form(said | {"desc_act": shuffled} | form, write)


def packed(bits: int, group: int | None, *, symmetric: bool, shuffled: bool = False) -> Form:
    """compressed-tensors' `pack-quantized`; one group for each row where `group` is None.
    `shuffled` as with `actorder`."""

    def write(weight: torch.Tensor) -> Written:
        order = np.arange(weight.shape[1]) // (group or weight.shape[1])
        if shuffled:
            order = np.random.default_rng(weight.shape[1]).permutation(order)
        made = integers(weight, bits, 0, torch.bfloat16, symmetric=symmetric, order=order)
        stored = {
            "weight_packed": _words(made.codes, bits),
            "weight_scale": made.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = _words(made.zeros.T, bits).t()
        if shuffled:
            stored["weight_g_idx"] = torch.from_numpy(order.astype(np.int32))
        return Written(stored, made.numbers)

    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group,
        "strategy": "group" if group else "channel", "actorder": "group" if shuffled else None,
    }  # fmt: skip
    return Form(_compressed("pack-quantized", weights), write)


def rows_of_int8(*, symmetric: bool = True) -> Form:
    """compressed-tensors' `int-quantized`, w8a8."""

    def write(weight: torch.Tensor) -> Written:
        made = integers(weight, 8, weight.shape[1], torch.bfloat16, symmetric=symmetric)
        codes, zeros = (
            torch.from_numpy((each - 128).astype(np.int8)) for each in (made.codes, made.zeros)
        )
        stored = {"weight": codes, "weight_scale": made.scales}
        more = {} if symmetric else {"weight_zero_point": zeros}
        return Written(stored | more, made.numbers)

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    return Form(_compressed("int-quantized", weights), write)


def rows_of_fp8() -> Form:
    """compressed-tensors' `float-quantized`, a scale for each row."""

    def write(weight: torch.Tensor) -> Written:
        scales = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
        codes = (weight / scales.float()).to(torch.float8_e4m3fn)
        return Written({"weight": codes, "weight_scale": scales}, codes.float() * scales.float())

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    return Form(_compressed("float-quantized", weights), write)


def _compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed", "sparsity_config": {},
        "transform_config": {}, "kv_cache_scheme": None,
    }  # fmt: skip


def mxfp4() -> Form:
    """That of gpt-oss: all experts of a layer in one, (experts, in, out), in blocks of 32 along
    `in`; all else is plain."""
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    return Form(said, _mxfp4, re.compile(r".*\.experts\.\w+_proj"))


def _mxfp4(weight: torch.Tensor) -> Written:
    turned = weight.transpose(1, 2)
    experts, height, width = turned.shape
    blocks = turned.reshape(experts, height, width // 32, 32)
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1) / 4))
    scaled = blocks / torch.exp2(exponents)[..., None]
    levels = torch.tensor(_FP4)
    nearest = (scaled.abs()[..., None] - levels).abs().argmin(-1)
    meant = levels[nearest] * torch.exp2(exponents)[..., None] * torch.where(scaled < 0, -1.0, 1.0)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    stored = {
        "_blocks": codes[..., 0::2] | codes[..., 1::2] << 4,
        "_scales": (exponents + 127).to(torch.uint8),
    }
    return Written(stored, meant.reshape(experts, height, width).transpose(1, 2))
