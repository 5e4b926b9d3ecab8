"""`hearthnet demo`: the whole story on one machine, with real processes and real sockets.

Three nodes hold the built-in model's layers between them, with overlap, are paired with one-time
codes and find each other by mDNS on the loopback interface. A fourth holds no layer and asks. In
the middle of its answer one of the serving nodes is killed. The answer goes on, and equals what one
machine says.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from mesh.cli.local_node import LocalNode

MODEL = "builtin"
SERVING = (("attic", "0-4"), ("kitchen", "3-7"), ("study", "4-7"))
ASKER = "sofa"
QUESTION = "What is hearthnet?"
STORY = "Once upon a time"
KILL_AFTER_TOKENS = 12
STORY_TOKENS = 60


def main() -> int:
    """Run the demo; 0 when everything was as it should be, 1 when not, 130 on Ctrl-C."""
    # A terminal's hang-up or a polite kill must clean up as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="hearthnet-demo-") as directory:
            return _story(Path(directory))
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # the terminal may be what went away
            _say("\nstopped; everything is cleaned up.")
        return 130


def _story(directory: Path) -> int:
    with contextlib.ExitStack() as stack:
        nodes = {
            name: _node(directory, name, layers) for name, layers in (*SERVING, (ASKER, "none"))
        }
        _say("Starting four nodes on this machine:")
        for name, layers in SERVING:
            _say(f"  {name:<8} holds layers {layers} of the model {MODEL!r}")
        _say(f"  {ASKER:<8} holds no layers; it asks\n")
        first, *others = nodes.values()
        stack.enter_context(first).wait_up()
        _say(f"{first.name} founded the hearth {first.get('/mesh/v1/hearth')['name']!r}")
        for node in others:
            joined = node.join(first)
            stack.enter_context(node)
            _say(f"{node.name} joined with the one-time code {joined.code} as {joined.level}")
        _say("")
        for node in nodes.values():
            node.wait_ready()
        _show_peers(nodes[ASKER])
        same = _ask(nodes[ASKER])
        return 0 if _lose_a_node(nodes) and same else 1


def _node(directory: Path, name: str, layers: str) -> LocalNode:
    # One thread each: these four share the cores that four machines would have for themselves.
    return LocalNode(
        name,
        directory / name,
        ("--model", MODEL, "--layers", layers, "--threads", "1"),
        {"OMP_NUM_THREADS": "1"},
    )


def _show_peers(asker: LocalNode) -> None:
    _say(f"{ASKER} found by mDNS:")
    for peer in asker.get("/mesh/v1/peers")["peers"]:
        if peer["state"] != "up":
            continue  # other hearths of this network are none of this story
        layers = ", ".join(shard["layers"] for shard in peer["shards"])
        _say(f"  {peer['name']:<8} {peer['address']:<18} layers {layers or '-'}")


def _ask(asker: LocalNode) -> bool:
    """A chat question over the mesh, beside the same question on one machine."""
    _say(f"\n{ASKER} asks: {QUESTION}\n")
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "stream": True,
    }
    facts = _stream(asker, "/v1/chat/completions", body)
    _show(facts)
    whole = _on_one_machine(question=QUESTION, prompt=None, count=len(facts["token_ids"]))
    return _compare(facts["token_ids"], whole)


def _lose_a_node(nodes: dict[str, LocalNode]) -> bool:
    """A story during which a serving node is killed."""
    asker = nodes[ASKER]
    _say(f"\n{ASKER} asks for a story. In the middle of it a node loses its power.\n")
    body = {
        "model": MODEL,
        "prompt": STORY,
        "temperature": 0,
        "max_tokens": STORY_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    sys.stdout.write(STORY)
    facts = _stream(asker, "/v1/completions", body, kill=nodes)
    _show(facts)
    if facts["failovers"] < 1:
        _say("  no hop was lost: the kill came too late")
        return False
    whole = _on_one_machine(question=None, prompt=STORY, count=STORY_TOKENS)
    return _compare(facts["token_ids"], whole)


def _stream(
    asker: LocalNode, path: str, body: dict[str, Any], kill: dict[str, LocalNode] | None = None
) -> dict[str, Any]:
    """Print an answer as it comes; kill the node of the last hop on the way when asked to."""
    facts: dict[str, Any] = {}
    for count, chunk in enumerate(_chunks(asker, path, body)):
        if kill is not None and count == KILL_AFTER_TOKENS:
            victim = _last_hop(asker)
            kill[victim].kill()
            sys.stdout.write(f" [{victim} was killed] ")
        for choice in chunk.get("choices", []):
            sys.stdout.write(choice.get("text") or choice.get("delta", {}).get("content") or "")
            sys.stdout.flush()
        facts = chunk.get("hearthnet", facts)
    sys.stdout.write("\n")
    return facts


def _chunks(asker: LocalNode, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    url = f"{asker.url}{path}"
    # A proxy of the environment must not get what stays on this machine.
    with httpx.stream("POST", url, json=body, timeout=120.0, trust_env=False) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise SystemExit(f"\nthe stream failed: {chunk['error']['message']}")
                yield chunk


def _last_hop(asker: LocalNode) -> str:
    """The node that serves the end of the route of the generation that runs now."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        running = asker.get("/mesh/v1/status")["generations"]
        if running:
            return str(running[0]["route"][-1]["node"])
        time.sleep(0.02)
    raise SystemExit("\nno generation was running")


def _show(facts: dict[str, Any]) -> None:
    timings = facts["timings"]
    route = " -> ".join(f"{hop['node']} {hop['layers']}" for hop in facts["route"])
    _say(f"\n  route        {route}")
    _say(f"  first token  {timings['first_token_ms']:.0f} ms")
    _say(f"  speed        {timings['tokens_per_second']:.0f} tokens per second")
    for hop in timings["hops"]:
        _say(
            f"  per step     {hop['node']:<8} {hop['p50_ms']:.1f} ms "
            f"({hop['compute_p50_ms']:.1f} ms of it computing)"
        )
    if facts["failovers"]:
        _say(f"  failovers    {facts['failovers']}")


def _on_one_machine(*, question: str | None, prompt: str | None, count: int) -> list[int]:
    """What Hugging Face transformers says, greedily, with the whole model in one process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from mesh.models.builtin import checkpoint_dir

    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(checkpoint_dir(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_dir())
    if question is not None:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
    else:
        ids = tokenizer(prompt)["input_ids"]
        model.generation_config.eos_token_id = None
    with torch.no_grad():
        output = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
        )
    answer: list[int] = output[0, len(ids) :].tolist()
    text = tokenizer.decode(answer, skip_special_tokens=True)
    _say(f"\n  one machine  {text.strip()!r}")
    return answer


def _compare(ours: Sequence[int], theirs: Sequence[int]) -> bool:
    same = list(ours) == list(theirs)
    _say(f"  token ids    {'equal' if same else 'DIFFERENT'}: {len(ours)} of {len(theirs)}")
    return same


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
