"""Activation patching: where in the model is it decided that Anna is a she?

Two prompts that differ in a few words are run; then the second is run again, once per layer, with
the first one's residual stream put in at one position per row. The number is how much of the
difference between "she" and "he" comes back: 0 nothing, 1 all of it. All of it is one job.
"""

from __future__ import annotations

import json

import nnsight
import torch
from opening import open_model, parts, prompts_parser, show, token, words


def main() -> None:
    given = prompts_parser(__doc__).parse_args()
    model = open_model(given.model, local=given.local)
    layers, _, head = parts(model)
    yes, no = (token(model, word) for word in given.answers)
    clean, corrupted = given.clean, given.corrupted
    texts = words(model, corrupted)
    length = len(texts)
    if len(words(model, clean)) != length:
        raise SystemExit("The two prompts must have the same number of tokens.")

    with model.session(remote=not given.local):
        with model.trace(clean):
            states = []
            for layer in layers:
                states.append(layer.output[0])
            best = (head.output[0, -1, yes] - head.output[0, -1, no]).save()
        with model.trace(corrupted):
            worst = (head.output[0, -1, yes] - head.output[0, -1, no]).save()
        gaps = nnsight.save([])
        for layer, state in zip(layers, states):
            with model.trace([corrupted] * length):
                for place in range(length):
                    layer.output[place, place] = state[place]
                gaps.append(head.output[:, -1, yes] - head.output[:, -1, no])

    recovered = (torch.stack(list(gaps)).float() - worst) / (best - worst)
    if given.json:
        print(json.dumps({"words": texts, "recovered": recovered.tolist()}))
        return
    show(recovered, texts)


if __name__ == "__main__":
    main()
