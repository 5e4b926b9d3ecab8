"""Requests on their way to an asker."""

from __future__ import annotations

from mesh.pipeline.frames import decode_request, encode_request
from mesh.types import (
    Edit,
    GenerationRequest,
    ModelId,
    Principal,
    PrincipalKind,
    SamplingParams,
    Site,
    WireDtype,
)


def test_request_comes_back_as_it_was_and_its_ids_are_not_copied() -> None:
    request = GenerationRequest(
        "cmpl-1",
        ModelId("m"),
        prompt_ids=(5, 1, 4),
        sampling=SamplingParams(temperature=0.5, seed=3, stop=("a", "b")),
        wire_dtype=WireDtype.BF16,
        edits=(Edit(Site(3), 2.0, b"data"),),
        principal=Principal(PrincipalKind.KEY, "0a1b2c3d"),
    )
    fields = encode_request(request)
    assert decode_request(fields) == request
    assert fields["prompt_ids"] is request.prompt_ids  # a second for a million, one by one
