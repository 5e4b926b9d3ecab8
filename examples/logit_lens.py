"""Logit lens: what each layer would say next, if it were the last one.

One job; the final norm and the head are applied to every layer's output, wherever that layer is.
"""

from __future__ import annotations

import json

import nnsight
import torch
from opening import open_model, parser, parts

PROMPT = "Once there was a girl. Her name was Anna, and"


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--prompt", default=PROMPT)
    given = flags.parse_args()
    model = open_model(given.model, local=given.local)
    layers, norm, head = parts(model)

    with model.trace(given.prompt, remote=not given.local):
        logits = nnsight.save([])
        for layer in layers:
            logits.append(head(norm(layer.output))[0, -1])

    rows = []
    for number, row in enumerate(logits):
        chances, ids = torch.softmax(row.float(), -1).topk(3)
        best = [model.tokenizer.decode([int(each)]) for each in ids]
        rows.append({"layer": number, "words": best, "chances": chances.tolist()})
    if given.json:
        print(json.dumps(rows))
        return
    for row in rows:
        said = "  ".join(
            f"{w!r} {c:.2f}" for w, c in zip(row["words"], row["chances"], strict=True)
        )
        print(f"layer {row['layer']:3}  {said}")


if __name__ == "__main__":
    main()
