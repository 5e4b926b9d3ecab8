"""The architectures of GGUF files that are read, by ``general.architecture``.

An architecture has an entry where the test suite compares its files with the checkpoints that they
were made of; every other one is refused. So is a file with a setting or a tensor that its entry
does not know: it would mean something. transformers' own tables are for a model that is loaded, and
leave out what they do not know (scaled rotary embeddings, windows, caps); these are read where
there is no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mesh.models.gguf import (
    coheres,
    deepseeks,
    ernies,
    falcons,
    gemmas,
    granites,
    hybrids,
    kimi,
    layer_norms,
    lfm2,
    llamas,
    minimax,
    nemotrons,
    others,
    qwens,
)
from mesh.models.gguf.architecture import Architecture

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": llamas.LLAMA,
        "llama4": llamas.LLAMA4,
        "minicpm": granites.MINICPM,
        "minicpm3": deepseeks.MINICPM3,
        "mistral3": llamas.MISTRAL3,
        "mistral4": deepseeks.MISTRAL4,
        "exaone": llamas.EXAONE,
        "internlm2": llamas.INTERNLM2,
        "arcee": llamas.ARCEE,
        "smollm3": llamas.SMOLLM3,
        "granite": granites.GRANITE,
        "granitemoe": granites.GRANITE_MOE,
        "granitehybrid": granites.GRANITE_HYBRID,
        "qwen2": qwens.QWEN2,
        "qwen2moe": qwens.QWEN2_MOE,
        "qwen3": qwens.QWEN3,
        "qwen3moe": qwens.QWEN3_MOE,
        "qwen2vl": qwens.QWEN2_VL,
        "qwen3vl": qwens.QWEN3_VL,
        "qwen3vlmoe": qwens.QWEN3_VL_MOE,
        "qwen35": hybrids.QWEN35,
        "qwen35moe": hybrids.QWEN35_MOE,
        "qwen3next": hybrids.QWEN3_NEXT,
        "gemma": gemmas.GEMMA,
        "gemma2": gemmas.GEMMA2,
        "gemma3": gemmas.GEMMA3,
        "gemma3n": gemmas.GEMMA3N,
        "gemma4": gemmas.GEMMA4,
        "command-r": coheres.COMMAND_R,
        "cohere2": coheres.COHERE2,
        "phi2": layer_norms.PHI2,
        "phi3": others.PHI3,
        "phimoe": others.PHIMOE,
        "glm4": others.GLM4,
        "glm4moe": deepseeks.GLM4_MOE,
        "deepseek2": deepseeks.DEEPSEEK2,
        "dots1": deepseeks.DOTS1,
        "exaone-moe": deepseeks.EXAONE_MOE,
        "kimi-linear": kimi.KIMI_LINEAR,
        "nemotron_h": nemotrons.NEMOTRON_H,
        "nemotron_h_moe": nemotrons.NEMOTRON_H_MOE,
        "afmoe": others.AFMOE,
        "ernie4_5": ernies.ERNIE4_5,
        "ernie4_5-moe": ernies.ERNIE4_5_MOE,
        "apertus": others.APERTUS,
        "exaone4": others.EXAONE4,
        "falcon-h1": falcons.FALCON_H1,
        "hunyuan-dense": others.HUNYUAN,
        "hunyuan-moe": others.HUNYUAN_MOE,
        "seed_oss": others.SEED_OSS,
        "minimax-m2": minimax.MINIMAX_M2,
        "lfm2": lfm2.LFM2,
        "lfm2moe": lfm2.LFM2_MOE,
        "olmo": layer_norms.OLMO,
        "olmo2": others.OLMO2,
        "olmoe": others.OLMOE,
        "gpt-oss": others.GPT_OSS,
        "gptneox": layer_norms.GPT_NEOX,
        "nemotron": layer_norms.NEMOTRON,
        "stablelm": layer_norms.STABLELM,
        "starcoder2": layer_norms.STARCODER2,
        "gpt2": others.GPT2,
    }
)
