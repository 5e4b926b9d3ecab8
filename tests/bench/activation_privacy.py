"""What a host can read out of activations, and what noise and layers kept at home do about it.

The built-in model on its own kind of text. Two attacks, both by a host that knows the public
weights: the row of the embedding table nearest to what goes into layer 0, and for deeper layers a
ridge regression back to the embedding, learnt from text that the attacker ran through the same
layers with the same noise. What noise costs is measured on the same held-out text: how often the
most likely next token stays the same, how far the distribution moves, and how much of a greedy
answer stays word for word. Attacks that look at more than one row at a time do better than these.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mesh.models.builtin import checkpoint_dir
from mesh.pipeline.prefill import RowNoise
from tools.builtin_model.corpus.mixture import held_out_documents, training_documents

NOISES = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
ROW = 128
TRAIN_ROWS, TEST_ROWS = 160, 24
ANSWER = 24
PROMPT = 24
RIDGE = 1e-2


@dataclass(frozen=True)
class Bench:
    """The model and two separate texts: (rows, ROW) token ids to learn from and to attack."""

    model: Any
    train: torch.Tensor
    test: torch.Tensor

    @property
    def table(self) -> torch.Tensor:
        """(vocab, hidden) rows of the embedding."""
        table: torch.Tensor = self.model.get_input_embeddings().weight
        return table.float()

    def noisy(self, ids: torch.Tensor, noise: float) -> torch.Tensor:
        """(rows, ROW, hidden) as they leave the asker."""
        add = RowNoise(noise).add
        return torch.cat([add(self.model.get_input_embeddings()(row[None])) for row in ids])

    def hidden(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        """What goes into layer 0, and what comes out of every layer but the last."""
        parts = [
            self.model(inputs_embeds=part, output_hidden_states=True, use_cache=False).hidden_states
            for part in torch.split(inputs, 8)
        ]
        return [torch.cat(layer).float() for layer in zip(*parts, strict=True)][:-1]

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """(rows, ROW, vocab)."""
        parts = [
            self.model(inputs_embeds=part, use_cache=False).logits
            for part in torch.split(inputs, 8)
        ]
        return torch.cat(parts).float()


def nearest(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """(n,) the table's row with the smallest angle to each of `rows` (n, hidden)."""
    unit = torch.nn.functional.normalize(table, dim=-1)
    return (torch.nn.functional.normalize(rows, dim=-1) @ unit.T).argmax(-1)


def recovered(bench: Bench, layer: int, noise: float) -> float:
    """The share of tokens that are read back from what goes into `layer`."""
    seen = bench.hidden(bench.noisy(bench.test, noise))[layer].flatten(0, 1)
    if layer:
        learnt = bench.hidden(bench.noisy(bench.train, noise))[layer].flatten(0, 1)
        seen = _ridge(learnt, bench.table[bench.train.flatten()], seen)
    return float((nearest(bench.table, seen) == bench.test.flatten()).float().mean())


def _ridge(inputs: torch.Tensor, outputs: torch.Tensor, unseen: torch.Tensor) -> torch.Tensor:
    """(n, hidden) predicted for `unseen`; inputs are centred and scaled first."""
    mean, scale = inputs.mean(0), inputs.std(0).clamp_min(1e-6)
    left = (inputs - mean) / scale
    gram = left.T @ left + RIDGE * len(left) * torch.eye(left.shape[1])
    weights = torch.linalg.solve(gram, left.T @ (outputs - outputs.mean(0)))
    predicted: torch.Tensor = ((unseen - mean) / scale) @ weights
    return predicted + outputs.mean(0)


def cost(bench: Bench, noise: float) -> dict[str, float]:
    """What noise does to the next token: share of equal argmax, and KL in nats per token."""
    plain = bench.logits(bench.noisy(bench.test, 0.0)).log_softmax(-1)
    noisy = bench.logits(bench.noisy(bench.test, noise)).log_softmax(-1)
    return {
        "same_next_token": round(float((plain.argmax(-1) == noisy.argmax(-1)).float().mean()), 4),
        "kl_nats": round(float((plain.exp() * (plain - noisy)).sum(-1).mean()), 4),
    }


def answers_kept(bench: Bench, noise: float) -> float:
    """The share of greedy answer tokens before the first one that noise changes."""
    kept = 0
    prompts = bench.test[:, :PROMPT]
    for prompt in prompts:
        plain, noisy = (_greedy(bench, prompt, level) for level in (0.0, noise))
        same = [a == b for a, b in zip(plain, noisy, strict=True)]
        kept += same.index(False) if False in same else ANSWER
    return kept / (ANSWER * len(prompts))


def _greedy(bench: Bench, prompt: torch.Tensor, noise: float) -> list[int]:
    add, embed = RowNoise(noise).add, bench.model.get_input_embeddings()
    cache, rows, ids = None, prompt[None], []
    for _ in range(ANSWER):
        out = bench.model(inputs_embeds=add(embed(rows)), past_key_values=cache, use_cache=True)
        cache, rows = out.past_key_values, out.logits[:, -1:].argmax(-1)
        ids.append(int(rows))
    return ids


def _texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Text to learn from, and text that neither the model nor the attacker has seen."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_dir(), local_files_only=True)
    sides = ((training_documents(7), TRAIN_ROWS), (iter(held_out_documents(200)), TEST_ROWS))
    rows = []
    for documents, count in sides:
        ids: list[int] = []
        while len(ids) < count * ROW:
            ids += tokenizer.encode(next(documents).text)
        rows.append(torch.tensor(ids[: count * ROW]).reshape(count, ROW))
    return rows[0], rows[1]


@torch.no_grad()
def measure() -> dict[str, Any]:
    """By noise: what it costs and what is still read; by layer: what is read without noise."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint_dir(), dtype=torch.float32).eval()
    bench = Bench(model, *_texts())
    layers = range(model.config.num_hidden_layers)
    return {
        "by_noise": {
            str(noise): {
                **cost(bench, noise),
                "answer_kept": round(answers_kept(bench, noise), 3),
                "read_before_layer_0": round(recovered(bench, 0, noise), 4),
                "read_after_two_layers": round(recovered(bench, 2, noise), 4),
            }
            for noise in NOISES
        },
        "by_first_layer_seen": {
            str(layer): round(recovered(bench, layer, 0.0), 4) for layer in layers
        },
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
