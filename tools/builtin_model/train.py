"""Train the built-in model and its tokenizer from nothing.

    python -m tools.builtin_model.train --out DIR [--steps N] [--seed 0] [--workers 2]
    python -m tools.builtin_model.train --out DIR --start-from OTHER [--steps N] ...

Reads no file but the checkpoint it starts from, and no network: all text comes from `corpus`.
Writes a Hugging Face checkpoint directory, also now and then on the way, so that a run that is cut
short leaves something usable.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from tools.builtin_model import attention
from tools.builtin_model.batching import Batch, batches, take, token_ids
from tools.builtin_model.corpus import (
    END,
    END_OF_TEXT,
    PAD,
    Document,
    held_out_documents,
    training_documents,
)
from tools.builtin_model.evaluate import held_out_loss
from tools.builtin_model.export import Result, Run, read_runs, write_checkpoint
from tools.builtin_model.vocabulary import train_tokenizer
from tools.builtin_model.workers import add_up, is_first, share, together

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_STEPS = 2000


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model. 3.5 M parameters learn this small language in an hour of one core."""

    vocabulary: int = 2048
    hidden: int = 192
    feed_forward: int = 512
    layers: int = 8
    heads: int = 6
    kv_heads: int = 2
    positions: int = 4096


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. Lengths are in tokens."""

    # The schedule is laid out for `steps`; training ends after `stop` of them.
    steps: int = DEFAULT_STEPS
    stop: int = DEFAULT_STEPS
    seed: int = 0
    step_tokens: int = 6144
    # A longer text is cut. The longest that the corpus makes are a little shorter.
    longest: int = 2048
    learning_rate: float = 4e-3
    warmup: int = 100
    weight_decay: float = 0.05
    tokenizer_texts: int = 20_000
    held_out_texts: int = 240
    save_every: int = 50
    # By how much the shares of some kinds of text are multiplied.
    more: Mapping[str, float] = field(default_factory=dict)

    def rate(self, step: int) -> float:
        """The share of the learning rate: linear warm-up, then half a cosine down to 0.02."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2


