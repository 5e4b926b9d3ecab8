"""Runs nnsight payloads in a jailed job, with the inner fence up or not."""

from __future__ import annotations

import io
import socket

import torch
from nnsight.intervention.serialization import CustomCloudUnpickler
from nnsight.schema.request import RequestModel
from nnsight.tracing.tracer import _saves, dec, inc

from mesh.interventions.jail import policy
from tests.interventions.jail import toy_model

_model = None


def warm(argument: str) -> None:
    """Warm-up: the model the payloads are about."""
    global _model  # noqa: PLW0603
    _model = toy_model.model()


def run(payload: bytes, channel: socket.socket) -> bytes:
    """Entry point: the first byte says whether the key is trusted."""
    assert _model is not None
    unpickler = CustomCloudUnpickler
    if payload[:1] == b"u":
        policy.raise_fence()
        unpickler = policy.FencedUnpickler
    objects = {"Interleaver": _model.interleaver}
    objects |= {f"Module:{envoy.path}": envoy._module for envoy in _model.modules()}
    tracer = RequestModel.deserialize(payload[1:], objects, False, unpickler)
    inc()
    try:
        tracer.execute(tracer.info.code)
        names = tracer.info.frame.f_locals
        saved = {name: value for name, value in names.items() if id(value) in _saves()}
    finally:
        dec()
    out = io.BytesIO()
    torch.save(saved, out)
    return out.getvalue()


def empty(payload: bytes, channel: socket.socket) -> bytes:
    """A job that does nothing."""
    return b""
