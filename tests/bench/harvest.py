"""Harvest throughput over two nodes against one machine's forward hooks; what steering costs.

Both write every layer's MLP output of the same prompts to safetensors files, with one thread per
process. Steered tokens per second are compared with plain ones on the same two nodes.
"""

from __future__ import annotations

import base64
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from mesh.cli.local_node import LocalNode, start_hearth
from mesh.models.builtin import checkpoint_dir
from tests.bench.noise import wait_for_idle

DISK = {"HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__HOST__HARVEST_MB": "2000"}
LINE = "The cat in the hall said nothing, and nobody in the house heard it. "
TEXTS = [f"{number}: {LINE * 6}" for number in range(32)]
ROUNDS = 5
TOKENS = 128


def through_the_mesh(asker: LocalNode, number: int) -> tuple[float, list[list[int]]]:
    """Tokens per second of one batch, and its token ids."""
    body = {"model": "builtin", "run": "0" * 16, "batch": number, "texts": TEXTS,
            "module": "model.layers.*.mlp", "max_tokens": 512}  # fmt: skip
    started = time.perf_counter()
    response = asker.post("/mesh/v1/harvest", body)
    took_s = time.perf_counter() - started
    response.raise_for_status()
    prompts: list[list[int]] = response.json()["prompts"]
    return sum(map(len, prompts)) / took_s, prompts


def on_one_machine(model: Any, prompts: list[list[int]], file: Path) -> float:
    """The same with ordinary hooks."""
    seen: dict[str, list[torch.Tensor]] = {}
    handles = [
        layer.mlp.register_forward_hook(
            lambda _m, _a, output, name=str(i): seen.setdefault(name, []).append(output[0].clone())
        )
        for i, layer in enumerate(model.model.layers)
    ]
    started = time.perf_counter()
    with torch.no_grad():
        for prompt in prompts:
            model.model(torch.tensor([prompt]))
        safetensors.torch.save_file({name: torch.cat(rows) for name, rows in seen.items()}, file)
    took_s = time.perf_counter() - started
    for handle in handles:
        handle.remove()
    return sum(map(len, prompts)) / took_s


def chat_speed(asker: LocalNode, seed: int, steer: list[dict[str, Any]]) -> float:
    """Tokens per second of one answer."""
    body = {"model": "builtin", "prompt": [40 + seed + i for i in range(16)], "max_tokens": TOKENS,
            "temperature": 0, "ignore_eos": True,
            "hearthnet": {"steer": steer, "draft": False}}  # fmt: skip
    response = asker.post("/v1/completions", body)
    response.raise_for_status()
    return float(response.json()["hearthnet"]["timings"]["tokens_per_second"])


def measure() -> dict[str, Any]:
    """Ratios within each round; medians over rounds."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint_dir(), dtype=torch.float32).eval()
    flags = ("--threads", "1", "--layers")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        root = Path(name)
        variables = {"OMP_NUM_THREADS": "1", **DISK}
        nodes = [
            LocalNode(node, root / node, (*flags, layers), variables)
            for node, layers in (("a", "0-3"), ("b", "4-7"), ("asker", "none"))
        ]
        start_hearth(nodes, stack)
        asker = nodes[-1]
        asker.wait_ready()
        vector = safetensors.torch.save({"vector": torch.ones(model.config.hidden_size)})
        asker.post("/mesh/v1/steering/publish", {
            "name": "bench", "model": "builtin", "path": "model.layers.5",
            "tensors": base64.b64encode(vector).decode(),
        }).raise_for_status()  # fmt: skip
        _, prompts = through_the_mesh(asker, 0)
        chat_speed(asker, 0, [])
        harvested, steered = [], []
        for number in range(1, ROUNDS + 1):
            wait_for_idle()
            mesh, _ = through_the_mesh(asker, number)
            harvested.append(mesh / on_one_machine(model, prompts, root / "local.safetensors"))
            plain = chat_speed(asker, number, [])
            steered.append(chat_speed(asker, number + 50, [{"name": "bench"}]) / plain)
    return {
        "harvest_tokens_per_second_to_local_ratio": round(statistics.median(harvested), 3),
        "steered_tokens_per_second_to_plain_ratio": round(statistics.median(steered), 3),
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
