"""GGUF files give the numbers of the checkpoints they come from, and those Hugging Face reads."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from mesh.errors import BadCheckpoint, ModelNotFound, UnsupportedFamily
from mesh.models.load import load_span
from mesh.models.manifest import read_manifest
from mesh.models.tokenizer import Tokenizer
from mesh.models.tokenizer_files import load_tokenizer
from mesh.types import GenerationRequest, LayerRange, ModelId
from tests.checkpoints import CHAT_TEMPLATE, GROWING
from tests.gguf_files import write_gguf
from tests.models.chain import CPU, prompt_chunks, run_parts, run_whole
from tests.models.conftest import Checkpoint

READ_BY_BOTH = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "phi3", "gpt2",
)  # fmt: skip
"""What transformers reads from GGUF as well."""
FAMILIES = (
    *READ_BY_BOTH, "smollm3", "granite", "olmo2", "olmo3", "gpt_oss", "ministral3", "qwen3_5",
    "qwen3_5_moe", "qwen3_next", "glm4_moe", "gemma4", "mixtral", "exaone4", "ernie4_5",
    "ernie4_5_moe", "lfm2", "lfm2_moe", "qwen2_moe", "glm4", "granitemoe", "granitemoehybrid",
    "hunyuan_v1_dense", "seed_oss", "falcon_h1", "minimax_m2", "arcee",
    "hunyuan_v1_moe", "olmoe", "apertus", "dots1", "exaone_moe", "afmoe",
    "kimi_linear", "nemotron_h", "nemotron_h_dense", "cohere", "cohere2", "mistral4",
    "gemma", "phi", "stablelm", "starcoder2", "nemotron", "gpt_neox", "olmo",
    "granitemoeshared", "minicpm3", "phimoe", "llama4_text",
)  # fmt: skip
_CHUNKS = (13, 70, 1)
_LAYERS = 6
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_TEXTS = (
    "The kettle sings, 42 times  a day.\n\n Grüße <|turn|>user: hi</s>",
    " où dort le chat?  ",
    "",
)


def _settings(family: str) -> dict[str, Any]:
    """What a GGUF file cannot say otherwise."""
    mixed = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return {
        "mistral": {"sliding_window": None}, "qwen3_moe": mixed, "qwen3_next": mixed,
        "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention"] * 2},
        "qwen2_moe": mixed | {"norm_topk_prob": False}, "dots1": {"sliding_window": None},
        "llama4_text": {
            "attention_chunk_size": 8192, "floor_scale": 8192, "intermediate_size_mlp": 96,
        },
        "minicpm3": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        "mistral4": {"rope_parameters": GROWING | {"llama_4_scaling_beta": 0.1}},
    }.get(family, {})  # fmt: skip


def require_its_tokens(directory: Path, file: Path) -> None:
    """What is made of a checkpoint, in parts, says what that says."""
    chunks = prompt_chunks(_CHUNKS)
    expected, ids = run_whole(directory, chunks, decode=6)
    manifest = read_manifest(write_gguf(directory, file))
    found, found_ids = run_parts(manifest, (0, 2, _LAYERS), chunks, decode=6)
    assert found_ids == ids
    for step, other in zip(found, expected, strict=True):
        torch.testing.assert_close(step, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_gives_the_tokens_of_the_checkpoint_that_it_was_made_of(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = checkpoint(family, layers=_LAYERS, **_settings(family))
    require_its_tokens(directory, tmp_path / "model.gguf")


_SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("qwen3", {"rope_parameters": _PLAIN | {"rope_type": "linear", "factor": 4.0}}),
    "longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [2.0 + 0.5 * i for i in range(8)],
                "original_max_position_embeddings": 64,
            },
            "original_max_position_embeddings": 64,
            "sliding_window": 50,
        },
    ),
    "global layers only": (
        "gemma3",
        {
            "rope_parameters": {
                "sliding_attention": _PLAIN,
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            }
        },
    ),
    "by unusual frequencies": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 2.0, "original_max_position_embeddings": 100,
            }
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("scaling", _SCALED)
def test_scaled_rotary_embeddings(scaling: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    family, settings = _SCALED[scaling]
    directory = checkpoint(family, layers=_LAYERS, **settings)
    require_its_tokens(directory, tmp_path / "model.gguf")


_KINDS = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K")
_OF_EACH_KIND = [("llama", kind) for kind in _KINDS] + [
    (family, "Q8_0") for family in READ_BY_BOTH if family != "llama"
]


@pytest.mark.parametrize(("family", "kind"), _OF_EACH_KIND)
def test_a_file_gives_what_hugging_face_reads_of_it(
    family: str, kind: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    # What its reader leaves out of a file is not in these: it is in the tests above.
    settings = _settings(family) | ({"rope_parameters": _PLAIN} if family in _SCALED_SO else {})
    settings |= {"hidden": 256} if kind.endswith("_K") else {}
    directory = checkpoint(family, layers=3, **settings)
    file = write_gguf(directory, tmp_path / "model.gguf", kind)
    chunks = prompt_chunks(_CHUNKS)
    whole = _read_by_hugging_face(file, tmp_path / "read")
    expected, ids = run_whole(whole, chunks, decode=6)
    found, found_ids = run_parts(read_manifest(file), (0, 2, 3), chunks, decode=6)
    assert found_ids == ids
    for step, other in zip(found, expected, strict=True):
        torch.testing.assert_close(step, other, rtol=1e-4, atol=1e-4)


def test_experts_in_blocks_of_four_bit_are_decoded(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = checkpoint("gpt_oss", layers=2)
    found, plain = (
        load_span(
            read_manifest(write_gguf(directory, tmp_path / f"{kind}.gguf", kind)),
            LayerRange(0, 2),
            dtype=torch.float32,
            device=CPU,
        ).module.layers[1].mlp.experts
        for kind in ("MXFP4", "F32")
    )  # fmt: skip
    for name in ("gate_up_proj", "down_proj"):
        stored = getattr(plain, name).transpose(-1, -2).contiguous().numpy()
        blocks = gguf.quantize(stored, gguf.GGMLQuantizationType.MXFP4)
        expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
        assert torch.equal(getattr(found, name), torch.from_numpy(expected).transpose(-1, -2))


_SCALED_SO = ("llama", "qwen2")


def _read_by_hugging_face(file: Path, directory: Path) -> Path:
    """Its reading of the file as a checkpoint of safetensors; its loader wants `accelerate`."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    if hasattr(config, "query_pre_attn_scalar"):
        config.query_pre_attn_scalar = config.head_dim  # which it leaves at another model's
    if config.model_type == "qwen3":
        config.head_dim = 16
    if config.model_type == "qwen3_moe":
        config.moe_intermediate_size = 64
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_is_that_of_the_checkpoint(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = checkpoint(family, layers=3, **_settings(family))
    file = write_gguf(directory, tmp_path / "model.gguf")
    expected = AutoTokenizer.from_pretrained(directory)
    cache = tmp_path / "cache"
    for _ in range(2):  # made, and kept
        manifest = read_manifest(file, cache_dir=cache)
        tokenizer = Tokenizer.load(manifest)
        assert len(load_tokenizer(manifest)) == manifest.vocab_size
        assert manifest.eos_ids == (2,)
        assert tokenizer.eos_ids == {2}
        for text in _TEXTS:
            ids = expected(text)["input_ids"]
            assert tokenizer.encode(text) == ids
            assert tokenizer.decode(ids) == expected.decode(ids, skip_special_tokens=True)
        messages = [{"role": "user", "content": "Who hid the butter?"}]
        chat = expected.apply_chat_template(
            messages, chat_template=CHAT_TEMPLATE, add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.encode_chat(messages) == expected(chat, add_special_tokens=False).input_ids
        assert _bound_to("Grüße", tokenizer, manifest.vocab_size) == '"Grüße"'
    assert len(list(cache.glob("tokenizer-*.json"))) == 1


def _bound_to(text: str, tokenizer: Tokenizer, vocab_size: int) -> str:
    """What an answer says that can say nothing but this text of JSON."""
    request = GenerationRequest("r", ModelId("m"), schema={"const": text})
    constraint = tokenizer.grammars(vocab_size).constraint(request, None, None)
    assert constraint is not None
    ids: list[int] = []
    while not constraint.is_over:
        ids.append(int(np.flatnonzero(constraint.allowed())[-1]))
        constraint.take(ids[-1])
    return tokenizer.decode(ids)


def test_a_file_has_chat_templates_by_their_names(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = checkpoint("llama", layers=2)
    written = write_gguf(directory, tmp_path / "tools.gguf", edit=_has_one_for_tools)
    tokenizer = Tokenizer.load(read_manifest(written))
    asked = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    assert tokenizer.takes_tools()
    assert tokenizer.decode(tokenizer.encode_chat(asked, tools=[tool])) == "look hi"
    plain = Tokenizer.load(read_manifest(write_gguf(directory, tmp_path / "plain.gguf")))
    assert tokenizer.encode_chat(asked) == plain.encode_chat(asked)


def test_texts_begin_with_the_token_that_the_file_says(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = checkpoint("llama", layers=2)
    plain = Tokenizer.load(read_manifest(write_gguf(directory, tmp_path / "plain.gguf")))
    begun = write_gguf(directory, tmp_path / "begun.gguf", edit=_begins)
    assert Tokenizer.load(read_manifest(begun)).encode("hi") == [1, *plain.encode("hi")]


def _has_one_for_tools(writer: Any) -> None:
    template = (
        "{% for t in tools %}{{ t.function.name }}{% endfor %} {{ messages[0].content }}"
        "{# <tool_call> #}"
    )
    writer.add_string("tokenizer.chat_template.tool_use", template)


def _begins(writer: Any) -> None:
    del writer.kv_data[0]["tokenizer.ggml.add_bos_token"]
    writer.add_add_bos_token(True)


def test_a_split_that_nobody_knows_is_no_tokenizer(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def edit(writer: Any) -> None:
        del writer.kv_data[0]["tokenizer.ggml.pre"]
        writer.add_tokenizer_pre("brand-new")

    file = write_gguf(checkpoint("llama", layers=2), tmp_path / "model.gguf", edit=edit)
    with pytest.raises(BadCheckpoint, match="brand-new"):
        Tokenizer.load(read_manifest(file))


def test_a_directory_that_holds_only_a_file_is_that_model(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = checkpoint("llama", layers=3)
    snapshot = tmp_path / "models--house--Small-GGUF" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    file = write_gguf(directory, snapshot / "small-f16.gguf", "F16")
    for name in ("mmproj-small.gguf", "small-mmproj-f16.gguf"):
        (snapshot / name).write_bytes(b"pictures")
    # macOS leaves such beside each file of a disk that keeps no attributes, as exFAT.
    (snapshot / "._small-f16.gguf").write_bytes(b"\0\5\x16\7 attributes")
    manifest = read_manifest(snapshot)
    assert (manifest.model_id, manifest.gguf) == ("house/Small-GGUF", file)
    assert read_manifest(file).model_id == "small-f16"
    assert (manifest.dtype, manifest.total_layers, manifest.max_positions) == ("float16", 3, 1024)
    assert (manifest.vocab_size, manifest.hidden_size, manifest.tied) == (384, 64, False)
    write_gguf(directory, snapshot / "small-q8.gguf", "Q8_0")
    with pytest.raises(BadCheckpoint, match="holds 2 models: small-f16, small-q8"):
        read_manifest(snapshot)


def test_safetensors_beside_a_file_are_the_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("llama", layers=2), tmp_path / "both")
    write_gguf(directory, directory / "other.gguf", "Q8_0")
    assert read_manifest(directory).gguf is None


def test_parts_of_a_model_are_the_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = checkpoint("llama", layers=3)
    one = read_manifest(write_gguf(directory, tmp_path / "one.gguf"))
    (tmp_path / "parts").mkdir()
    first = write_gguf(directory, tmp_path / "parts" / "many.gguf", parts=3)
    parts = read_manifest(tmp_path / "parts")
    assert (parts.model_id, parts.weights_sha256) == ("parts", one.weights_sha256)
    assert read_manifest(first).model_id == "many"
    assert read_manifest(first.with_name("many-00002-of-00003.gguf")).gguf == first
    last = first.with_name("many-00003-of-00003.gguf")
    kept = last.rename(tmp_path / "away")
    with pytest.raises(BadCheckpoint, match=r"00003.gguf is missing"):
        read_manifest(first)
    shutil.copy(first.with_name("many-00002-of-00003.gguf"), last)
    with pytest.raises(BadCheckpoint, match="says that it is part 1"):
        read_manifest(first)
    kept.replace(last)
    assert read_manifest(first).weights_sha256 == one.weights_sha256


def test_who_has_another_file_has_other_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, cache = checkpoint("llama", layers=2), tmp_path / "cache"
    file = write_gguf(directory, tmp_path / "a.gguf", "Q8_0")
    other = shutil.copy(file, tmp_path / "b.gguf")
    first = read_manifest(file, cache_dir=cache)
    assert read_manifest(other).weights_sha256 == first.weights_sha256
    again = read_manifest(file, cache_dir=cache)
    assert (again.bytes_hashed, again.weights_sha256) == (0, first.weights_sha256)
    entry = first.layer_tensors(LayerRange(1, 2))[0]
    with other.open("r+b") as stream:
        stream.seek(entry.offset)
        stream.write(b"\x01\x02\x03\x04")
    assert read_manifest(other).weights_sha256 != first.weights_sha256
    q4 = read_manifest(write_gguf(directory, tmp_path / "c.gguf", "Q4_0"))
    assert q4.weights_sha256 != first.weights_sha256
    assert first.bytes_hashed == sum(each.nbytes for each in first.tensors.values())


def test_whoever_reads_a_file_imports_neither_torch_nor_transformers(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    file = write_gguf(checkpoint("llama", layers=2), tmp_path / "model.gguf", "Q8_0")
    code = (
        "import sys; from pathlib import Path; from mesh.models.manifest import read_manifest;"
        "assert 'gguf' not in sys.modules;"
        "read_manifest(Path(sys.argv[1]));"
        "heavy = {'torch', 'transformers', 'requests', 'tokenizers'} & sys.modules.keys();"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, timeout=60)


def test_a_span_reads_its_layers_and_no_others(checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = write_gguf(checkpoint("llama", layers=4), tmp_path / "model.gguf", "Q8_0")
    manifest = read_manifest(file)
    loaded = load_span(manifest, LayerRange(1, 3), dtype=torch.bfloat16, device=CPU)
    assert loaded.bytes_read == sum(manifest.layer_bytes[1:3])
    assert {p.dtype for p in loaded.module.parameters()} == {torch.bfloat16}
    plain = load_span(manifest, LayerRange(1, 3), dtype=torch.float32, device=CPU)
    assert set(plain.sha256) == {n for n, _ in plain.module.named_parameters() if "layernorm" in n}


_Edit = Callable[[Any], object]
_REFUSED: dict[str, tuple[str, _Edit]] = {
    "a setting": ("llama.brand_new", lambda w: w.add_float32("llama.brand_new", 2.0)),
    "a window": ("sliding_window", lambda w: w.add_sliding_window(64)),
    "experts": ("its experts are apart", lambda w: w.add_expert_count(8)),
    "another scaling": ("scaled twice", lambda w: w.add_rope_scaling_type(_Su)),
    "a layer of its own": (
        "head_count_kv",
        lambda w: (w.kv_data[0].pop("llama.attention.head_count_kv"), w.add_head_count_kv([2, 4])),
    ),
    "a tensor": ("blk.0.brand_new", lambda w: w.add_tensor("blk.0.brand_new.weight", _ONES)),
    "an adapter": (
        "it holds a adapter",
        lambda w: (w.kv_data[0].pop("general.type"), w.add_type("adapter")),
    ),
}  # fmt: skip


class _Su:
    value = "longrope"


_ONES = torch.ones(32).numpy()


@pytest.mark.parametrize("what", _REFUSED)
def test_what_is_not_understood_is_refused(
    what: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    said, edit = _REFUSED[what]
    file = write_gguf(checkpoint("llama", layers=2), tmp_path / "model.gguf", edit=edit)
    with pytest.raises(UnsupportedFamily, match=said):
        read_manifest(file)


def test_an_architecture_that_no_test_compares_is_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = checkpoint("llama", layers=2)
    file = write_gguf(directory, tmp_path / "model.gguf", arch=gguf.MODEL_ARCH.BAICHUAN)
    with pytest.raises(UnsupportedFamily, match=r"'baichuan'.*only these are: afmoe, apertus"):
        read_manifest(file)
    with pytest.raises(ModelNotFound):
        read_manifest(tmp_path / "none.gguf")
