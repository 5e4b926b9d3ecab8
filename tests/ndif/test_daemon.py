"""A real daemon, its real jails, and the unmodified client: whole traces, also across `kill -9`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

import nnsight
import pytest
import torch
from nnsight.intervention.backends.remote import RemoteError
from nnsight.modeling import huggingface
from nnsight.modeling.transformers import TransformersModel
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, TensorDataset
from transformers import GenerationConfig

from mesh.cli.local_node import LocalNode
from mesh.models.builtin import checkpoint_dir
from tests.ndif import client
from tests.warm.daemons import WarmNode, command

pytestmark = pytest.mark.slow

FLAGS = ("--threads", "1", "--dtype", "fp32")
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
PROMPT = "The attic is"


@pytest.fixture(scope="module")
def starting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNode]:
    """It answers, and may not have loaded anything."""
    root = tmp_path_factory.mktemp("daemon")
    with WarmNode("solo", root / "solo", FLAGS, ENVIRONMENT) as node:
        node.wait_up()
        yield node


@pytest.fixture(scope="module")
def daemon(starting: LocalNode) -> LocalNode:
    starting.wait_ready()
    return starting


@pytest.fixture
def model(daemon: LocalNode, monkeypatch: pytest.MonkeyPatch) -> TransformersModel:
    """The model as a user has it, pointed at the daemon."""
    client.configure(monkeypatch, HOST=daemon.url, APIKEY=daemon.record.api_key)
    monkeypatch.setitem(huggingface._ID_CACHE, str(checkpoint_dir()), "builtin")
    return client.model()


@pytest.fixture(params=[True, False])
def is_trusted(
    request: pytest.FixtureRequest, model: TransformersModel, daemon: LocalNode,
    monkeypatch: pytest.MonkeyPatch,
) -> bool:  # fmt: skip
    """Whether the model is asked with a key that is trusted: once so, once with none."""
    client.configure(monkeypatch, APIKEY=daemon.record.api_key if request.param else "")
    return bool(request.param)


@pytest.fixture(scope="module")
def local() -> TransformersModel:
    return TransformersModel(
        str(checkpoint_dir()), task="text-generation", dispatch=True, dtype=torch.float32
    )


# First, as it wants a daemon that has loaded nothing; the others share the one it leaves.
def test_queued_jobs_survive_kill_9(starting: LocalNode, local: TransformersModel) -> None:
    node = starting
    jobs = [submit(node, number) for number in range(6)]
    node.kill()
    node.start()
    node.wait_ready()
    for number, job in enumerate(jobs):
        via = client.Recording(
            client.KEY, host=node.url, api_key=node.record.api_key, blocking=False, job_id=job
        )
        found = client.wait_for(via, 90)
        with local.trace(f"{PROMPT} {number}"):
            here = local.output.logits.save()
        assert torch.equal(found["logits"], here)


def submit(node: LocalNode, number: int) -> str:
    via = client.Recording(client.KEY, host=node.url, api_key=node.record.api_key, blocking=False)
    model = client.model()
    with model.trace(f"{PROMPT} {number}", backend=via):
        logits = model.output.logits.save()  # noqa: F841
    assert via.job_id is not None
    return via.job_id


def test_a_trace_equals_a_local_one(model: TransformersModel, local: TransformersModel) -> None:
    with model.trace(PROMPT, remote=True):
        hidden = model.model.layers[2].output.save()
        logits = model.output.logits.save()
    with local.trace(PROMPT):
        here = local.model.layers[2].output.save()
        logits_here = local.output.logits.save()
    assert torch.equal(hidden, here)
    assert torch.equal(logits, logits_here)


def test_a_session_is_one_job(model: TransformersModel, daemon: LocalNode) -> None:
    with model.session(remote=True):
        with model.trace(PROMPT):
            first = model.model.layers[1].output
        with model.trace(PROMPT, remote=True):  # where it is already
            difference = (model.model.layers[1].output - first).abs().sum().save()
    assert difference.item() == 0
    assert len(ended(daemon)) >= 1


def test_prints_and_errors_come_back(model: TransformersModel, daemon: LocalNode) -> None:
    # Without a key: on loopback that is a caller whose code the inner fence checks as well.
    via = client.Recording(client.KEY, host=daemon.url)
    via.api_key = ""
    with model.trace(PROMPT, backend=via):
        print("shape", model.model.layers[0].output.shape)
        out = model.output.logits.save()  # noqa: F841 - comes back as the job's result
    said = [each.description for each in via.seen if each.status.value == "LOG"]
    lines = "\n".join(said).split("\n")
    assert any(line.startswith("shape torch.Size") for line in lines)
    assert via.meta is not None
    assert via.meta["hops"] == ["solo"]
    with pytest.raises(RemoteError, match="ZeroDivisionError") as caught:  # noqa: SIM117
        with model.trace(PROMPT, remote=True):
            wrong = 1 / 0  # noqa: F841
    assert "wrong = 1 / 0" in str(caught.value)


class Store:
    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


def test_what_is_saved_into_a_list_of_the_client_s_is_there(
    model: TransformersModel, local: TransformersModel, daemon: LocalNode
) -> None:
    """As it is on one machine; nnsight's protocol brings back names, and no changes."""

    def collected(model: TransformersModel, **more: Any) -> Any:
        hidden, logits = [], {"of": {}}
        for prompt in (PROMPT, "Anna"):
            with model.trace(prompt, **more):
                for layer in model.model.layers:
                    hidden.append(layer.output.save())  # noqa: PERF401 - as people write it
                logits["of"][prompt] = model.output.logits.save()
        return hidden, logits

    hidden, logits = collected(model, remote=True)
    hidden_here, logits_here = collected(local)
    assert len(hidden) == 2 * len(local.model.layers)
    assert all(map(torch.equal, hidden, hidden_here))
    assert logits["of"].keys() == logits_here["of"].keys()
    assert torch.equal(logits["of"]["Anna"], logits_here["of"]["Anna"])
    store, other, scratch = Store(), Store(), []
    via = client.Recording(client.KEY, host=daemon.url, api_key=daemon.record.api_key)
    with model.trace(PROMPT, backend=via):
        scratch.append(model.model.layers[0].output)
        store.kept.append(model.model.layers[1].output.save())
        other.last = model.model.layers[2].output.save()
    assert scratch == store.kept == other.kept == []
    assert not hasattr(other, "last")
    lines = [each.description for each in via.seen if each.status.value == "LOG"]
    first, second = "\n".join(lines).split("\n")
    assert first.startswith("What was saved into other, store stays in this job")
    assert second.startswith("What this job put into scratch stays in it: save each value")