def build_model(shape: Shape, tokenizer: Tokenizer) -> Any:
    """A randomly initialised Llama of that shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.feed_forward,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=shape.positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=[tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END)],
            pad_token_id=tokenizer.token_to_id(PAD),
        )
    )


def begin(shape: Shape, recipe: Recipe, start_from: Path | None) -> tuple[Any, Tokenizer]:
    """The model and tokenizer to train: new ones, or those of a checkpoint of this script."""
    from tokenizers import Tokenizer as Reader
    from transformers import LlamaForCausalLM

    torch.manual_seed(recipe.seed)
    if start_from is not None:
        model = LlamaForCausalLM.from_pretrained(start_from, dtype=torch.float32)
        return model.train(), Reader.from_file(str(start_from / "tokenizer.json"))
    texts = (d.text for d in islice(training_documents(recipe.seed), recipe.tokenizer_texts))
    tokenizer = train_tokenizer(texts, shape.vocabulary)
    return build_model(shape, tokenizer), tokenizer


def train(
    out: Path, model: Any, tokenizer: Tokenizer, recipe: Recipe, command: str,
    earlier: tuple[Run, ...] = (),
) -> float:  # fmt: skip
    """Train, write the checkpoint to `out`, and return the held-out loss.

    `earlier` are the runs that made the weights that it starts from.
    """
    attention.register()
    model.set_attn_implementation(attention.NAME)
    optimizers = _optimizers(model, recipe)
    texts = token_ids(tokenizer, training_documents(recipe.seed + 1, recipe.more))
    held_out = held_out_documents(recipe.held_out_texts)
    started, tokens, mean = time.monotonic(), 0, 0.0
    for step in range(recipe.stop):
        taken = take(texts, recipe.step_tokens, recipe.longest)
        tokens += sum(map(len, taken))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * recipe.rate(step)
        loss = _step(model, optimizers, batches(taken, recipe.step_tokens // 4))
        mean = loss if step == 0 else 0.98 * mean + 0.02 * loss
        if not is_first():
            continue
        if step % 20 == 19:
            speed = tokens / (time.monotonic() - started)
            print(f"step {step + 1} loss {loss:.3f} mean {mean:.3f} {speed:.0f} tok/s", flush=True)
        if step % recipe.save_every == recipe.save_every - 1 and step + 1 < recipe.stop:
            early = held_out[: recipe.held_out_texts // 4]
            _export(out, model, tokenizer, early, (*earlier, Run(command, step + 1, tokens)))
    if not is_first():
        return mean
    return _export(out, model, tokenizer, held_out, (*earlier, Run(command, recipe.stop, tokens)))


def _optimizers(model: Any, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    for name, parameter in model.named_parameters():
        inside = parameter.ndim == 2 and "embed_tokens" not in name
        (matrices if inside else rest).append(parameter)
    muon = torch.optim.Muon(
        matrices,
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(rest, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    return [muon, adamw]


def _step(model: Any, optimizers: list[torch.optim.Optimizer], parts: list[Batch]) -> float:
    whole = sum(int(part.scored.sum()) for part in parts)
    total = 0.0
    # bf16 products halve the time on a CPU that has them; weights and sums stay fp32. One autocast
    # for all parts, so that each weight is rounded once.
    with torch.autocast("cpu", torch.bfloat16):
        for part in share(parts):
            hidden = model.model(input_ids=part.ids[:, :-1], use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[part.scored])  # (scored positions, vocabulary)
            targets = part.ids[:, 1:][part.scored]
            loss = functional.cross_entropy(logits.float(), targets, reduction="sum") / whole
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.item())
    total = add_up(model.parameters(), total)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total


def _export(
    out: Path, model: Any, tokenizer: Tokenizer, held_out: list[Document], runs: tuple[Run, ...]
) -> float:
    """Score the weights as they will be stored, in fp16, and write them."""
    scored = _as_stored(model)
    loss = held_out_loss(scored, tokenizer, held_out)
    print(f"held-out loss {loss:.4f} after {runs[-1].steps} steps", flush=True)
    write_checkpoint(out, model, tokenizer, Result(runs, len(held_out), loss))
    return loss


def _as_stored(model: Any) -> Any:
    """An fp32 copy whose weights went through fp16, as a reader of the checkpoint gets them."""
    rounded = {k: v.half().float() for k, v in model.state_dict().items()}
    config = type(model.config)(**model.config.to_diff_dict())
    stored = type(model)(config)
    stored.load_state_dict(rounded)
    return stored.eval()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Train the built-in model from nothing.")
    parser.add_argument("--out", type=Path, default=Path("build/builtin-checkpoint"))
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument(
        "--stop-after", type=int, help="end early; the learning rate still follows --steps"
    )
    parser.add_argument("--start-from", type=Path, help="a checkpoint of this script to go on from")
    parser.add_argument("--learning-rate", type=float, default=Recipe().learning_rate)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-tokens", type=int, default=Recipe().step_tokens)
    parser.add_argument(
        "--more", action="append", default=[], metavar="KIND=FACTOR", type=_factor,
        help="multiply the share of one kind of text, such as memory=2; repeatable",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    options = parser.parse_args()
    together(options.workers, _run, options)


def _factor(text: str) -> tuple[str, float]:
    kind, _, factor = text.partition("=")
    return kind, float(factor)


def _run(options: argparse.Namespace) -> None:
    steps, seed = options.steps, options.seed
    stop = options.stop_after or steps
    command = (
        f"python -m tools.builtin_model.train --steps {steps} --stop-after {stop} "
        f"--seed {seed} --workers {options.workers} "
        f"--step-tokens {options.step_tokens} --learning-rate {options.learning_rate:g}"
    )
    command += "".join(f" --more {kind}={factor:g}" for kind, factor in options.more)
    command += f" --out {options.out}"
    earlier: tuple[Run, ...] = ()
    if options.start_from is not None:
        command += f" --start-from {options.start_from}"
        earlier = read_runs(options.start_from)
    recipe = Recipe(
        steps=steps,
        stop=stop,
        seed=seed,
        step_tokens=options.step_tokens,
        learning_rate=options.learning_rate,
        more=dict(options.more),
    )
    if earlier:
        recipe = replace(recipe, warmup=recipe.warmup // 4)
    model, tokenizer = begin(Shape(), recipe, options.start_from)
    train(options.out, model, tokenizer, recipe, command, earlier)


if __name__ == "__main__":
    main()
