"""Steps over keys in a pool give what modules give: on a CPU without a capture, on CUDA with it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from mesh.errors import BadValue, ContextTooLong
from mesh.models.load import load_span
from mesh.shard import int4
from mesh.shard.commands import ShardRequest
from mesh.shard.compiled.formats import quantise
from mesh.shard.compiled.parts import NotCompilable
from mesh.shard.compiled.store import quantised_span
from mesh.shard.cuda.captured import MANY_ROWS, CapturedLayers
from mesh.shard.cuda.pool import Pool, PoolCache, PoolShape
from mesh.shard.cuda.rows import FULL_ROWS
from mesh.shard.device import choose_quant
from mesh.shard.lean import LeanLayers, fused_places
from mesh.shard.load_plan import HostedOn, plan_shard
from mesh.shard.loading import load_shard
from mesh.shard.runtime import StepInput
from mesh.shard.stacked import stack, whole_of
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import Endpoint, LayerRange, NodeId, Site
from tests.checkpoints import FAMILIES, WINDOW
from tests.shard.spans import CPU, WHOLE, checkpoint, relative_error, rows
from tests.shard.test_lean import MIXTURES, SINGULAR, WITH_STATES

CAPPED = {"gemma2"}
STANDARD = [each for each in FAMILIES if each not in (*SINGULAR, *WITH_STATES, *MIXTURES)]
DEVICES = [
    pytest.param((CPU, torch.float32), id="cpu"),
    pytest.param((torch.device("cuda"), torch.bfloat16), id="cuda", marks=pytest.mark.gpu),
    pytest.param((torch.device("cuda"), torch.float16), id="cuda-fp16", marks=pytest.mark.gpu),
]
Where = tuple[torch.device, torch.dtype]


class Span:
    """Captured layers of a family, with the steps that a runtime would make of them."""

    def __init__(self, family: str, where: Where, positions: int = 512) -> None:
        self.device, self.dtype = where
        loaded = load_span(checkpoint(family), WHOLE, dtype=self.dtype, device=self.device)
        module = loaded.module.eval().requires_grad_(requires_grad=False)
        for group in fused_places(module):
            assert stack([parent.get_submodule(name) for parent, name in group])
        self.layers = LeanLayers(module)
        self.captured = CapturedLayers(
            self.layers,
            self.device,
            self.dtype,
            hidden_size=loaded.config.hidden_size,
            positions=positions,
        )

    def open(self, max_tokens: int = 256) -> PoolCache:
        return self.captured.pool.open(max_tokens)

    @torch.inference_mode()
    def step(self, cache: PoolCache, hidden: torch.Tensor) -> torch.Tensor:
        """The rows behind its end, (1, rows, hidden)."""
        (found,) = self.steps([(cache, hidden)])
        return found

    @torch.inference_mode()
    def steps(self, all_of_them: Sequence[tuple[PoolCache, torch.Tensor]]) -> list[torch.Tensor]:
        inputs = []
        for cache, hidden in all_of_them:
            cache.reserve(hidden.shape[1])
            inputs.append(StepInput(cache, cache.length, hidden.to(self.device, self.dtype)))
        if all(map(self.captured.takes, inputs)):
            found = self.captured.forward(inputs, WHOLE)
        else:
            (only,) = inputs
            positions = torch.arange(only.position, only.position + only.hidden.shape[1])
            found = [
                self.layers.forward(
                    only.hidden, positions[None].to(self.device), [all_of_them[0][0]], WHOLE
                )
            ]
        for each in inputs:
            each.cache.commit(each.hidden.shape[1])
        return found


def outputs(span: Span) -> torch.Tensor:
    """Chunks that cross the window, a rollback, and a batch of sessions of different length."""
    hidden = rows(WINDOW + 40)
    cache, other = span.open(), span.open()
    span.step(other, hidden[:, :9])
    found = [span.step(cache, hidden[:, start:stop]) for start, stop in ((0, 50), (50, 90))]
    found.append(span.step(cache, hidden[:, 90:98]))
    cache.cut(91)
    found.append(span.step(cache, hidden[:, 91:92]))
    found += span.steps([(cache, hidden[:, 92:93]), (other, hidden[:, 9:12])])
    return torch.cat(found, 1).float().cpu()


def by_modules(family: str) -> torch.Tensor:
    loaded = load_span(checkpoint(family), WHOLE, dtype=torch.float32, device=CPU)
    span = TorchRuntime(loaded, device=CPU, dtype=torch.float32)
    hidden = rows(WINDOW + 40)
    cache, other = span.new_cache(256), span.new_cache(256)

    def step(which: object, start: int, stop: int) -> torch.Tensor:
        return span.forward([StepInput(which, start, hidden[:, start:stop])])[0]  # type: ignore[arg-type]

    step(other, 0, 9)
    found = [step(cache, *ends) for ends in ((0, 50), (50, 90), (90, 98), (91, 92), (92, 93))]
    return torch.cat([*found, step(other, 9, 12)], 1)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("family", STANDARD)
def test_captured_layers_give_what_modules_give(family: str, where: Where) -> None:
    if family in CAPPED and where[0].type == "cuda":
        with pytest.raises(NotCompilable, match="capped"):
            Span(family, where)
        return
    found, expected = outputs(Span(family, where)), by_modules(family)
    assert relative_error(found, expected) < (1e-5 if where[1] == torch.float32 else 0.03)


@pytest.mark.parametrize("where", DEVICES)
def test_a_row_has_the_same_bits_in_any_company(where: Where) -> None:
    span = Span("llama", where)
    hidden = rows(40)
    caches = [span.open() for _ in range(12)]
    for number, cache in enumerate(caches):
        span.step(cache, hidden[:, : 17 + number])
    alone = [span.step(cache, hidden[:, -1:]) for cache in caches]
    for number, cache in enumerate(caches):
        cache.cut(17 + number)
    together = span.steps([(cache, hidden[:, -1:]) for cache in reversed(caches)])
    assert all(map(torch.equal, alone, reversed(together)))
    # A drafted row in a step of several, too.
    cache = caches[0]
    cache.cut(17)
    one_by_one = torch.cat([span.step(cache, hidden[:, 17 + i : 18 + i]) for i in range(9)], 1)
    cache.cut(17)
    assert torch.equal(span.step(cache, hidden[:, 17:26]), one_by_one)


@pytest.mark.parametrize("where", DEVICES)
def test_more_rows_than_a_graph_has_are_computed_in_turns(where: Where) -> None:
    span = Span("llama", where, positions=4096)
    hidden = rows(FULL_ROWS)
    caches = [span.open(64) for _ in range(MANY_ROWS // FULL_ROWS + 2)]
    found = span.steps([(cache, hidden) for cache in caches])
    assert len(found) == len(caches)
    for each in found:
        assert relative_error(each.float(), found[-1].float()) < 0.02


@pytest.mark.parametrize("where", DEVICES)
def test_sessions_keep_what_they_hold_while_others_come_grow_and_go(where: Where) -> None:
    """Regions move, the memory grows, and captures over the old one are made anew."""
    span = Span("llama", where, positions=1024)
    drawn = random.Random(5)
    hidden = rows(600)
    held: dict[PoolCache, int] = {}
    generations = set()
    for _ in range(60):
        if len(held) < 6 and drawn.random() < 0.5:
            held[span.open(600)] = 0
        elif held and drawn.random() < 0.2:
            held.pop(drawn.choice(list(held)))
        for cache, length in held.items():
            count = min(drawn.choice((1, 3, 40, 90)), 600 - length)
            if count:
                span.step(cache, hidden[:, length : length + count])
                held[cache] = length + count
        generations.add(span.captured.pool.generation)
        regions = sorted((each.start, each.start + each.capacity) for each in held)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(regions))
    assert len(generations) > 1
    fresh = span.open(600)
    for cache, length in held.items():
        span.step(fresh, hidden[:, :length])
        cache.cut(length - 1)
        last = span.step(cache, hidden[:, length - 1 : length])
        fresh.cut(length - 1)
        expected = span.step(fresh, hidden[:, length - 1 : length])
        fresh.cut(0)
        assert relative_error(last.float(), expected.float()) < 0.02


def test_a_session_takes_over_the_positions_of_another() -> None:
    span = Span("llama", (CPU, torch.float32))
    hidden = rows(20)
    one, other = span.open(), span.open(12)
    span.step(one, hidden[:, :19])
    other.copy(one, 10)
    assert other.length == 10
    one.cut(10)
    expected = span.step(one, hidden[:, 10:11])
    assert torch.equal(span.step(other, hidden[:, 10:11]), expected)
    with pytest.raises(ContextTooLong, match="at most 12 positions; 14 are needed"):
        span.step(other, hidden[:, 11:14])
    assert other.length == 11


def test_a_pool_grows_to_what_was_planned_and_to_more_only_when_it_must() -> None:
    pool = Pool(PoolShape(2, 1, 8, torch.float32), CPU, planned=6000)
    caches = [pool.open(5000) for _ in range(3)]
    caches[0].reserve(100)
    assert (pool.positions, pool.generation) == (4096, 1)
    caches[1].reserve(4000)
    assert (pool.positions, pool.generation) == (6000, 2)
    del caches[1]
    caches[0].reserve(5000)
    assert pool.positions >= 5000
    caches[-1].reserve(100)
    assert [cache.capacity for cache in caches] == [5000, 256]
    whole = pool.positions * 2 * 2 * 8 * 4
    assert whole - 2 * 128 < sum(cache.allocated_bytes for cache in caches) <= whole


def test_stacked_weights_are_views_of_one_matrix() -> None:
    linears = [torch.nn.Linear(8, size) for size in (4, 2, 2)]
    weights = [each.weight.detach().clone() for each in linears]
    assert stack(linears)
    assert torch.equal(whole_of([each.weight for each in linears]), torch.cat(weights))
    assert torch.equal(
        whole_of([each.bias for each in linears]), torch.cat([each.bias for each in linears])
    )
    with pytest.raises(NotCompilable, match="do not lie behind each other"):
        whole_of([linears[0].weight, linears[2].weight])
    assert not stack([linears[0], torch.nn.Linear(8, 2, bias=False)])


def test_layers_of_a_part_of_a_span_have_a_graph_of_their_own() -> None:
    span = Span("llama", (CPU, torch.float32))
    hidden, cache, other = rows(2), span.open(), span.open()
    for each in (cache, other):
        each.reserve(2)
    half, rest = LayerRange(0, 2), LayerRange(2, len(WHOLE))
    first = span.captured.forward([StepInput(cache, 0, hidden)], half)
    both = span.captured.forward([StepInput(cache, 0, first[0])], rest)
    whole = span.captured.forward([StepInput(other, 0, hidden)], WHOLE)
    assert torch.equal(both[0], whole[0])


@pytest.mark.parametrize("columns", [32, 64, 80, 96, 4096])
def test_which_matrices_torch_s_kernel_takes_in_4_bit(columns: int) -> None:
    matrix = quantise(torch.randn(16, columns), "int4")
    card = torch.device("cuda")
    assert int4.fits(matrix, card) == (columns != 80)
    assert int4.fits(matrix, CPU) == (columns != 80)
    uneven = quantise(torch.randn(12, columns), "int4")
    assert not int4.fits(uneven, card)
    assert int4.fits(uneven, CPU) == (columns != 80), "rows are filled up"
    for device in (card, CPU):
        assert not int4.fits(quantise(torch.randn(16, columns), "int8"), device)


def test_4_bit_is_refused_where_nothing_computes_it() -> None:
    with pytest.raises(BadValue, match="int4 is not for the device mps: weights in 4 bit are for"):
        choose_quant("int4", torch.device("mps"))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "phi3"])
def test_a_shard_in_4_bit_is_the_same_model_on_a_card_and_on_a_cpu(family: str) -> None:
    """The same codes; scales are rounded to bf16, rows are not rounded to 8 bit."""
    hidden = rows(24)
    card = torch.device("cuda")
    shard = load_shard(plan_shard(_request(family), _host(card)))
    assert shard.descriptor.dtype == "int4"
    rounded = load_span(checkpoint(family), WHOLE, dtype=torch.float32, device=CPU, defer=True)
    rounded = quantised_span(rounded, "int4", checkpoint(family).weights_sha256, None).loaded
    found = []
    for runtime in (shard.load(), TorchRuntime(rounded, device=CPU, dtype=torch.float32)):
        cache = runtime.new_cache(64)
        parts = [
            runtime.forward([StepInput(cache, start, hidden[:, start:stop].to(runtime.device))])[0]
            for start, stop in ((0, 20), (20, 24))
        ]
        found.append(torch.cat(parts, 1).float().cpu())
    assert relative_error(found[0], found[1]) < 0.05


@pytest.mark.gpu
def test_layers_in_4_bit_show_the_weights_that_they_compute_with() -> None:
    matrix = quantise(torch.randn(48, 128), "int4")
    card = torch.device("cuda")
    layer = int4.Int4Linear(matrix, torch.randn(48), card)
    assert relative_error(layer.weight.float().cpu(), matrix.dense()) < 0.01
    x = torch.randn(3, 128, device=card, dtype=torch.bfloat16)
    with torch.inference_mode():
        computed = layer(x)
    with_gradient = layer(x.requires_grad_())
    assert relative_error(with_gradient.detach().float(), computed.float()) < 0.01
    with_gradient.sum().backward()
    assert x.grad is not None
    assert relative_error(x.grad[0].float().cpu(), matrix.dense().sum(0)) < 0.02


def _request(family: str) -> ShardRequest:
    manifest = checkpoint(family)
    return ShardRequest(manifest.path, manifest.model_id, WHOLE, "auto", "int4")


def _host(device: torch.device) -> HostedOn:
    return HostedOn(NodeId("here"), "here", Endpoint("wss://127.0.0.1:1"), device, 1)


class _Doubles:
    """A hook of one session."""

    site = Site(1)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_modules_compute_over_the_pool_what_they_do_over_caches_of_their_own(family: str) -> None:
    """A chunk, hooks, a rollback, and a batch of sessions: what goes without captures on a card."""
    loaded = load_span(checkpoint(family), WHOLE, dtype=torch.float32, device=CPU)
    span = TorchRuntime(loaded, device=CPU, dtype=torch.float32)
    pool = Span(family, (CPU, torch.float32)).captured.pool
    hidden, hooks = rows(80), (_Doubles(),)
    found = []
    for opened in (span.new_cache, pool.open):
        one, other = opened(128), opened(128)
        parts = [
            *span.forward([StepInput(one, 0, hidden[:, :70])]),
            *span.forward([StepInput(other, 0, hidden[:, :9], hooks)]),
            *span.forward([StepInput(one, 66, hidden[:, 66:70])]),
            *span.forward(
                [
                    StepInput(one, 70, hidden[:, 70:71]),
                    StepInput(other, 9, hidden[:, 9:10], hooks),
                ]
            ),
        ]
        found.append(torch.cat(parts, 1))
    assert relative_error(found[1], found[0]) < 1e-5
