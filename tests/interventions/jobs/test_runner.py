"""One job from its payload to its end: what comes out, what is refused, what is survived."""

# ruff: noqa: F841 - names of a trace are what comes back from its job

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from collections import namedtuple
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import nnsight
import numpy
import pytest
import pytest_asyncio
import torch
from nnsight.modeling.transformers import TransformersModel
from torch.utils.data import DataLoader

from mesh.clock import SystemClock
from mesh.config import Config
from mesh.deployments.wishes import Deployment
from mesh.discovery.directory import ShardStore
from mesh.errors import BadRequest, Busy, JobFailed, NoRoute
from mesh.interventions.jobs import runner as runner_module
from mesh.node.deploying import House
from mesh.node.holdings import Holdings
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import LayerRange, NodeId
from tests import secure
from tests.deployments.test_waking import WISH
from tests.interventions.cases import PROMPT
from tests.interventions.jail import own_module
from tests.interventions.jail.processes import warmed_parent
from tests.interventions.jobworld import (
    LIMITS,
    ROUTES,
    Bench,
    as_client,
    bench,
    checkpoint,
    loaded,
    request_of,
    served,
    shards,
)
from tests.interventions.worlds import equal, module_of, whole
from tests.node.test_holdings import tls
from tests.pipeline.test_supervisor import Owner
from tests.waiting import until

if TYPE_CHECKING:
    from mesh.hearth.network import Network

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
WHOLE = LayerRange(0, 6)

_NEWER = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)