@dataclass
class Sizes:
    rank: int = 4
    scale: float = 0.5


class LowRank(torch.nn.Module):
    """As people write them: beside the trace, with a bare `super()`."""

    def __init__(self, width: int, sizes: Sizes) -> None:
        super().__init__()
        self.scale = sizes.scale
        self.down = torch.nn.Parameter(torch.full((width, sizes.rank), 0.01))
        self.up = torch.nn.Parameter(torch.zeros(sizes.rank, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.scale * (hidden @ self.down) @ self.up


def trained(model: TransformersModel, **more: Any) -> tuple[list[float], torch.Tensor]:
    """A low-rank edit of one layer, made and trained where the model is."""
    with model.session(**more):
        edit = LowRank(model.config.hidden_size, Sizes(scale=2.0))
        optimizer = torch.optim.AdamW(edit.parameters(), lr=0.01)
        losses = nnsight.save([])
        for _ in range(3):
            with model.trace(PROMPT):
                model.model.layers[2].output = edit(model.model.layers[2].output)
                loss = -model.output.logits[0, -1].log_softmax(-1)[7]
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        up = edit.up.detach().save()
    return losses, up


@pytest.mark.usefixtures("is_trusted")
def test_a_class_beside_the_trace_is_made_and_trained_in_a_session(
    model: TransformersModel, local: TransformersModel
) -> None:
    losses, up = trained(model, remote=True)
    losses_here, up_here = trained(local)
    assert losses == pytest.approx(losses_here, abs=1e-4)
    assert losses[2] < losses[0]
    assert torch.allclose(up, up_here, atol=1e-4)


class Dictionary(torch.nn.Module):
    """A sparse autoencoder with weights of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(7)
        self.weights = torch.nn.Parameter(torch.randn(width, 2 * width, generator=draw) / width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden @ self.weights).relu() @ self.weights.T


@pytest.mark.usefixtures("is_trusted")
def test_a_module_is_attached_to_a_layer_inside_the_trace(
    model: TransformersModel, local: TransformersModel
) -> None:
    dictionary = Dictionary(local.config.hidden_size)

    def spliced(model: TransformersModel, **more: Any) -> Any:
        with model.trace(PROMPT, **more):
            layer = model.model.layers[2]
            layer.dictionary = dictionary
            layer.output = layer.dictionary(layer.output, hook=True)
            logits = model.output.logits.save()
        return logits.detach()

    assert torch.equal(spliced(model, remote=True), spliced(local))


class Jump(torch.autograd.Function):
    """Passes on what is above a threshold, as autoencoders are trained with."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, threshold: float) -> torch.Tensor:
        ctx.save_for_backward(value)
        ctx.threshold = threshold
        return value * (value > threshold)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (value,) = ctx.saved_tensors
        return 3 * grads[0] * (value > ctx.threshold), None


@pytest.mark.usefixtures("is_trusted")
def test_an_operation_says_what_its_gradient_is(
    model: TransformersModel, local: TransformersModel
) -> None:
    def gradient(model: TransformersModel, **more: Any) -> Any:
        with model.trace(PROMPT, **more):
            embedded = model.model.embed_tokens.output.requires_grad_(True)
            layer = model.model.layers[2]
            layer.output = Jump.apply(layer.output, 0.1)
            logit = model.output.logits[0, -1, 7]
            grads = nnsight.save(torch.autograd.grad(logit, embedded))
        return grads[0]

    torch.testing.assert_close(gradient(model, remote=True), gradient(local), rtol=0, atol=1e-4)


class Standardized(TransformersModel):
    """Names that are the same in every family, as helper libraries give them."""

    @property
    def middle(self) -> Any:
        return self.model.layers[len(self.model.layers) // 2].output


@pytest.mark.usefixtures("is_trusted")
def test_a_class_of_models_of_one_s_own_is_served(local: TransformersModel) -> None:
    own = Standardized(str(checkpoint_dir()), task="text-generation")
    with own.trace(PROMPT, remote=True):
        middle = own.middle.save()
    with local.trace(PROMPT):
        here = local.model.layers[4].output.save()
    assert torch.equal(middle, here)


@torch.no_grad()
def last_of(model: TransformersModel, layer: int = 1) -> torch.Tensor:
    return model.model.layers[layer].output[:, -1]


@pytest.mark.usefixtures("is_trusted")
def test_a_function_without_what_its_decorator_hides_says_so(model: TransformersModel) -> None:
    what = r"`last_of` came without its defaults: .*@torch.no_grad\(\).*take the decorator off"
    with pytest.raises(RemoteError, match=what) as caught:  # noqa: SIM117
        with model.trace(PROMPT, remote=True):
            last = last_of(model).save()  # noqa: F841
    assert "last = last_of(model).save()" in str(caught.value)


@contextmanager
def doubled_logits(model: TransformersModel) -> Iterator[torch.Tensor]:
    yield 2 * model.output.logits


def negated(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(function)
    def inner(values: torch.Tensor) -> torch.Tensor:
        return -function(values)

    return inner


@negated
def summed(values: torch.Tensor) -> torch.Tensor:
    return values.sum()


def test_what_a_decorator_did_is_missed_aloud(daemon: LocalNode, model: TransformersModel) -> None:

    def doubled() -> None:
        with model.trace(PROMPT, remote=True):  # noqa: SIM117 - all behind it runs there
            with doubled_logits(model) as logits:
                logits.save()

    what = r"`doubled_logits` came without @contextmanager: .*Define it inside the trace"
    with pytest.raises(RemoteError, match=what):
        doubled()
    via = client.Recording(client.KEY, host=daemon.url, api_key=daemon.record.api_key)
    with model.trace(PROMPT, backend=via):
        total = summed(model.output.logits).save()  # noqa: F841
    said = [each.description for each in via.seen if each.status.value == "LOG"]
    assert "`summed` runs here without @negated" in "".join(said)
    via = client.Recording(client.KEY, host=daemon.url, api_key=daemon.record.api_key)
    with model.generate(PROMPT, max_new_tokens=2, backend=via) as tracer:
        ids = tracer.result.save()  # noqa: F841
    assert not [each for each in via.seen if each.status.value == "LOG"]


def test_tokens_and_earlier_results_go_into_a_trace_of_any_key(
    model: TransformersModel, local: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.configure(monkeypatch, APIKEY="")

    def compared(model: TransformersModel, **more: Any) -> list[torch.Tensor]:
        tokens = model.tokenizer([PROMPT, "Anna"], return_tensors="pt", padding=True)
        with model.trace(tokens, **more):
            out = model.output.save()
            top = model.output.logits[0, -1].topk(3).save()
        settings = GenerationConfig(max_new_tokens=2, do_sample=False)
        with model.generate(tokens, generation_config=settings, **more) as tracer:
            ids = tracer.result.save()
        config, rows = model.config, DataLoader(TensorDataset(tokens["input_ids"]), batch_size=1)
        with model.session(**more):
            heads = nnsight.save([])
            for (row,) in rows:
                with model.trace(row):
                    hidden = model.model.layers[1].output
                    heads.append(hidden.unflatten(-1, (config.num_attention_heads, -1)).sum(-1))
        with model.trace(PROMPT, **more):
            width = nnsight.save(tokens["input_ids"].shape[1])
            logits = model.output.logits
            difference = (logits - out.logits[:1]).abs().max().save()
            best = logits[0, -1][top.indices].save()
        return [difference, best, ids, torch.tensor(width), *heads]

    assert all(map(torch.equal, compared(model, remote=True), compared(local)))


def test_what_is_only_named_need_not_be_on_the_node(
    model: TransformersModel, monkeypatch: pytest.MonkeyPatch, *, is_trusted: bool
) -> None:
    only_here: Any = ModuleType("only_here")
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    matrix = type("Matrix", (), {"__module__": "only_here"})
    only_here.Matrix = matrix

    def doubled(value: Any, where: Any = None) -> Any:
        return value * 2 if where is None else only_here.Matrix(value)

    doubled.__annotations__ = {"value": matrix | None, "where": PurePath, "return": list[matrix]}
    with model.trace(PROMPT, remote=True):
        logits = model.output.logits.save()
        twice = doubled(logits).save()
    assert torch.equal(twice, 2 * logits)
    what = "No module named 'only_here'" if is_trusted else "only_here.Matrix`, which the trace"
    with pytest.raises(RemoteError, match=what) as caught:  # noqa: SIM117
        with model.trace(PROMPT, remote=True):
            made = matrix()
    assert "made = matrix()" in str(caught.value)
    what = r"`only_here`, which the trace uses" if is_trusted else "module `only_here` is not"
    with pytest.raises(RemoteError, match=what) as caught:  # noqa: SIM117
        with model.trace(PROMPT, remote=True):
            made = doubled(2, 3)  # noqa: F841
    assert "made = doubled(2, 3)" in str(caught.value)


@pytest.mark.usefixtures("is_trusted")
def test_another_model_with_the_same_parts_is_not_taken_for_the_first(
    model: TransformersModel, tmp_path: Path
) -> None:
    tuned = TransformersModel(
        str(shutil.copytree(checkpoint_dir(), tmp_path / "tuned")), task="text-generation"
    )

    def compared() -> None:
        with model.session(remote=True):
            with model.trace(PROMPT):
                before = model.output.logits
            with tuned.trace(PROMPT):
                difference = (tuned.output.logits - before).save()  # noqa: F841

    with pytest.raises(RemoteError, match=r"several models, .* and .*tuned; a job has one"):
        compared()


def test_a_job_that_never_ends_is_killed_from_the_command_line(
    model: TransformersModel, daemon: LocalNode
) -> None:
    with model.trace(PROMPT, remote=True, blocking=False) as tracer:
        while True:
            pass
    job_id = tracer.backend.job_id
    shown = hearthnet(daemon, "queue", "--json")
    assert job_id in [row["id"] for row in shown["jobs"]]
    assert hearthnet(daemon, "kill", job_id, "--json") == {"id": job_id, "status": "ERROR"}
    with pytest.raises(RemoteError, match="ended by owner"):
        tracer.backend()
    with model.trace(PROMPT, remote=True):
        logits = model.output.logits.save()
    assert logits.ndim == 3


def ended(daemon: LocalNode) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = hearthnet(daemon, "queue", "--json")["ended"]
    return rows


def hearthnet(daemon: LocalNode, *arguments: str) -> Any:
    run = command(*arguments, "--state-dir", str(daemon.state_dir), timeout=60)
    run.check_returncode()
    return json.loads(run.stdout)


def test_a_model_that_is_deployed_anew_with_other_weights_is_traced_with_them(
    daemon: LocalNode, model: TransformersModel, tmp_path: Path
) -> None:
    directory = tmp_path / "mine"
    shutil.copytree(checkpoint_dir(), directory)
    logits = [_deployed_logits(daemon, directory)]
    hearthnet(daemon, "evict", "mine", "--json")
    weights = load_file(directory / "model.safetensors")
    for name, tensor in weights.items():
        if "embed_tokens" in name:
            weights[name] = tensor * 1.5
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    logits.append(_deployed_logits(daemon, directory))
    alone = TransformersModel(
        str(directory), task="text-generation", dispatch=True, dtype=torch.float32
    )
    with alone.trace(PROMPT):
        here = alone.output.logits.save()
    assert torch.equal(logits[1], here)
    assert not torch.equal(*logits)


def _deployed_logits(daemon: LocalNode, directory: Path) -> torch.Tensor:
    hearthnet(daemon, "deploy", f"{directory}=mine", "--wait", "--json")
    logits, _ = client.logits_of(directory, "mine", PROMPT, daemon.url, str(daemon.record.api_key))
    return logits
