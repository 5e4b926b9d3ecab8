"""One researcher of a storm: an unmodified client in a process of its own, one trace after another.

``python -m tests.interventions.jobs.storm_client DIRECTORY FIRST COUNT FILE`` with
``NDIF_API_KEY`` and ``NDIF_HOST`` set; the values of every trace go to FILE.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
from nnsight import CONFIG
from nnsight.modeling.huggingface import _ID_CACHE
from nnsight.modeling.transformers import TransformersModel


def work(model: TransformersModel, number: int, **more: Any) -> dict[str, Any]:
    """A trace whose values are its own."""
    factor = 1.0 + number / 100
    with model.trace(torch.tensor([[5 + number, 7, 9]]), **more):
        model.model.layers[2].output[:] *= factor
        mine = model.model.layers[4].output.save()
        who = (factor * torch.ones(1)).save()
    return {"mine": mine, "who": who}


def main(directory: str, first: int, count: int, file: str) -> None:
    """Trace and keep what came back."""
    torch.set_num_threads(1)
    _ID_CACHE[directory] = directory
    CONFIG.API.HOST, CONFIG.API.APIKEY = os.environ["NDIF_HOST"], os.environ["NDIF_API_KEY"]
    CONFIG.APP.REMOTE_LOGGING = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = TransformersModel(directory, task="text-generation")
        numbers = range(first, first + count)
        torch.save({number: work(model, number, remote=True) for number in numbers}, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
