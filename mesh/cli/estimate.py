"""What a plan says, for people: which machine takes what, how fast that is, what would help."""

from __future__ import annotations

from typing import Any

from mesh.cli.output import print_table, say
from mesh.units import data_size, memory_size

_ENTRIES = ("node", "layers", "device", "needs", "has", "fetches", "ms a token", "way")


def print_plan(plan: dict[str, Any]) -> None:
    """Print what `POST /mesh/v1/plan` returned."""
    count, streams = plan["total_layers"], plan["streams"]
    beside = ""
    shards = [shard for replica in plan["replicas"] for shard in replica["shards"]]
    if (most := plan["positions"]) > streams * plan["context"]:
        sizes = {min((each.get("positions", most) for each in shards), default=most), most}
        beside = f"; a shard sets {' to '.join(map(str, sorted(sizes)))} aside (host.kv_tokens)"
    say(
        f"{plan['model_id']}: {count} layers in {_format(plan['quant'])}, caches for"
        f" {streams} stream{'s' if streams > 1 else ''} of {plan['context']} positions{beside}"
    )
    for number, replica in enumerate(plan["replicas"], 1):
        say()
        if len(plan["replicas"]) > 1:
            say(f"replica {number}")
        _print_replica(replica, streams)
    if streams > 1 and shards and most == streams * plan["context"]:
        say(f"its caches are for so many streams where it is deployed with --context {most}")
    _print_machines(plan["machines"], fits=plan["refusal"] is None)
    if plan["others_rest"]:
        say()
        say("It fits once other deployments rest: the smallest that may go make room.")
    refusal = plan["refusal"]
    if refusal is not None:
        say()
        say(f"It does not fit: {refusal['message']}")
        say(refusal["fix"])


def _print_replica(replica: dict[str, Any], streams: int) -> None:
    print_table(_ENTRIES, [_row(shard) for shard in replica["shards"]])
    together = ""
    if streams > 1:
        together = f", {replica['all_tokens_per_second']:.1f} for {streams} streams together"
    say(
        f"about {replica['tokens_per_second']:.1f} tokens/s{together}; first token of a prompt of"
        f" 512 after {replica['first_token_ms'] / 1000:.1f} s"
    )
    most = replica["bottleneck"]
    where = f" at {most['node']}" if most["node"] else ""
    say(
        f"most of it: {_WHAT[most['what']]}{where}, {most['ms']:.1f} of"
        f" {replica['token_ms']:.1f} ms a token"
    )
    say(f"would help: {most['help']}")
    gaps = [shard["node"] for shard in replica["shards"] if shard["gap"]]
    if gaps:
        say(f"{', '.join(gaps)} cannot hold old and new at once: there will be a gap.")


_WHAT = {"computing": "computing", "way": "the way", "head": "the output head", "asker": "asking"}


def _row(shard: dict[str, Any]) -> list[str]:
    need = shard["need"]
    parts = f"{memory_size(need['weights'])} weights, {memory_size(need['caches'])} caches"
    return [
        shard["node"],
        shard["layers"],
        f"{shard['device']} {shard['format']}",
        f"{memory_size(need['total'])} ({parts})",
        memory_size(shard["have"]),
        data_size(shard["fetch_bytes"]) if shard["fetch_bytes"] else "nothing",
        f"{shard['decode_ms']:.1f}",
        f"{shard['hop_ms']:.1f}",
    ]


def _print_machines(machines: list[dict[str, Any]], *, fits: bool) -> None:
    left = [row for row in machines if not row["used"]]
    if not left:
        return
    say()
    rows = [
        [row["node"], memory_size(row["free_bytes"]), row["layers_that_fit"] or "none", row["why"]]
        for row in left
    ]
    title = "not used" if fits else "machine"
    print_table([title, "free", "layers that fit", "why"], rows)


def _format(quant: str) -> str:
    return "16 or 32 bit" if quant == "none" else quant
