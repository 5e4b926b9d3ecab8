"""A trace of no use before the first real one: it runs in every family, and leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from mesh.interventions.jobs.inside import execute
from mesh.interventions.jobs.order import JobOrder
from mesh.interventions.jobs.rehearsal import TIMES, NoLayers, rehearsed, written
from mesh.interventions.skeleton import job_model, load_skeleton
from mesh.shard.taps.session import TapLimits, TapSession
from mesh.types import LayerRange
from tests.checkpoints import FAMILIES
from tests.interventions.cases import CASES, Parts
from tests.interventions.worlds import SPLITS, DirectChannel, checkpoint, equal, remote, tree

ORDER = JobOrder(compress=True, attention="", trusted=True)


@pytest.fixture(scope="module")
def jail() -> Iterator[ProcessPoolExecutor]:
    """A process of its own for what a job's does: it leaves traces in the libraries that a client
    in the same process would send along."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        yield process


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_after_a_rehearsal_gives_what_one_without_gives(
    family: str, jail: ProcessPoolExecutor
) -> None:
    jail.submit(_with_and_without, family).result(120)


def _with_and_without(family: str) -> None:
    torch.set_num_threads(1)
    manifest = checkpoint(family)
    skeleton = load_skeleton(manifest, dtype=torch.float32)
    request = written(skeleton.model)
    job_model(skeleton, NoLayers(), [LayerRange(0, manifest.total_layers)], print)
    for _ in range(2):
        (seen,) = execute(skeleton.model, ORDER, request).values()
        assert seen.logits.shape[-1] == skeleton.model.config.get_text_config().vocab_size

    split = SPLITS[2]
    channel = DirectChannel(
        [TapSession(tree(family, held), run, TapLimits()) for run, held in split]
    )
    model = job_model(skeleton, channel, [run for run, _ in split], print)
    for name in ("logits", "edit_in_place"):
        equal(CASES[name](Parts(model)), CASES[name](Parts(remote(family, 2).model)), 0.0)


class Computing:
    """Passes that take so long each, on a clock of their own."""

    def __init__(self, pass_s: float) -> None:
        self.passes = 0
        self.pass_s = pass_s

    def run(self) -> None:
        self.passes += 1

    def computed_s(self) -> float:
        return self.passes * self.pass_s


def test_rehearsals_of_a_slow_model_end_early_and_are_not_repeated_by_jobs() -> None:
    for pass_s, passes in [(0.3, 4), (5.0, 1)]:
        slow = Computing(pass_s)
        assert not rehearsed(slow.run, 1.0, slow.computed_s)
        assert slow.passes == passes


def test_a_quick_model_is_rehearsed_until_all_is_specialised() -> None:
    quick = Computing(0.005)
    assert rehearsed(quick.run, 1.0, quick.computed_s)
    assert quick.passes == TIMES
