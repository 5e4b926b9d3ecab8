"""An unmodified client's request, as bytes, on a skeleton whose layers are elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from nnsight.modeling.transformers import TransformersModel
from nnsight.schema.request import RequestModel
from nnsight.tracing.tracer import _saves, dec, inc

from tests.interventions.cases import CASES, GRADIENTS, Parts
from tests.interventions.worlds import DirectChannel, checkpoint, equal, remote, whole


class Posting:
    """A client's backend: keeps the request instead of posting it."""

    def __init__(self) -> None:
        self.request = b""

    def __call__(self, tracer: Any) -> None:
        self.request = RequestModel.serialize(tracer, compress=True)


def serve(request: bytes, model: TransformersModel) -> dict[str, Any]:
    """What the job process does with a request."""
    objects = model._remoteable_persistent_objects()
    tracer = RequestModel.deserialize(request, objects, compress=True)
    inc()
    try:
        tracer.execute(tracer.info.code)
        saves = _saves()
        return {n: v for n, v in tracer.info.frame.f_locals.items() if id(v) in saves}
    finally:
        dec()


def test_a_request_of_an_unmodified_client() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = TransformersModel(str(checkpoint("llama").directory), task="text-generation")
        posting: Any = Posting()
        with client.trace("The kettle sings", backend=posting):
            client.model.layers[2].mlp.output[:] *= 2
            start = client.model.layers[3].output
            start.requires_grad_(True)
            hidden = client.model.layers[4].output.save()  # noqa: F841 - the server returns it
            logits = client.output.logits.save()
            with logits.sum().backward():
                grad = start.grad.save()  # noqa: F841
        assert posting.request
        expected = serve(posting.request, whole("llama"))
        found = serve(posting.request, remote("llama", 3).model)
    assert found.keys() == expected.keys() == {"hidden", "logits", "grad"}
    equal(found["hidden"], expected["hidden"], 0.0)
    equal(found["logits"], expected["logits"], 0.0)
    equal(found["grad"], expected["grad"], 1e-4)


def test_jobs_take_turns_on_one_shard_without_mixing() -> None:
    """Two jobs, each started while the other stands still inside its trace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inner: dict[str, Any] = {}

        def meanwhile(name: str, cases: dict[str, Callable[[Parts], Any]]) -> None:
            inner[name] = cases[name](other)

        pending = iter(["source_edit", "generate_steered", "cache_everything"])

        class Interrupted(DirectChannel):
            def call(self, hop: int, message: bytes) -> bytes:
                answer = super().call(hop, message)
                name = next(pending, None)
                if name is not None:
                    meanwhile(name, CASES)
                return answer

        one = Parts(remote("llama", 3, over=Interrupted).model)
        other = Parts(remote("llama", 3).model)
        outer = CASES["inside_layers"](one)
        gradients = GRADIENTS["inside"](one)
        reference = Parts(whole("llama"))
        equal(outer, CASES["inside_layers"](reference), 0.0)
        equal(gradients, GRADIENTS["inside"](reference), 1e-4)
        assert len(inner) == 3
        for name, found in inner.items():
            equal(found, CASES[name](reference), 0.0)
    assert torch.is_grad_enabled()
