"""Requests and stream frames as msgpack-able maps, for the channel between daemon and asker."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from mesh.types import (
    Done,
    Edit,
    Endpoint,
    GenerationRequest,
    HopTiming,
    LayerRange,
    ModelId,
    NodeId,
    PipelineAborted,
    Principal,
    RouteHop,
    SamplingParams,
    ShardDescriptor,
    ShardFailover,
    ShardId,
    ShardStatus,
    Site,
    StreamFrame,
    TokenDelta,
    TokenLogprob,
    WireDtype,
)


def encode_request(request: GenerationRequest) -> dict[str, Any]:
    """For `decode_request`."""
    # `asdict` copies a prompt's ids one by one: a second of the daemon's loop for a million.
    fields = asdict(replace(request, prompt_ids=None))
    return {**fields, "prompt_ids": request.prompt_ids, "principal": str(request.principal)}


def decode_request(fields: dict[str, Any]) -> GenerationRequest:
    """The inverse of `encode_request`."""
    sampling = dict(fields["sampling"])
    sampling["stop"] = tuple(sampling["stop"])
    messages, prompt_ids, wire_dtype = (
        fields["messages"],
        fields["prompt_ids"],
        fields["wire_dtype"],
    )
    return GenerationRequest(
        request_id=fields["request_id"],
        model=ModelId(fields["model"]),
        messages=None if messages is None else tuple(messages),
        prompt=fields["prompt"],
        prompt_ids=None if prompt_ids is None else tuple(prompt_ids),
        sampling=SamplingParams(**sampling),
        wire_dtype=None if wire_dtype is None else WireDtype(wire_dtype),
        fallback_to_local=fields["fallback_to_local"],
        edits=tuple(_edit(edit) for edit in fields["edits"]),
        principal=Principal.parse(fields["principal"]),
    )


def encode_frame(frame: StreamFrame) -> dict[str, Any]:
    """For `decode_frame`."""
    if isinstance(frame, TokenDelta) and not (frame.logprobs or frame.prompt_tokens):
        # One of these per token: `asdict` would cost more than everything else here.
        return {"type": frame.type, "text": frame.text, "token_ids": frame.token_ids}
    if isinstance(frame, Done):
        fields = {name: getattr(frame, name) for name in Done.__slots__}
        fields["route"] = [encode_hop(hop) for hop in frame.route]
        fields["hops"] = [asdict(hop) for hop in frame.hops]
        return fields
    return asdict(frame)


def decode_frame(fields: dict[str, Any]) -> StreamFrame:
    """The inverse of `encode_frame`; KeyError on a type nobody knows."""
    fields = dict(fields)
    kind = fields["type"]
    if kind == "token_delta":
        fields["token_ids"] = tuple(fields["token_ids"])
        fields["logprobs"] = tuple(_logprob(entry) for entry in fields.get("logprobs", ()))
    elif kind == "shard_failover":
        fields["replaced_by"] = tuple(fields["replaced_by"])
    elif kind == "done":
        fields["token_ids"] = tuple(fields["token_ids"])
        fields["route"] = tuple(decode_hop(hop) for hop in fields["route"])
        fields["hops"] = tuple(HopTiming(**hop) for hop in fields["hops"])
    frame: StreamFrame = _FRAMES[kind](**fields)
    return frame


def encode_hop(hop: RouteHop) -> dict[str, Any]:
    """For `decode_hop`."""
    shard = asdict(hop.shard)
    shard["layer_range"] = str(hop.shard.layer_range)
    shard["advertised_at"] = hop.shard.advertised_at.isoformat()
    return {"shard": shard, "layers": str(hop.layers)}


def decode_hop(fields: dict[str, Any]) -> RouteHop:
    """The inverse of `encode_hop`."""
    shard = dict(fields["shard"])
    shard["layer_range"] = LayerRange.parse(shard["layer_range"])
    shard["advertised_at"] = datetime.fromisoformat(shard["advertised_at"])
    for name, kind in (("shard_id", ShardId), ("model_id", ModelId), ("host", NodeId)):
        shard[name] = kind(shard[name])
    shard["endpoint"] = Endpoint(shard["endpoint"])
    return RouteHop(ShardDescriptor(**shard), LayerRange.parse(fields["layers"]))


_FRAMES: dict[str, type[Any]] = {
    "token_delta": TokenDelta,
    "shard_status": ShardStatus,
    "shard_failover": ShardFailover,
    "pipeline_aborted": PipelineAborted,
    "done": Done,
}


def _edit(fields: dict[str, Any]) -> Edit:
    return Edit(Site(**fields["site"]), fields["strength"], fields["data"])


def _logprob(fields: dict[str, Any]) -> TokenLogprob:
    top = tuple((int(i), str(text), float(value)) for i, text, value in fields["top"])
    return TokenLogprob(fields["token_id"], fields["token"], fields["logprob"], top)
