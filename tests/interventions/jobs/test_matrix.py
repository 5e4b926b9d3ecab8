"""Every kind of trace as a client's job: over one, two and three hops the numbers of one machine.

What `make test` runs is a part of the matrix; all of it, and all of it beside a chat, is chaos.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from mesh.errors import JobFailed
from mesh.pipeline.checkpoint import load_asker
from mesh.pipeline.commands import AskerOptions
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import ModelId
from tests.interventions.cases import CASES, GRADIENTS, Parts
from tests.interventions.jobworld import ROUTES, Bench, as_client, bench, shards
from tests.interventions.worlds import checkpoint, equal, whole
from tests.mesh_e2e.spread import Spread, greedy, hugging_face

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "gemma3", "qwen3_moe")
NOT_JOBS = {
    "generate_untraced": "not a trace",
    "source_names": "not a trace",
    "attached_module": "the module is the client's, see test_runner",
    "generate_sampled": "the seed is set at the client",
    "batched": "the gradient is read at the client",
    "error_of_the_user": "the error ends the job, see test_runner",
    "wrong_shape": "the error ends the job, see test_runner",
}
ERRORS = ("out_of_order", "out_of_order_within_a_layer")
NAMES = tuple(name for name in {**CASES, **GRADIENTS} if name not in NOT_JOBS)
FEW = (
    "every_layer", "edit_in_place", "edit_an_older_name", "skip_batched", "barrier",
    "generate_iter", "generate_beams", "source_recursive", "logit_lens", "cache_everything",
    "session", "attentions", "of_the_residual", "across_a_session", "attribution_patching",
)  # fmt: skip
PART: dict[str, tuple[tuple[int, Iterable[str], bool], ...]] = {
    "llama": ((3, NAMES, False), (1, FEW, True)),
    "gpt2": ((2, FEW, True),),
    "gemma3": ((3, FEW, False),),
    "qwen3_moe": ((2, FEW, True),),
}
"""What `make test` runs: (hops, cases, whether the key is trusted)."""

CHATTING = "gpt2"
"""Whose jobs run beside a chat in `make test`: one of the above, whose jail is warm by then."""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


async def differing(here: Bench, family: str, hops: int, names: Iterable[str]) -> dict[str, str]:
    """The cases that do not come out as on one machine, and how."""
    found: dict[str, str] = {}
    for name in names:
        here.reports.clear()
        try:
            await _compare(here, family, hops, name)
        except (AssertionError, JobFailed) as error:
            found[name] = str(error)[-1000:]
            continue
        ran = [report.hops for report in here.reports]
        if not ran and name not in ERRORS:
            found[name] = "no job ran"
        elif any(len(route) != hops for route in ran):
            found[name] = f"not over {hops} hops: {ran}"
    return found


async def _compare(here: Bench, family: str, hops: int, name: str) -> None:
    case = {**CASES, **GRADIENTS}[name]
    expected = await asyncio.to_thread(_on_one_machine, family, name)
    found = await as_client(here, family, hops, lambda model: case(Parts(model)))
    if name in ERRORS:
        kind, text = expected
        assert found[0] == "JobFailed"
        assert kind in found[1]
        assert text in found[1]
    else:
        equal(found, expected, 1e-4 if name in GRADIENTS else 0.0)
    assert not [line for line in here.lines if "runs inside this job" in line]


def _on_one_machine(family: str, name: str) -> Any:
    with warnings.catch_warnings():
        # What transformers and nnsight say about generation settings is not the subject.
        warnings.simplefilter("ignore")
        return {**CASES, **GRADIENTS}[name](Parts(whole(family)))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def here(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    """A runner over one shard process that holds every family of the part."""
    async with (
        shards([*PART], tmp_path_factory.mktemp("cache")) as host,
        bench(host) as running,
    ):
        yield running


@pytest.mark.slow
async def test_jobs_give_the_numbers_of_one_machine(here: Bench) -> None:
    for family, rows in PART.items():
        for hops, names, trusted in rows:
            here.trusted = trusted
            assert await differing(here, family, hops, names) == {}, (family, hops)


@pytest.mark.chaos
@pytest.mark.parametrize("family", FAMILIES)
async def test_the_whole_matrix(family: str, tmp_path: Path) -> None:
    async with shards([family], tmp_path) as host, bench(host) as here:
        for hops in ROUTES:
            here.trusted = hops != 3
            assert await differing(here, family, hops, NAMES) == {}, hops


async def chatting(host: ShardSupervisor, family: str, cache_dir: Path, done: asyncio.Event) -> int:
    """Ask over the same shards until told to stop; the answers must stay what they are."""
    directory, prompt = Path(checkpoint(family).directory), list(range(5, 45))
    expected, _ = await asyncio.to_thread(hugging_face, directory, prompt, 12)
    options = AskerOptions("fp32", "cpu", 1, cache_dir)
    model, _ = await asyncio.to_thread(load_asker, directory, ModelId(family), options)
    mesh, answers = Spread(model, host, ModelId(family)), 0
    await mesh.use(ROUTES[2])
    while not done.is_set() or not answers:
        answer = await mesh.generate(greedy(prompt, 12, f"r{answers}"))
        assert list(answer.token_ids) == expected
        answers += 1
    await mesh.close()
    return answers


async def beside_a_chat(here: Bench, family: str, names: Iterable[str], cache_dir: Path) -> None:
    # transformers loads one model at a time: what it changes meanwhile is the process's.
    await asyncio.to_thread(whole, family)
    done = asyncio.Event()
    (host,) = here.hosts
    chat = asyncio.create_task(chatting(host, family, cache_dir, done), name="chat")
    here.trusted = True
    try:
        for hops in ROUTES:
            assert await differing(here, family, hops, names) == {}, hops
    finally:
        done.set()
    assert await chat > 0


@pytest.mark.slow
async def test_jobs_beside_a_chat(here: Bench, tmp_path: Path) -> None:
    await beside_a_chat(here, CHATTING, FEW[:6], tmp_path)


@pytest.mark.chaos
@pytest.mark.parametrize("family", FAMILIES)
async def test_the_whole_matrix_beside_a_chat(family: str, tmp_path: Path) -> None:
    async with shards([family], tmp_path) as host, bench(host) as here:
        await beside_a_chat(here, family, NAMES, tmp_path)