Trace = Callable[[TransformersModel], Any]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ShardSupervisor]:
    async with shards(["llama"], tmp_path_factory.mktemp("cache")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def warm(host: ShardSupervisor) -> AsyncIterator[Bench]:
    async with bench(host) as running:
        yield running


@pytest.fixture
def here(warm: Bench) -> Iterator[Bench]:
    settings = warm.runner.settings
    warm.lines.clear()
    warm.reports.clear()
    warm.newest = ()
    warm.trusted = True
    yield warm
    warm.runner.settings = settings


async def run(here: Bench, trace: Trace, *, hops: int = 1, **more: Any) -> dict[str, Any]:
    """Run a trace as a job; what it saved."""
    request = await asyncio.to_thread(request_of, trace)
    return loaded(await here.run(request, here.place("llama", hops), **more))


# What comes out


def reading(model: TransformersModel) -> None:
    with model.trace(PROMPT):
        print("read", len(model.model.layers), "layers")
        hidden = model.model.layers[3].output.save()
        logits = model.output.logits.save()


async def test_a_job_reports_what_it_took_and_where_it_ran(here: Bench) -> None:
    saved = await run(here, reading, hops=3)
    (report,) = here.reports
    assert report.hops == ("node", "node", "node")
    assert report.result_bytes > 0
    assert report.peak_memory_bytes > 0
    assert report.cpu_s > 0
    assert here.lines == ["read 6 layers"]
    assert saved.keys() == {"hidden", "logits"}


async def test_an_uncompressed_request_gets_an_uncompressed_result(here: Bench) -> None:
    request = await asyncio.to_thread(request_of, reading, compress=False)
    result = await here.run(request, here.place("llama", 1), compress=False)
    assert loaded(result, compress=False).keys() == {"hidden", "logits"}


async def test_the_attention_a_client_asks_for_is_computed_on_every_hop(here: Bench) -> None:
    def attending(model: TransformersModel) -> None:
        with model.trace(PROMPT, output_attentions=True):
            attentions = model.output.attentions.save()
            logits = model.output.logits.save()

    saved = await run(here, attending, hops=3, env={"attn_implementation": "eager"})
    reference = await asyncio.to_thread(_eager)
    equal(list(saved["attentions"]), list(reference.attentions), 0.0)
    equal(saved["logits"], reference.logits, 0.0)


def _eager() -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = whole("llama")
        module = module_of(model)
        module.set_attn_implementation("eager")
        try:
            return module(**model.tokenizer(PROMPT, return_tensors="pt"), output_attentions=True)
        finally:
            module.set_attn_implementation("sdpa")


@pytest.mark.parametrize(
    "env",
    [{"attn_implementation": "someone/kernel"}, {"peft": "someone/adapter"}, {"other": 1}],
)
async def test_an_environment_that_could_fetch_code_is_refused(
    here: Bench, env: dict[str, Any]
) -> None:
    with pytest.raises(BadRequest):
        await run(here, reading, env=env)


async def test_results_load_where_hearthnet_is_not_installed(here: Bench, tmp_path: Path) -> None:
    def everything(model: TransformersModel) -> None:
        with model.trace(PROMPT) as tracer:
            cache = tracer.cache()
            start = model.model.layers[0].output
            start.requires_grad_(True)
            query = model.model.layers[2].self_attn.q_proj.output.save()
            late = model.model.layers[2].self_attn.k_proj.input.save()
            weight = model.model.layers[1].mlp.up_proj.weight.save()
            out = model.output.save()

    request = await asyncio.to_thread(request_of, everything)
    file = tmp_path / "result"
    file.write_bytes(await here.run(request, here.place("llama", 3), compress=True))
    script = (
        "import io, sys, zstandard\n"
        "for name in ('mesh', 'tests'): sys.modules[name] = None\n"
        "import torch\n"
        f"data = open({str(file)!r}, 'rb').read()\n"
        "data = zstandard.ZstdDecompressor().decompressobj().decompress(data)\n"
        "saved = torch.load(io.BytesIO(data), map_location='cpu', weights_only=False)\n"
        "print(sorted(saved), float(saved['out'].logits.sum()) != 0)\n"
    )
    shown = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    expected = "['cache', 'late', 'out', 'query', 'start', 'weight'] True"
    assert shown.stdout.strip().replace("'start', ", "") == expected.replace("'start', ", ""), shown


async def test_a_saved_value_comes_without_its_history(here: Bench) -> None:
    """`backward()` of it at the client then says so, instead of doing nothing."""

    def saving(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            scale = torch.ones(64, requires_grad=True).save()
            model.model.layers[2].output = model.model.layers[2].output * scale
            loss = model.output.logits.sum().save()

    saved = await run(here, saving)
    assert saved["scale"].requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        saved["loss"].backward()


async def test_gradients_that_stay_in_the_job_are_told(here: Bench) -> None:
    adapter, scale = torch.nn.Linear(64, 64), torch.ones(64, requires_grad=True)

    def lost(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            hidden = model.model.layers[2].output
            model.model.layers[2].output = adapter(hidden) * scale
            model.output.logits.sum().backward()
            own = scale.grad.save()

    def used(model: TransformersModel) -> None:
        with model.session():
            optimizer = torch.optim.SGD([scale], lr=0.1)
            with model.trace(PROMPT):
                model.model.layers[2].output = model.model.layers[2].output * scale
                model.output.logits.sum().backward()
            optimizer.step()
            trained = scale.detach().save()

    await run(here, lost)
    (line,) = here.lines
    assert line.startswith("The gradients that backward() gave adapter stay in this job")
    here.lines.clear()
    saved = await run(here, used)
    assert not torch.equal(saved["trained"], torch.ones(64))
    assert here.lines == []


async def test_what_stands_for_an_object_of_a_shard_cannot_be_saved(here: Bench) -> None:
    def saving(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            args, _ = model.model.layers[2].self_attn.source.attention_interface_1.inputs
            thing = nnsight.save([args[0]])

    what = r"What was saved as .thing. cannot be sent: LlamaAttention is on another machine"
    with pytest.raises(JobFailed, match=what):
        await run(here, saving)


async def test_a_module_on_another_machine_cannot_be_saved(here: Bench) -> None:
    def saving(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            logits = model.output.logits.save()
            part = nnsight.save({"mlp": model.model.layers[2].mlp})

    what = r"What was saved as .part. cannot be sent: LlamaMLP is on another machine"
    with pytest.raises(JobFailed, match=what):
        await run(here, saving)


@pytest.mark.parametrize("trusted", [True, False])
async def test_objects_of_the_client_s_own_classes_come_back(here: Bench, trusted: bool) -> None:
    probe = own_module.Probe()

    def saving(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            found = nnsight.save([own_module.Setting(1, tags=["a"]), own_module.Pair(3)])
            found += [
                own_module.Side.RIGHT,
                own_module.Point(1, 2),
                own_module.Site(2),
                own_module.Place(3),
            ]
            trained = nnsight.save({"probe": probe, "loss": model.lm_head.output.sum()})
            plain = nnsight.save(SimpleNamespace(layer=2))

    here.trusted = trusted
    saved = await run(here, saving)
    pair = own_module.Pair(3)
    own = [own_module.Setting(1, tags=["a"]), pair, own_module.Side.RIGHT, own_module.Point(1, 2)]
    assert saved["found"] == [*own, own_module.Site(2), own_module.Place(3)]
    assert saved["plain"] == SimpleNamespace(layer=2)
    assert type(saved["trained"]["probe"]) is own_module.Probe
    equal(saved["trained"]["probe"].state_dict(), probe.state_dict(), 0.0)


@pytest.mark.parametrize("trusted", [True, False])
async def test_objects_of_classes_that_a_function_defined_come_back(
    here: Bench, trusted: bool
) -> None:
    @dataclasses.dataclass
    class Finding:
        layer: int

    @dataclasses.dataclass(slots=True)
    class Slotted:
        layer: int

    Pair = namedtuple("Pair", "left right")

    def saving(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            found = nnsight.save([Finding(2), Slotted(3), Pair(1, model.output.logits.ndim)])

    here.trusted = trusted
    saved = await run(here, saving)
    assert saved["found"] == [Finding(2), Slotted(3), Pair(1, 3)]
    assert list(map(type, saved["found"])) == [Finding, Slotted, Pair]


@pytest.mark.parametrize("trusted", [True, False])
async def test_the_client_s_tensors_come_in_every_number_format_and_from_every_device(
    here: Bench, trusted: bool
) -> None:
    given = [torch.arange(6.0), *(torch.arange(6.0).to(each)[2:] for each in _NEWER)]

    def using(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            back = nnsight.save([*given, given[0].device.type])

    request = await asyncio.to_thread(request_of, using, compress=False)
    elsewhere = request.replace(b"X\x03\x00\x00\x00cpu", b"X\x03\x00\x00\x00mps")
    assert elsewhere != request
    here.trusted = trusted
    result = await here.run(elsewhere, here.place("llama", 1), compress=False)
    *back, where = loaded(result, compress=False)["back"]
    assert where == "cpu"
    assert [each.dtype for each in back] == [torch.float32, *_NEWER]
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(given, back, strict=True))


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_tensor_without_values_is_refused(here: Bench, trusted: bool) -> None:
    here.trusted = trusted
    adapter = torch.nn.Linear(64, 64)

    def adding(model: TransformersModel) -> None:
        direction = torch.ones(64).to(model.device)
        with model.trace(PROMPT):
            model.model.layers[2].output[:] += direction
            logits = model.output.logits.save()

    def adapting(model: TransformersModel) -> None:
        adapter.to(model.device)
        with model.trace(PROMPT):
            seen = adapter(model.model.layers[2].output).save()

    for job in (adding, adapting):
        with pytest.raises(JobFailed, match=r"the meta device.*leave \.to\(model\.device\) out"):
            await run(here, job)


async def test_what_cannot_be_saved_is_named(here: Bench) -> None:
    def saving(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            logits = model.output.logits.save()
            ways = nnsight.save({"log": lambda x: x.log()})

    with pytest.raises(JobFailed, match=r"saved as .ways. cannot be sent: .*Save tensors"):
        await run(here, saving)


async def test_jobs_do_not_draw_the_same_random_numbers(here: Bench) -> None:
    def drawing(model: TransformersModel) -> None:
        with model.session():
            drawn = nnsight.save(torch.rand(4))

    first, second = await run(here, drawing), await run(here, drawing)
    assert not torch.equal(first["drawn"], second["drawn"])


# What the author reads


async def test_an_error_shows_the_author_s_own_line_and_nothing_of_ours(here: Bench) -> None:
    def failing(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            model.model.layers[3].mlp.output[:] = 0
            raise ZeroDivisionError("mine")

    with pytest.raises(JobFailed) as failed:
        await run(here, failing)
    text = str(failed.value)
    assert text.endswith("ZeroDivisionError: mine")
    assert "raise ZeroDivisionError('mine')" in text
    assert "site-packages" not in text
    assert "mesh/interventions" not in text


async def test_what_wants_other_processes_says_that_there_are_none(here: Bench) -> None:
    rows = DataLoader(torch.arange(4), num_workers=1)

    def loading(model: TransformersModel) -> None:
        with model.session():
            for row in rows:
                print(row)

    here.trusted = False
    with pytest.raises(
        JobFailed, match=r"no other processes.*give data loaders no workers"
    ) as told:
        await run(here, loading)
    assert "for row in rows:" in str(told.value)


async def test_errors_in_a_group_show_the_author_s_lines_alone(here: Bench) -> None:
    def failing(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            hidden = model.model.layers[3].output
            errors = []
            try:
                torch.nn.functional.layer_norm(hidden, (7,))
            except RuntimeError as error:
                errors.append(error)
            raise ExceptionGroup("all of them", errors)

    here.trusted = False
    with pytest.raises(JobFailed, match="layer_norm") as failed:
        await run(here, failing)
    text = str(failed.value)
    assert "ExceptionGroup: all of them (1 sub-exception)" in text
    assert text.count("test_runner.py") == 2
    assert "site-packages" not in text


async def test_an_error_with_much_to_say_has_its_line_and_its_end(here: Bench) -> None:
    def failing(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            raise ZeroDivisionError("ü" * 100_000 + "the end")

    with pytest.raises(JobFailed) as failed:
        await run(here, failing)
    text = str(failed.value)
    assert "raise ZeroDivisionError('ü' * 100000 + 'the end')" in text
    assert "ZeroDivisionError: ü" in text
    assert text.endswith("üthe end")


class Mute(Exception):
    def __str__(self) -> str:
        raise LookupError


async def test_an_error_whose_words_cannot_be_had_says_where_it_was_raised(here: Bench) -> None:
    def failing(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            raise Mute

    with pytest.raises(JobFailed) as failed:
        await run(here, failing)
    text = str(failed.value)
    assert "raise Mute" in text
    assert text.endswith("<exception str() failed>")
    assert "mesh/interventions" not in text


async def test_an_error_of_a_remote_layer_is_told(here: Bench) -> None:
    def misfitting(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            model.model.layers[2].mlp.output = torch.zeros(3, 5)
            model.model.layers[4].output.save()

    with pytest.raises(JobFailed, match="must match the size of tensor") as failed:
        await run(here, misfitting, hops=3)
    text = str(failed.value)
    assert "[layer 2: `hidden_states = residual + hidden_states`, modeling_llama.py" in text
    assert text.endswith(": model.model.layers[4].output.save()")
    assert "mesh." not in text


async def test_an_error_of_embedding_or_head_says_where_the_author_waits(here: Bench) -> None:
    def misfitting(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            model.model.layers[-1].output = torch.zeros(1, 3, 5)
            model.output.logits.save()

    def unknown(model: TransformersModel) -> None:
        with model.trace(torch.tensor([[10**6]])):
            model.model.layers[0].output.save()

    for job, error, line in (
        (misfitting, "RuntimeError: ", "model.output.logits.save()"),
        (unknown, "IndexError: ", "model.model.layers[0].output.save()"),
    ):
        with pytest.raises(JobFailed, match=error) as failed:
            await run(here, job, hops=3)
        text = str(failed.value)
        assert text.splitlines()[-1].startswith("Your code was waiting at line ")
        assert text.endswith(f": {line}")
        assert 'File "torch/nn/' in text
        assert sys.prefix not in text
        assert text.count("was waiting at") == 1
        assert "mesh." not in text


async def test_what_a_machine_cannot_be_given_says_where_the_author_waits(here: Bench) -> None:
    def foreign(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            model.model.layers[2].mlp.output = numpy.zeros(3)
            model.output.logits.save()

    with pytest.raises(
        JobFailed, match=r"A ndarray cannot be sent[^\n]*\nYour code was waiting at"
    ):
        await run(here, foreign)


async def test_an_object_of_another_machine_is_called_by_its_kind(here: Bench) -> None:
    def unpacking(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            _, _weights = model.model.layers[2].self_attn.source.attention_interface_0.output

    with pytest.raises(JobFailed, match="function on another machine"):
        await run(here, unpacking)


@pytest.mark.parametrize("trusted", [True, False])
async def test_what_is_not_there_says_what_is(here: Bench, trusted: bool) -> None:
    here.trusted = trusted

    def misspelt(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            model.model.layers[2].self_atn.output.save()

    def beyond(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            model.model.layers[6].output.save()

    def on_a_device(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            model.model.layers[2].output.cuda().save()

    for job, told in (
        (misspelt, "Did you mean self_attn? model.model.layers.2 has self_attn, mlp, input_lay"),
        (beyond, "model.model.layers has 0 to 5."),
        (on_a_device, "Leave .cuda() out, or write .to(x.device)"),
    ):
        with pytest.raises(JobFailed) as failed:
            await run(here, job)
        assert told in str(failed.value).splitlines()[-1]


@pytest.mark.parametrize("kind", ["bare", "block", "retained"])
async def test_a_gradient_of_nothing_says_what_to_ask_for(here: Bench, kind: str) -> None:
    def bare(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            model.output.logits.sum().backward()

    def block(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            hidden = model.model.layers[2].output
            with model.output.logits.sum().backward():
                gradient = hidden.grad.save()

    def retained(model: TransformersModel) -> None:
        with model.trace(PROMPT):
            model.model.layers[2].output.retain_grad()

    with pytest.raises(JobFailed) as failed:
        await run(here, {"bare": bare, "block": block, "retained": retained}[kind])
    text = str(failed.value)
    assert "Call requires_grad_(True) on the value" in text
    assert "found no `with`" not in text
    assert text.count("Traceback") == 1


async def test_a_module_that_only_the_client_has_is_named(here: Bench) -> None:
    def attached(_: TransformersModel) -> None:
        own = TransformersModel(str(checkpoint("llama").directory), task="text-generation")
        own.model.layers[2].adapter = torch.nn.Identity()
        with own.trace(PROMPT):
            out = own.output.logits.save()

    with pytest.raises(JobFailed, match=r"layers\.2\.adapter.*does not have.*transformers 5"):
        await run(here, attached)


@pytest.mark.parametrize(
    "request_bytes", [b"", b"\x80", b"not a pickle", pickle.dumps(7), pickle.dumps((1, (2, 3, 4)))]
)
async def test_what_is_no_request_is_an_error(here: Bench, request_bytes: bytes) -> None:
    for trusted in (True, False):
        here.trusted = trusted
        with pytest.raises(JobFailed):
            await here.run(request_bytes, here.place("llama", 1), compress=False)


# Limits


def spinning(model: TransformersModel) -> None:
    with model.session():
        print("begun")
        count = 0
        while True:
            count += 1


def hoarding(model: TransformersModel) -> None:
    with model.session():
        pile = [torch.zeros(1 << 24) for _ in range(100)]


def returning_much(model: TransformersModel) -> None:
    with model.session():
        much = torch.rand(1 << 20).save()


def returning_more_than_fits_twice(model: TransformersModel) -> None:
    with model.session():
        much = torch.ones(200 << 20, dtype=torch.uint8).save()


@pytest.mark.parametrize(
    ("trace", "limits", "said"),
    [
        (spinning, {"wall_s": 0.5}, "0.5 s, its time limit"),
        (spinning, {"cpu_s": 1}, "1 s of computing"),
        (hoarding, {"memory_bytes": 256 << 20}, r"more memory than a job may use.*jobs\.memory_mb"),
        (
            returning_more_than_fits_twice,
            {"memory_bytes": 320 << 20},
            r"(?s)write down what was saved.*jobs\.memory_mb",
        ),
        (returning_much, {"result_bytes": 1 << 20}, r"1048576 are allowed.*jobs\.result_mb"),
    ],
)
async def test_limits_end_a_job_with_a_sentence(
    here: Bench, trace: Trace, limits: dict[str, Any], said: str
) -> None:
    here.set(limits=dataclasses.replace(LIMITS, **limits))
    with pytest.raises(JobFailed, match=said) as failed:
        await run(here, trace)
    took = failed.value.took
    assert took["hops"] == ("node",)
    assert took["cpu_s"] > 0
    assert took["peak_memory_bytes"] > 1 << 20
    assert not list(here.directory.glob("*.part"))


def leaving(model: TransformersModel) -> None:
    with model.session():
        import os

        os._exit(0)


async def test_a_job_that_ends_its_own_process_is_told_so_in_a_sentence(here: Bench) -> None:
    with pytest.raises(JobFailed) as failed:
        await run(here, leaving)
    said = "The job's process ended by itself and left no valid result."
    assert failed.value.message == said


def looking(model: TransformersModel) -> None:
    with model.session():
        import sys

        ready = nnsight.save("torch.utils.serialization.config" in sys.modules)


async def test_a_job_finds_loaded_what_its_result_is_written_with(here: Bench) -> None:
    assert (await run(here, looking))["ready"]


async def test_cancelling_ends_the_process_at_once(here: Bench) -> None:
    request = await asyncio.to_thread(request_of, spinning)
    job = asyncio.create_task(here.run(request, here.place("llama", 1)))
    await here.said("begun")
    (jail,) = here.runner.jails.live
    assert jail.running == 1
    begun = time.monotonic()
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert jail.running == 0
    assert time.monotonic() - begun < LIMITS.wall_s / 2  # for which it would have run
    assert not (here.directory / f"result-{here.jobs}").exists()


async def test_no_more_jobs_than_there_are_places(here: Bench) -> None:
    here.set(max_running=1)
    request = await asyncio.to_thread(request_of, spinning)
    job = asyncio.create_task(here.run(request, here.place("llama", 1)))
    await here.said("begun")
    with pytest.raises(Busy):
        await run(here, reading)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job


async def test_nobody_serves_the_model(here: Bench) -> None:
    place = dataclasses.replace(here.place("llama", 1), shards=[])
    request = await asyncio.to_thread(request_of, reading)
    with pytest.raises(NoRoute):
        await here.run(request, place)


# Hops that fail


def lingering(model: TransformersModel) -> None:
    with model.trace(PROMPT):
        early = model.model.layers[1].output.save()
        print("half way")
        import time

        time.sleep(1)
        late = model.model.layers[4].output.save()
        logits = model.output.logits.save()


async def kill(host: ShardSupervisor) -> None:
    assert host.pid is not None
    os.kill(host.pid, signal.SIGKILL)


async def test_a_job_whose_hop_dies_is_run_again_elsewhere(
    here: Bench, host: ShardSupervisor, tmp_path: Path
) -> None:
    """The first route is over the one that has all layers; the second over the others."""
    request = await asyncio.to_thread(request_of, lingering)
    async with shards(["llama"], tmp_path, [WHOLE]) as doomed:
        place = here.place("llama", 2)
        all_in_one = served(doomed, family="llama", spans=[WHOLE])
        everyone = dataclasses.replace(place, shards=[*all_in_one, *place.shards])
        job = asyncio.create_task(here.run(request, everyone))
        await here.said("half way")
        await kill(doomed)
        saved = loaded(await job)
    assert [line.split(",")[0] for line in here.lines] == ["half way", "(node", "half way"]
    assert here.reports[0].hops == ("node", "node")
    expected = await as_client(here, "llama", 1, _values)
    equal(saved, expected, 0.0)


def _values(model: TransformersModel) -> dict[str, Any]:
    with model.trace(PROMPT):
        early = model.model.layers[1].output.save()
        late = model.model.layers[4].output.save()
        logits = model.output.logits.save()
    return {"early": early, "late": late, "logits": logits}


async def test_a_shard_that_came_while_the_job_ran_takes_over(
    here: Bench, host: ShardSupervisor, tmp_path: Path
) -> None:
    """When it began, only the one that is lost served the model."""
    request = await asyncio.to_thread(request_of, lingering)
    async with shards(["llama"], tmp_path, [WHOLE]) as doomed:
        alone = served(doomed, family="llama", spans=[WHOLE])
        place = here.place("llama", 3)
        here.newest = [*alone, *place.shards]
        job = asyncio.create_task(here.run(request, dataclasses.replace(place, shards=alone)))
        await here.said("half way")
        await kill(doomed)
        saved = loaded(await job)
    assert here.reports[0].hops == ("node", "node", "node")
    equal(saved, await as_client(here, "llama", 1, _values), 0.0)


async def test_a_job_that_loses_its_hops_twice_says_so(here: Bench, tmp_path: Path) -> None:
    """Where nobody takes over it may be begun once more; a hop lost then is the second."""
    request = await asyncio.to_thread(request_of, lingering)
    for number, lost_before in enumerate((False, True)):
        async with shards(["llama"], tmp_path / str(number), [WHOLE]) as doomed:
            shards_of_it = served(doomed, family="llama", spans=[WHOLE])
            place = dataclasses.replace(here.place("llama", 1), shards=shards_of_it)
            here.lines.clear()
            job = asyncio.create_task(here.run(request, place, lost_a_hop=lost_before))
            await here.said("half way")
            await kill(doomed)
            with pytest.raises(JobFailed if lost_before else NoRoute) as failed:
                await job
    assert "because of this mesh" in str(failed.value)
    assert "node, which ran layers 0-5, was lost" in str(failed.value)
    assert isinstance(failed.value, JobFailed)
    assert failed.value.took["hops"] == ("node",)


async def test_a_job_is_use_of_the_model_while_it_runs_and_is_seen_afterwards(
    here: Bench, host: ShardSupervisor
) -> None:
    """Or a deployment that only jobs use would rest."""
    config = await asyncio.to_thread(Config)
    held = Holdings(config, secure.KEY, [], Owner(), tls)
    held.host = host
    store = ShardStore(SystemClock(), expiry_s=9.0)
    house = House(config, NodeId("me"), held, cast("Network", None), store, lambda model: False)
    (offer,) = served(host, family="llama", spans=ROUTES[1])
    shard = offer.shard.descriptor
    wish = dataclasses.replace(WISH, model_id=shard.model_id, weights_sha256=shard.weights_sha256)
    deployment = Deployment(wish, None, "", NodeId("me"), 0)
    await until(lambda: not house.use(deployment).is_busy)  # with the jobs before this one
    before = house.use(deployment)
    request = await asyncio.to_thread(request_of, lingering)
    job = asyncio.create_task(here.run(request, here.place("llama", 1)))
    await until(lambda: house.use(deployment).is_busy)
    await job
    await until(lambda: not house.use(deployment).is_busy)
    assert house.use(deployment).signs != before.signs


async def test_the_death_of_the_warmed_parent_is_survived(here: Bench) -> None:
    request = await asyncio.to_thread(request_of, lingering)
    job = asyncio.create_task(here.run(request, here.place("llama", 1)))
    await here.said("half way")
    warmed_parent().kill()
    assert loaded(await job).keys() == {"early", "late", "logits"}
    assert here.lines.count("half way") == 2


async def test_a_job_that_breaks_its_channel_is_ended(here: Bench) -> None:
    def rude(model: TransformersModel) -> None:
        with model.session():
            import gc
            import socket

            for found in gc.get_objects():
                if isinstance(found, socket.socket) and found.fileno() >= 0:
                    found.sendall(b"\xff" * 64)
            while True:
                pass

    async with asyncio.timeout(LIMITS.wall_s / 2):  # at once, not at its limit
        with pytest.raises(JobFailed, match="sent what is no message"):
            await run(here, rude)


async def test_a_warm_parent_keeps_what_is_in_which_file_of_transformers(here: Bench) -> None:
    kept = here.runner.settings.cache_dir / "transformers"
    await run(here, reading)
    assert [path.suffix for path in await asyncio.to_thread(lambda: [*kept.iterdir()])] == [".json"]


async def test_the_entry_points_exist() -> None:
    from mesh.interventions.jail.child import resolve
    from mesh.interventions.jobs import jails

    for entry in (runner_module.ENTRY, jails.WARM_UP):
        assert callable(await asyncio.to_thread(resolve, entry))
