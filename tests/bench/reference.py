"""Hugging Face generate in a process of its own: reads commands, prints milliseconds.

``python -m tests.bench.reference DIRECTORY DTYPE`` then one JSON list of prompt ids and a count of
new tokens per line.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class Stopwatch(BaseStreamer):  # type: ignore[misc] # transformers is untyped
    """When each token came. The first call is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left over."""


def main() -> None:
    directory, dtype = sys.argv[1], sys.argv[2]
    torch.set_num_threads(1)
    names = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=names[dtype]).eval()
    model.generation_config.eos_token_id = None
    print("ready", flush=True)
    for line in sys.stdin:
        ids, count = json.loads(line)
        watch = Stopwatch()
        with torch.inference_mode():
            model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                streamer=watch,
            )
        first_ms = (watch.times[1] - watch.times[0]) * 1e3
        decode_s = watch.times[-1] - watch.times[1]
        print(json.dumps({"first_token_ms": first_ms, "tok_s": (count - 1) / max(decode_s, 1e-9)}))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
