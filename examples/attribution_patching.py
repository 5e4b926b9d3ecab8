"""Attribution patching: activation patching for every place at once, from one backward pass.

The gradient of the "she" - "he" difference, times the difference of the two prompts' residual
streams, estimates what `activation_patching.py` measures. The backward pass runs over the same
machines as the forward pass. All of it is one job.
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

    with model.session(remote=not given.local):
        with model.trace(clean):
            wanted = nnsight.save([])
            for layer in layers:
                wanted.append(layer.output[0])
        with model.trace(corrupted):
            states = nnsight.save([])
            for number, layer in enumerate(layers):
                state = layer.output
                if number == 0:
                    state.requires_grad_(True)
                states.append(state)
            gap = head.output[0, -1, yes] - head.output[0, -1, no]
            grads = nnsight.save([])
            with gap.backward():
                for state in reversed(states):
                    grads.append(state.grad)

    estimate = torch.stack(
        [
            ((there - here[0].detach()) * grad[0]).sum(-1).float()
            for there, here, grad in zip(wanted, states, reversed(grads), strict=True)
        ]
    )
    if given.json:
        print(json.dumps({"words": texts, "estimate": estimate.tolist()}))
        return
    show(estimate, texts)


if __name__ == "__main__":
    main()
