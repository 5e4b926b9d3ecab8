"""Write a trained model as a standard Hugging Face checkpoint directory, model card included.

Every file is replaced as a whole, so a reader of the directory never sees half a file. Knows
nothing of how the model was trained beyond what it is told for the card.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from tools.builtin_model.corpus import END, END_OF_TEXT, PAD
from tools.builtin_model.vocabulary import tokenizer_config

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_RUNS = "training_runs.json"


@dataclass(frozen=True, slots=True)
class Run:
    """One training run: the command, and how far it went."""

    command: str
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """What the model card says about how the weights came about, and how good they are."""

    runs: tuple[Run, ...]
    held_out_texts: int
    held_out_loss: float


def read_runs(folder: Path) -> tuple[Run, ...]:
    """The runs that made a checkpoint of `write_checkpoint`. Raises OSError, ValueError."""
    return tuple(Run(**run) for run in json.loads((folder / _RUNS).read_text()))


def write_checkpoint(folder: Path, model: Any, tokenizer: Tokenizer, result: Result) -> None:
    """Write weights (fp16), config, tokenizer, generation config, runs and card into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    architecture = {"architectures": ["LlamaForCausalLM"], "dtype": "float16"}
    settings = model.config.to_diff_dict() | architecture
    stop = [tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END)]
    generation = {
        "eos_token_id": stop,
        "pad_token_id": tokenizer.token_to_id(PAD),
        "do_sample": False,
    }
    texts = {
        "config.json": _json(settings),
        "generation_config.json": _json(generation),
        "tokenizer.json": tokenizer.to_str(pretty=False) + "\n",
        "tokenizer_config.json": tokenizer_config(model.config.max_position_embeddings),
        _RUNS: _json([asdict(run) for run in result.runs]),
    }
    for name, text in texts.items():
        _replace(folder / name, _writer(text))
    weights = {
        name: tensor.detach().to(torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding, which is stored
    }
    _replace(
        folder / "model.safetensors",
        lambda path: save_file(weights, path, metadata={"format": "pt"}),
    )
    _replace(folder / "README.md", _writer(model_card(model, result)))


def model_card(model: Any, result: Result) -> str:
    """The text of README.md."""
    config = model.config
    return _CARD.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        feed_forward=config.intermediate_size,
        positions=config.max_position_embeddings,
        vocabulary=config.vocab_size,
        steps=sum(run.steps for run in result.runs),
        tokens=sum(run.tokens for run in result.runs) / 1e6,
        commands="\n".join(run.command for run in result.runs),
        texts=result.held_out_texts,
        loss=result.held_out_loss,
        perplexity=math.exp(result.held_out_loss),
    )


_CARD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
library_name: transformers
---

# The built-in model of hearthnet

A very small language model that ships inside hearthnet, so that the demo, the documentation and
the tests work offline with answers a person can read. It answers questions about hearthnet, makes
small talk and tells short stories.

## Architecture

`LlamaForCausalLM`, {parameters:.2f} M parameters: {layers} layers, hidden
size {hidden}, {heads} attention heads on
{kv_heads} key-value heads, feed-forward size {feed_forward}, tied
embeddings, {positions} positions. Byte-level BPE tokenizer with
{vocabulary} tokens; any Unicode text survives it. Weights are fp16 safetensors.

Chats are written `<|user|>`, `<|assistant|>` or `<|system|>`, a line break, the text, `<|end|>`
and a line break; the tokenizer's chat template does this. A text ends with `<|endoftext|>`.

## Data

All text comes from the seeded generators in `tools/builtin_model/corpus`. Nothing was downloaded
and no other model was used. About one text in thirty-two, chosen by a hash of its bytes, is held
out and never trained on.

## Training

Trained from random weights for {steps} steps ({tokens:.1f} M tokens) on a CPU. What
trains it again:

```
{commands}
```

The generators and the order of the texts repeat exactly for a seed; the last bits of the weights
depend on the number of workers and the version of torch. Wordings were added to the generators
between the runs, so the same commands end near these weights and not at them.

## Result

| | |
|---|---|
| held-out texts | {texts} |
| held-out loss (nats per token) | {loss:.4f} |
| held-out perplexity | {perplexity:.3f} |

The held-out texts come from the same generators as the training texts. Every token counts, also
what users say, and much of that is chance: sums, words to repeat, names that nobody has. The
numbers say how well the model has learned that small language, and nothing about English at large.

## Limits

It knows only what its generators say. What is measured here is measured by
`tests/models/test_builtin_abilities.py`, over questions that it was not trained on.

- A name that it was told it says again within the chat: as a rule where the name is a common one,
  less surely where its pieces are rare, and seldom where it is told or asked for in a way that it
  has not met. Of other things that it is told it remembers a few kinds: a pet's or a friend's
  name, a town, a color, a food, an age.
- Sums below twenty are right as a rule, in many wordings; differences mostly. Larger sums and
  products are guesses in the right form.
- It names the command for what one wants to do, and only commands that existed when it was
  trained. `hearthnet --help` is right where the two disagree.
- Within a story, names and pronouns may drift, and a story that is asked for need not be about
  what was asked for.
- It speaks only English, and must not be used for anything that matters.

## License

Apache-2.0, like the rest of hearthnet.
"""


def _json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _writer(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text, encoding="utf-8")


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a neighbour of `path`, then put it in its place."""
    part = path.with_name(f".{path.name}.part")
    write(part)
    part.chmod(0o644)  # safetensors writes for its owner only, but a package is read by everyone
    part.replace(path)
