"""What cannot be done on the shards: done in the job instead, or refused, never done wrong."""

# ruff: noqa: PT012, RET504 - the block is the trace, which gives names their values at its end

from __future__ import annotations

import copy
import gc
import io
import pickletools
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import nnsight
import numpy
import pytest
import torch
import transformers
from nnsight.modeling.transformers import TransformersModel
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from transformers import AutoModelForCausalLM, AutoTokenizer

from mesh.errors import BadRequest, LimitReached
from mesh.interventions.hooks import RemoteLayerError
from mesh.shard.taps.joints import ShardJoints
from mesh.shard.taps.meter import MemoryMeter
from mesh.shard.taps.session import TapLimits
from mesh.shard.taps.shared_tensors import ShardTensors
from mesh.shard.taps.weight_copies import WeightCopies
from mesh.types import LayerRange
from tests.interventions.cases import CASES, GRADIENTS, PROMPT, Parts
from tests.interventions.worlds import (
    CPU,
    DirectChannel,
    checkpoint,
    equal,
    module_of,
    remote,
    tree,
    whole,
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def own_whole(family: str) -> Parts:
    """A whole model that the test may change."""
    directory = checkpoint(family).directory
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    module.requires_grad_(False)
    return Parts(TransformersModel(module, task="text-generation", tokenizer=tokenizer))


def both(family: str = "llama") -> tuple[Parts, Parts, list[str]]:
    world = remote(family, 3)
    return own_whole(family), Parts(world.model), world.log


def as_on_one_machine(
    job: Callable[[Parts], Any], family: str = "llama", *, tolerance: float = 1e-5
) -> list[str]:
    """A job over three machines gives what it gives on one; what it was told of that."""
    local, spread, log = both(family)
    equal(job(spread), job(local), tolerance)
    return log


# Done in the job


def test_gradients_of_weights_run_that_layer_in_the_job() -> None:
    def job(p: Parts) -> Any:
        weight = p.out(2).weight
        weight.requires_grad_(True)
        with p.model.trace(PROMPT):
            start = p.layers[0].output
            start.requires_grad_(True)
            loss = p.model.output.logits.pow(2).sum()
            loss.backward()
            grads = nnsight.save([start.grad])
            out = p.model.output.logits.save()
        return grads, weight.grad, out

    log = as_on_one_machine(job, tolerance=1e-4)
    assert len(log) == 1
    assert "layer 2" in log[0]
    assert "MiB" in log[0]


def test_weights_edited_in_place_take_effect() -> None:
    def job(p: Parts) -> Any:
        with p.model.session():
            p.layers[3].mlp.down_proj.weight.mul_(0.5)
            with p.model.generate(PROMPT, max_new_tokens=3, do_sample=False) as tracer:
                seen = nnsight.save([])
                for _ in tracer.iter[:3]:
                    seen.append(p.layers[4].output)
                ids = tracer.result.save()
        return seen, ids

    # Fetched weights lie aligned in memory, mapped ones do not: the last bits may differ.
    assert len(as_on_one_machine(job)) == 1


@pytest.mark.parametrize("kind", ["data", "assigned", "attribute", "hook"])
def test_whatever_else_is_done_to_a_layer_takes_effect(kind: str) -> None:
    def job(p: Parts) -> Any:
        mlp = p.layers[2].mlp
        match kind:
            case "data":
                mlp.down_proj.weight.data[:] *= 0.5
            case "assigned":
                weight = torch.nn.Parameter(torch.ones(64, 128) / 50, requires_grad=False)
                module_of(mlp.down_proj).weight = weight
            case "attribute":
                module_of(p.layers[2].input_layernorm).variance_epsilon = 0.5
            case "hook":
                module_of(mlp).register_forward_hook(lambda _module, _args, output: output * 2)
        with p.model.trace(PROMPT):
            seen = p.layers[3].output.save()
            out = p.model.output.logits.save()
        return seen, out

    assert len(as_on_one_machine(job)) == 1


def test_weights_listed_are_those_of_the_layer() -> None:
    def job(p: Parts) -> Any:
        with p.model.trace(PROMPT):
            before = p.layers[1].output.save()
            mlp = module_of(p.layers[2].mlp)
            sizes = nnsight.save([float(weight.norm()) for weight in mlp.parameters()])
            state = nnsight.save(mlp.state_dict())
        return before, sizes, dict(state)

    assert as_on_one_machine(job, tolerance=0.0) == []


def test_weights_that_are_listed_are_not_fetched_before_they_are_read() -> None:
    def job(p: Parts) -> Any:
        with p.model.session():
            model = module_of(p.model)
            model.requires_grad_(requires_grad=False)
            optimizer = torch.optim.AdamW(model.parameters())
            optimizer.zero_grad()
            seen = nnsight.save([len(p.model.state_dict())])
            seen += [(w.shape, w.dtype, w.device, w.numel()) for w in model.parameters()]
            seen += [torch.nn.Parameter(w.data).nbytes for w in model.state_dict().values()]
            with torch.inference_mode():
                seen.append(p.out(1).weight.norm() + copy.deepcopy(p.out(2).weight).norm())
            with p.model.trace(PROMPT):
                out = p.model.output.logits.save()
        return seen, out

    world = remote("llama", 3)
    plain = remote("llama", 3)
    equal(job(Parts(world.model)), job(own_whole("llama")), 0.0)
    CASES["logits"](Parts(plain.model))
    assert world.channel.messages == plain.channel.messages + 2
    assert world.log == []


@pytest.mark.parametrize("kind", ["read", "edited", "assigned", "beside a weight that is edited"])
@pytest.mark.parametrize(
    ("family", "place", "name"),
    [("glm4_moe_lite", "mlp.gate", "e_score_correction_bias"), ("gemma4", "", "layer_scalar")],
)
def test_buffers_of_a_checkpoint_are_the_layer_s(
    family: str, place: str, name: str, kind: str
) -> None:
    def job(p: Parts) -> Any:
        layer = module_of(p.layers[2])
        owner = layer.get_submodule(place)
        buffer = getattr(owner, name)
        seen = [getattr(copy.deepcopy(owner), name), dict(owner.named_buffers())]
        match kind:
            case "edited":
                buffer[0] = 3.0
            case "assigned":
                setattr(owner, name, torch.ones_like(buffer) * 2)
            case "beside a weight that is edited":
                p.out(2).weight.data[:] *= 0.5
        with p.model.trace(PROMPT):
            after = p.layers[2].output.save()
            out = p.model.output.logits.save()
        return buffer.clone(), seen, after, out

    assert len(as_on_one_machine(job, family)) == (kind != "read")


@pytest.mark.parametrize(
    "way",
    [
        lambda w: w.mul_(0.5),
        lambda w: w.data.mul_(0.5),
        lambda w: w.detach()[:].mul_(0.5),
        lambda w: torch.nn.Parameter(w).detach().mul_(0.5),
        lambda w: numpy.multiply(w.numpy(), 0.5, out=w.numpy()),
    ],
)
def test_however_a_weight_is_edited_it_takes_effect(way: Callable[[torch.Tensor], Any]) -> None:
    def job(p: Parts) -> Any:
        with p.model.session():
            way(p.out(2).weight)
            with p.model.trace(PROMPT):
                out = p.model.output.logits.save()
        return out

    assert len(as_on_one_machine(job)) == 1


@pytest.mark.parametrize(
    "way",
    [
        torch.vmap(lambda row: row * 2),
        torch.tensor,
        lambda w: setattr(torch.zeros_like(w), "data", w) or w,
        lambda w: torch.utils.checkpoint.checkpoint(torch.square, w, use_reentrant=True),
    ],
)
def test_a_weight_is_read_right_or_not_at_all(way: Callable[[torch.Tensor], Any]) -> None:
    local, spread, _ = both()
    expected = way(module_of(local.out(2)).weight)
    with suppress(RuntimeError):
        found = way(module_of(spread.out(2)).weight)
        if not found.is_meta:
            equal(found, expected, 0.0)


@pytest.mark.parametrize(
    "way",
    [
        torch.func.grad(lambda w: w.pow(2).sum()),
        lambda w: torch.func.vjp(torch.square, w)[1](torch.ones(64, 64))[0],
        lambda w: torch.func.jvp(torch.square, (w,), (torch.ones(64, 64),))[1],
        lambda w: torch.vmap(lambda row: row @ w)(torch.eye(64)[:2]),
    ],
)
def test_torch_func_reads_a_weight(way: Callable[[torch.Tensor], Any]) -> None:
    local, spread, _ = both()
    equal(way(module_of(spread.out(2)).weight), way(module_of(local.out(2)).weight), 0.0)


def test_a_copy_of_a_remote_module_is_a_module_of_the_job() -> None:
    def job(p: Parts) -> Any:
        with p.model.session():
            original = module_of(p.layers[2].mlp)
            copied = copy.deepcopy(original)
            for weight in copied.parameters():
                weight.mul_(2)
            with p.model.trace(PROMPT):
                hidden = p.layers[2].output
                seen = nnsight.save([copied(hidden), original(hidden)])
                out = p.model.output.logits.save()
        return seen, out

    assert as_on_one_machine(job) == []


def test_weights_loaded_into_a_layer_take_effect() -> None:
    def job(p: Parts) -> Any:
        with p.model.session():
            mlp = module_of(p.layers[2].mlp)
            mlp.load_state_dict({name: value / 2 for name, value in mlp.state_dict().items()})
            with p.model.trace(PROMPT):
                out = p.model.output.logits.save()
        return out

    assert len(as_on_one_machine(job)) == 1


def test_the_head_that_is_the_embedding_is_so_in_the_job() -> None:
    def job(p: Parts) -> Any:
        weight = p.embed.weight
        weight.requires_grad_(True)
        with p.model.trace(PROMPT):
            loss = p.model.output.logits.pow(2).sum()
            loss.backward()
        return p.model.lm_head.weight.grad, sum(w.numel() for w in module_of(p.model).parameters())

    local, spread, _ = both("gpt2")
    try:
        equal(job(spread), job(local), 1e-4)
    finally:
        spread.embed.weight.requires_grad_(False)


def test_modes_that_do_not_travel_are_refused() -> None:
    _, spread, _ = both()
    for mode in (torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with mode, pytest.raises(BadRequest, match="does not reach"):
            CASES["logits"](spread)


def test_torch_func_and_forward_derivatives_do_not_reach_other_machines() -> None:
    _, spread, _ = both()
    hidden, mlp = torch.ones(1, 3, 64), module_of(spread.layers[3].mlp)
    for transform in (torch.func.grad(lambda h: mlp(h).sum()), torch.func.vmap(mlp)):
        with pytest.raises(BadRequest, match="does not reach"):
            transform(hidden)
    with forward_ad.dual_level(), pytest.raises(BadRequest, match="does not reach"):
        mlp(forward_ad.make_dual(hidden, hidden))


def test_batched_gradients_need_the_layers_in_the_job() -> None:
    def job(p: Parts) -> Any:
        with p.model.trace(PROMPT):
            start = p.layers[1].output
            start.requires_grad_(True)
            out, rows = p.layers[3].output[0, -1], torch.eye(64)[:3]
            found = nnsight.save(torch.autograd.grad(out, start, rows, is_grads_batched=True))
        return found

    local, spread, _ = both()
    with pytest.raises(BadRequest, match="Batched gradients"):
        job(spread)
    for layer in (2, 3):
        spread.first_norm(layer).weight.requires_grad_(True)
    equal(job(spread), job(local), 1e-4)


def test_such_a_mode_is_refused_when_it_begins_between_two_layers_of_a_hop() -> None:
    _, spread, _ = both()
    with pytest.raises(BadRequest, match="does not reach"), spread.model.trace(PROMPT):
        spread.layers[2].output.save()
        with torch.inference_mode():
            spread.layers[3].output.save()
    CASES["logits"](spread)


@pytest.mark.parametrize(
    "order", [range(5), (0, 1, 2, 4, 5), (0, 2, 1, 3, 4, 5), (3, 3, 0)], ids=str
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_left_out_or_in_another_order_are_run_so(family: str, order: Sequence[int]) -> None:
    def job(p: Parts) -> Any:
        model = module_of(p.model)
        loop, name = (model.transformer, "h") if family == "gpt2" else (model.model, "layers")
        own = getattr(loop, name)
        setattr(loop, name, torch.nn.ModuleList(own[i] for i in order))
        model.config.num_hidden_layers = len(order)
        with p.model.trace(PROMPT, use_cache=False):
            meanwhile = p.model.output.logits.save()
        setattr(loop, name, own)
        model.config.num_hidden_layers = len(own)
        with p.model.trace(PROMPT):
            after = p.model.output.logits.save()
        return meanwhile, after

    world = remote(family, 3)
    equal(job(Parts(world.model)), job(own_whole(family)), 0.0)
    assert world.log == []


def test_a_layer_that_was_moved_and_changed_is_the_one_that_runs() -> None:
    def job(p: Parts) -> Any:
        layers = module_of(p.model).model.layers
        layers[1], layers[2] = layers[2], layers[1]
        p.out(2).weight.mul_(0.5)
        with p.model.trace(PROMPT, use_cache=False):
            out = p.model.output.logits.save()
        return out

    assert len(as_on_one_machine(job)) == 1


def test_a_module_that_was_replaced_for_a_while_takes_effect_again() -> None:
    def job(p: Parts) -> Any:
        layer, own = module_of(p.layers[4]), module_of(p.layers[4].mlp)
        layer.mlp = torch.nn.Identity()
        with p.model.trace(PROMPT):
            meanwhile = p.model.output.logits.save()
            by_hand = nnsight.save(own(torch.ones(1, 2, 64)))
        layer.mlp = own
        with p.model.trace(PROMPT):
            after = p.model.output.logits.save()
        return meanwhile, by_hand, after

    assert len(as_on_one_machine(job)) == 1


def test_a_replaced_module_takes_effect() -> None:
    def job(p: Parts) -> Any:
        torch.manual_seed(0)
        p.layers[4].mlp = torch.nn.Linear(64, 64).requires_grad_(requires_grad=False)
        with p.model.trace(PROMPT):
            seen = p.layers[4].mlp.output.save()
            out = p.model.output.logits.save()
        return seen, out

    assert len(as_on_one_machine(job)) == 1


@pytest.mark.parametrize("kind", ["weight", "module", "hook", "called"])
def test_what_a_trace_changes_before_its_first_value_acts_on_all_of_it(kind: str) -> None:
    def job(p: Parts) -> Any:
        torch.manual_seed(0)
        other = torch.nn.Linear(64, 64).requires_grad_(requires_grad=False)
        with p.model.trace(PROMPT):
            seen = nnsight.save([])
            match kind:
                case "weight":
                    p.layers[3].mlp.down_proj.weight.mul_(0.5)
                case "module":
                    p.layers[3].mlp = other
                case "hook":
                    p.layers[3].mlp._module.register_forward_hook(lambda _m, _a, out: out * 2)
                case "called":
                    p.layers[3].mlp.down_proj.weight.mul_(0.5)
                    seen.append(p.layers[3].mlp(torch.ones(1, 2, 64)))
            seen.append(p.layers[2].output)
            out = p.model.output.logits.save()
        return seen, out

    assert len(as_on_one_machine(job)) == 1


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_weight_changed_while_generating_acts_from_there_on(family: str) -> None:
    def job(p: Parts) -> Any:
        with p.model.generate(PROMPT, max_new_tokens=5, do_sample=False) as tracer:
            seen = nnsight.save([])
            for step in tracer.iter[:5]:
                if step == 2:
                    p.layers[1].mlp.down_proj.weight.mul_(-3)
                    p.attn(5).v_proj.weight.mul_(2)
                seen.append(p.model.lm_head.output)
        return seen

    assert len(as_on_one_machine(job, family)) == 2


def changed_after(read: int) -> Callable[[Parts], Any]:
    """Layer 3 is changed once the output of layer `read` is here."""

    def job(p: Parts) -> Any:
        with p.model.trace(PROMPT):
            p.layers[read].output.save()
            p.layers[3].mlp.down_proj.weight.mul_(0.5)
            out = p.model.output.logits.save()
        return out

    return job


def test_a_weight_changed_between_two_machines_acts_in_the_same_forward() -> None:
    job = changed_after(0)
    assert len(as_on_one_machine(job)) == 1


def test_a_weight_changed_while_its_machine_computes_is_refused() -> None:
    _, spread, _ = both()
    with pytest.raises(BadRequest, match="Layer 3 was changed while"):
        changed_after(1)(spread)


def test_second_derivatives_need_the_layers_in_the_job() -> None:
    def job(p: Parts) -> Any:
        with p.model.trace(PROMPT):
            start = p.layers[3].output
            start.requires_grad_(True)
            loss = p.model.output.logits.pow(2).mean()
            (first,) = torch.autograd.grad(loss, start, create_graph=True)
            (second,) = torch.autograd.grad(first.pow(2).sum(), start)
            found = nnsight.save([first, second])
        return found

    local, spread, log = both()
    for parts in (local, spread):
        module_of(parts.model).set_attn_implementation("eager")  # sdpa has no second derivative
    with pytest.raises(BadRequest, match="Second derivatives"):
        job(spread)
    for layer in (4, 5):
        spread.first_norm(layer).weight.requires_grad_(True)
        local.first_norm(layer).weight.requires_grad_(True)
    equal(job(spread), job(local), 1e-4)
    assert len(log) == 2


def test_graphs_nobody_can_go_back_through_are_freed() -> None:
    world = remote("llama", 3)
    spread = Parts(world.model)
    kept = []
    for _ in range(4):
        kept.append(GRADIENTS["inside"](spread))
        gc.collect()
    with spread.model.trace(PROMPT):
        start = spread.layers[0].output
        start.requires_grad_(True)
        spread.layers[5].output.save()
    sizes = [len(session._joints._edges) for session in world.channel.sessions]
    assert max(sizes) <= 6


def test_closing_a_session_frees_its_graphs() -> None:
    world = remote("llama", 3)
    spread = Parts(world.model)
    with spread.model.trace(PROMPT):
        spread.layers[0].output.requires_grad_(True)
        loss = spread.model.output.logits.sum().save()
    kept = [len(session._graphs) for session in world.channel.sessions]
    assert loss.requires_grad
    assert all(kept[1:])  # the first one's layers are before the gradient
    leaves = [
        weakref.ref(edge)
        for session in world.channel.sessions
        for edge in session._joints._edges.values()
        if isinstance(edge, torch.Tensor)
    ]
    assert leaves
    for session in world.channel.sessions:
        assert session.meter.held_bytes
        session.close()
    gc.collect()
    assert not any(leaf() is not None for leaf in leaves)
    assert [session.meter.held_bytes for session in world.channel.sessions] == [0, 0, 0]


# Refused


def test_a_gradient_that_would_miss_a_path_is_refused() -> None:
    """The input of k_proj is that of q_proj, whose output was read before it."""
    _, spread, _ = both()
    with pytest.raises(BadRequest, match="would miss"), spread.model.trace(PROMPT):
        start = spread.layers[0].output
        start.requires_grad_(True)
        query = spread.attn(2).q_proj.output
        shared = spread.attn(2).k_proj.input
        loss = spread.model.output.logits.pow(2).sum()
        with loss.backward():
            nnsight.save([shared.grad, query.grad, start.grad])


@pytest.mark.parametrize(
    "ask",
    [
        lambda loss, late: torch.autograd.backward(loss, None, None, False, None, [late]),
        lambda loss, late: torch.autograd.backward(loss, inputs={"late": late}),
        lambda loss, late: loss.backward(inputs=[late]),
        lambda loss, late: torch.autograd.grad(loss, {"late": late}),
        lambda loss, late: torch.autograd.grad(loss, iter([late])),
        lambda loss, late: torch.autograd.grad(loss, [get_gradient_edge(late)]),
        lambda _loss, late: late.retain_grad(),
    ],
)
def test_no_way_to_ask_for_such_a_gradient_is_open(ask: Callable[[Any, Any], Any]) -> None:
    _, spread, _ = both()
    with pytest.raises(BadRequest, match="would miss"), spread.model.trace(PROMPT):
        spread.layers[0].output.requires_grad_(True)
        spread.attn(2).q_proj.output.save()
        late = spread.attn(2).k_proj.input
        ask(spread.model.output.logits.pow(2).sum(), late)


def test_a_value_detached_in_place_is_refused() -> None:
    _, spread, _ = both()
    with pytest.raises(BadRequest, match="Detaching a tensor in place"):  # noqa: SIM117
        with spread.model.trace(PROMPT):
            spread.layers[0].output.requires_grad_(True)
            older = spread.layers[2].output
            spread.first_norm(3).output.save()
            older.detach_()
            spread.layers[3].output.save()


def test_gradients_around_such_a_value_are_right() -> None:
    def job(p: Parts) -> Any:
        with p.model.trace(PROMPT):
            start = p.layers[0].output
            start.requires_grad_(True)
            query = p.attn(2).q_proj.output
            shared = p.attn(2).k_proj.input.save()
            later = p.layers[3].mlp.output
            loss = p.model.output.logits.pow(2).sum()
            with loss.backward():
                grads = nnsight.save([later.grad, query.grad, start.grad])
        return shared.detach(), grads

    as_on_one_machine(job, tolerance=1e-4)


def test_other_kinds_of_cache_are_refused() -> None:
    _, spread, _ = both()
    with pytest.raises(BadRequest, match="cannot span"):
        spread.model.generate(PROMPT, max_new_tokens=2, cache_implementation="static")


def test_scan_is_refused() -> None:
    _, spread, _ = both()
    with pytest.raises(BadRequest, match="scan"), spread.model.scan(PROMPT):
        spread.layers[0].output.save()


def test_an_object_of_the_model_cannot_be_put_elsewhere() -> None:
    """Its methods would be called for those of a tensor."""
    _, spread, _ = both()
    op = spread.attn(2).source.attention_interface_1
    with pytest.raises(RemoteLayerError, match="does not belong"), spread.model.trace(PROMPT):
        args, kwargs = op.inputs
        op.inputs = ((args[0], args[0], *args[2:]), kwargs)


def test_what_was_in_a_shard_s_memory_before_is_shown_to_nobody() -> None:
    """It may be another's: memory that the model's code has yet to fill, rows of no expert."""
    latent = Parts(remote("deepseek_v3", 1).model)
    with latent.model.trace(PROMPT):
        memory = latent.attn(1).source.self_expand_kv_0.source.kv_nope_new_empty_0
        seen = memory.output.clone().save()
    assert not seen.any()
    mixture = Parts(remote("qwen3_moe", 1).model)
    experts = mixture.layers[1].mlp.experts
    for beyond in (4, -1):
        with (
            pytest.raises(RemoteLayerError, match="there are none of: there are 4"),
            mixture.model.trace(PROMPT),
        ):
            (states, chosen, weights), named = experts.inputs
            chosen = torch.full_like(chosen, beyond)
            experts.inputs = ((states, chosen, weights), named)
            seen = experts.output.save()


def test_what_cannot_be_sent_is_named() -> None:
    _, spread, _ = both()
    with pytest.raises(BadRequest, match="object cannot be sent"), spread.model.trace(PROMPT):
        spread.layers[2].output = object()


def test_more_than_the_shard_will_hold_is_refused_and_the_session_goes_on() -> None:
    world = remote("llama", 2, TapLimits(memory_bytes=200_000))
    spread = Parts(world.model)

    def held_after_a_refusal() -> list[int]:
        with pytest.raises(LimitReached, match="more than the 200000"):
            CASES["cache_everything"](spread)
        equal(CASES["logits"](spread), CASES["logits"](Parts(whole("llama"))), 0.0)
        return [session.meter.held_bytes for session in world.channel.sessions]

    first, later = held_after_a_refusal(), held_after_a_refusal()
    assert all(now <= before for before, now in zip(first, later, strict=True))


# Aliases, and what comes out


def test_an_edit_through_a_view_shows_in_what_it_is_a_view_of() -> None:
    """The router's input is the block's input, seen with another shape."""

    def job(p: Parts) -> Any:
        with p.model.trace(PROMPT):
            block = p.layers[1].mlp.input
            before = nnsight.save(block.sum())
            p.layers[1].mlp.gate.input[:] *= 0.5
            after = nnsight.save(block.sum())
            out = p.model.output.logits.save()
        return before, after, out

    as_on_one_machine(job, "qwen3_moe", tolerance=0.0)


def test_an_edit_of_the_memory_itself_shows() -> None:
    def job(p: Parts) -> Any:
        with p.model.trace(PROMPT):
            p.layers[2].output.untyped_storage()[:64].fill_(60)
            torch.from_dlpack(p.layers[3].output)[:, 1] = 1.5
            out = p.model.output.logits.save()
        return out

    as_on_one_machine(job, tolerance=0.0)


def test_such_an_edit_shows_under_gradients_too() -> None:
    def job(p: Parts) -> Any:
        with p.model.trace(PROMPT):
            start = p.layers[0].output
            start.requires_grad_(True)
            block = p.layers[1].mlp.input
            before = nnsight.save(block.sum())
            p.layers[1].mlp.gate.input[:] *= 0.5
            after = nnsight.save(block.sum())
            last = p.layers[4].mlp.input
            loss = p.model.output.logits.pow(2).sum() + after
            with loss.backward():
                grads = nnsight.save([last.grad, block.grad, start.grad])
            out = p.model.output.logits.save()
        return before.detach(), after.detach(), grads, out.detach()

    as_on_one_machine(job, "qwen3_moe", tolerance=1e-4)


def test_gradients_of_a_value_and_of_views_of_it() -> None:
    def job(p: Parts) -> Any:
        with p.model.trace(PROMPT):
            start = p.layers[0].output
            start.requires_grad_(True)
            block = p.layers[1].mlp.input
            view = p.layers[1].mlp.gate.input
            loss = p.model.output.logits.pow(2).sum() + view.pow(3).sum() + block.pow(2).sum()
            with loss.backward():
                grads = nnsight.save([view.grad, block.grad, start.grad])
        return grads

    as_on_one_machine(job, "qwen3_moe", tolerance=1e-4)


def test_the_gradient_of_a_view_that_was_edited_is_refused() -> None:
    _, spread, _ = both("qwen3_moe")
    with pytest.raises(BadRequest, match="would miss"), spread.model.trace(PROMPT):
        spread.layers[0].output.requires_grad_(True)
        spread.layers[1].mlp.input.save()
        view = spread.layers[1].mlp.gate.input
        view[:] *= 0.5
        loss = spread.model.output.logits.pow(2).sum()
        with loss.backward():
            view.grad.save()


def test_one_memory_is_not_shown_twice_under_gradients_unless_as_a_view() -> None:
    meter = MemoryMeter(1 << 20)
    weights = WeightCopies(tree("llama", LayerRange(0, 4)))
    shared = ShardTensors(CPU, meter, ShardJoints(meter), weights)
    base = torch.ones(4, 6, requires_grad=True) * 2
    for apart in (base[:, :3], base[:, 3:]):
        shared.write(apart, [])
    with pytest.raises(BadRequest, match="unless it is a view"):
        shared.write(base.view(24), [])


def test_results_load_where_hearthnet_is_not_installed() -> None:
    _, spread, _ = both()
    with spread.model.trace(PROMPT) as tracer:
        cache = tracer.cache()
        start = spread.layers[0].output
        start.requires_grad_(True)
        spread.attn(2).q_proj.output.save()
        incomplete = spread.attn(2).k_proj.input.save()
        everything = spread.model.output.save()
    buffer = io.BytesIO()
    torch.save({"out": everything, "late": incomplete, "cache": cache}, buffer)
    with zipfile.ZipFile(buffer) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        texts = [
            str(argument)
            for _, argument, _ in pickletools.genops(archive.read(name))
            if isinstance(argument, str)
        ]
    assert not [text for text in texts if "mesh" in text or "hearthnet" in text.lower()]


# Key/value caches


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_keys_and_values_of_remote_layers_can_be_read(family: str) -> None:
    def job(p: Parts) -> Any:
        with p.model.trace(PROMPT, use_cache=True):
            cache = p.model.output.past_key_values
            seen = nnsight.save([cache.layers[i].keys for i in (0, 2, 5)])
            sums = nnsight.save([float(layer.values.sum()) for layer in cache.layers])
            whole_of_it = nnsight.save([layer[0] for layer in cache])
        return seen, sums, whole_of_it

    as_on_one_machine(job, family, tolerance=0.0)


def test_a_saved_cache_comes_with_its_contents() -> None:
    def job(p: Parts) -> Any:
        with p.model.trace(PROMPT, use_cache=True):
            out = p.model.output.save()
        buffer = io.BytesIO()
        torch.save(out, buffer)
        buffer.seek(0)
        cache = torch.load(buffer, weights_only=False).past_key_values
        assert type(cache) is transformers.DynamicCache
        assert cache.get_seq_length() > 0
        return [[layer.keys, layer.values] for layer in cache.layers]

    as_on_one_machine(job, tolerance=0.0)


@pytest.mark.parametrize("way", [lambda k: k, lambda k: k.data, lambda k: k.numpy()])
def test_a_remote_cache_cannot_be_changed_unseen(way: Callable[[torch.Tensor], Any]) -> None:
    _, spread, _ = both()
    with pytest.raises(BadRequest, match="can be read, not changed"), spread.model.session():
        with spread.model.trace(PROMPT, use_cache=True):
            cache = spread.model.output.past_key_values
        way(cache.layers[3].keys)[:] = 0
        with spread.model.trace(torch.tensor([[5]]), past_key_values=cache):
            spread.layers[5].output.save()
    refused = pytest.raises(BadRequest, match="can be read, not changed")
    with refused, spread.model.trace(PROMPT, use_cache=True):
        spread.model.output.past_key_values.layers[3].keys = torch.zeros(1)


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: [layer.crop(-1) for layer in cache.layers],
        lambda cache: cache.layers[3].reset(),
        lambda cache: cache.layers[0].batch_repeat_interleave(2),
        lambda cache: cache.update(cache.layers[2].keys, cache.layers[2].values, 2),
        lambda cache: cache.layers.reverse(),
        lambda cache: cache.layers.__setitem__(
            3, transformers.DynamicCache().layer_class_to_replicate()
        ),
        lambda cache: cache.layers.pop(),
    ],
)
def test_layers_of_a_remote_cache_are_not_changed_one_by_one(change: Callable[[Any], Any]) -> None:
    _, spread, _ = both()
    refused = pytest.raises(BadRequest, match="can be read, not changed")
    with refused, spread.model.session():
        with spread.model.trace(PROMPT, use_cache=True):
            cache = spread.model.output.past_key_values
        change(cache)
        with spread.model.trace(torch.tensor([[5]]), past_key_values=cache):
            spread.layers[5].output.save()


def test_an_edit_of_what_the_layer_under_way_has_cached_is_refused() -> None:
    _, spread, _ = both()
    refused = pytest.raises(BadRequest, match="can be read, not changed")
    with refused, spread.model.trace(PROMPT, use_cache=True):
        cache = spread.layers[2].inputs[1]["past_key_values"]
        spread.layers[2].output.save()
        cache.layers[2].keys[:] = 0
        spread.layers[3].output.save()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cache_has_what_the_layers_so_far_have_put_into_it(family: str) -> None:
    def job(p: Parts) -> Any:
        with p.model.generate(PROMPT, max_new_tokens=3, do_sample=False) as tracer:
            seen = nnsight.save([])
            for _ in tracer.iter[:3]:
                cache = p.layers[2].inputs[1]["past_key_values"]
                before = cache.layers[2].get_seq_length()
                p.layers[2].mlp.output.save()
                layer = cache.layers[2]
                seen.append((before, layer.get_seq_length(), layer.keys, layer.values))
        return seen

    as_on_one_machine(job, family, tolerance=0.0)


def test_a_cache_that_was_emptied_begins_anew() -> None:
    def job(p: Parts) -> Any:
        with p.model.session():
            with p.model.trace(PROMPT, use_cache=True):
                cache = p.model.output.past_key_values
            cache.reset()
            emptied = nnsight.save([layer.keys for layer in cache.layers])
            with p.model.trace("Anna reads", past_key_values=cache):
                out = p.model.output.logits.save()
            kept = nnsight.save([layer.keys for layer in cache.layers])
        return emptied, out, kept

    as_on_one_machine(job, tolerance=0.0)


def test_a_cache_keeps_what_a_forward_that_failed_has_put_into_it() -> None:
    def job(p: Parts) -> Any:
        cache = transformers.DynamicCache()
        with suppress(RuntimeError), p.model.trace([PROMPT] * 2, past_key_values=cache):
            norm = p.layers[2].input_layernorm
            norm.output = norm.output[[0, 1, 1]]
        return [cache.get_seq_length(layer) for layer in range(6)]

    local, spread, _ = both()
    assert job(spread) == job(local) == [8, 8, 8, 0, 0, 0]


class OnItsOwnThread(DirectChannel):
    """Whose ends have a grad mode each."""

    def call(self, hop: int, message: bytes) -> bytes:
        with torch.enable_grad():
            return super().call(hop, message)


def test_what_is_done_to_a_cache_without_gradients_has_none() -> None:
    def job(p: Parts) -> Any:
        with p.model.session():
            with p.model.trace(PROMPT, use_cache=True):
                first = p.layers[0].output
                first.requires_grad_(True)
                cache = p.model.output.past_key_values
            with torch.no_grad():
                cache.crop(-1)
            with p.model.trace(torch.tensor([[5]]), past_key_values=cache):
                second = p.layers[0].output
                second.requires_grad_(True)
                p.model.output.logits.pow(2).sum().backward()
            grads = nnsight.save([first.grad, second.grad])
        return grads

    spread = Parts(remote("llama", 3, over=OnItsOwnThread).model)
    (none, expected), (through, found) = job(own_whole("llama")), job(spread)
    assert none is None
    assert through is None or not through.any()
    equal(found, expected, 1e-4)


def test_a_cache_filled_elsewhere_is_not_continued_wrongly() -> None:
    _, spread, _ = both()
    with pytest.raises(BadRequest, match="filled elsewhere"), spread.model.session():
        with spread.model.trace(PROMPT, use_cache=True):
            cache = spread.model.output.past_key_values
        with spread.model.trace(torch.tensor([[5]]), past_key_values=copy.deepcopy(cache)):
            spread.layers[5].output.save()


# Bounds of a shard


def test_more_positions_than_a_shard_takes_at_once_are_refused() -> None:
    spread = Parts(remote("llama", 2, TapLimits(positions=40)).model)
    long, short = torch.full((1, 41), 5), torch.full((2, 12), 5)
    with pytest.raises(RemoteLayerError, match="41 positions"), spread.model.trace(long):
        spread.layers[5].output.save()
    with pytest.raises(RemoteLayerError, match="it takes 40"):
        spread.model.generate(short, max_new_tokens=20, do_sample=False)
    with spread.model.trace(short):
        spread.layers[5].output.save()


@pytest.mark.parametrize(
    "name", ["batch_repeat_interleave", "reorder_cache", "batch_select_indices"]
)
def test_a_cache_cannot_be_made_larger_than_a_shard_takes(name: str) -> None:
    world = remote("llama", 2, TapLimits(positions=100))
    spread = Parts(world.model)
    far = 10**9 if name == "batch_repeat_interleave" else torch.zeros(500, dtype=torch.long)
    ids = torch.full((1, 6), 5)
    with spread.model.trace(ids, use_cache=True):
        cache = spread.model.output.past_key_values
        getattr(cache, name)(2 if name == "batch_repeat_interleave" else torch.tensor([0, 0]))
        held = nnsight.save([session._caches.positions() for session in world.channel.sessions])
    assert held == [12, 12]
    refused = pytest.raises(BadRequest, match="it takes 100")
    with refused, spread.model.trace(ids, use_cache=True):
        cache = spread.model.output.past_key_values
        getattr(cache, name)(far)


def test_scores_of_eager_attention_are_bounded() -> None:
    def job(p: Parts, rows: int) -> Any:
        with p.model.trace(torch.full((1, rows), 5)):
            seen = p.layers[5].output.save()
        return seen

    local, spread, _ = both()
    tight = Parts(remote("llama", 2, TapLimits(memory_bytes=2 << 20)).model)
    for parts in (local, spread, tight):
        module_of(parts.model).set_attn_implementation("eager")
    fits, too_long = 100, 200  # 4 heads of 12 bytes for each pair: 0.5 and 1.9 MB
    equal(job(tight, fits), job(local, fits), 0.0)
    with pytest.raises(LimitReached, match=r"2097152 .*host.tap_memory_mb"):
        job(tight, too_long)
    equal(job(spread, too_long), job(local, too_long), 0.0)
    module_of(tight.model).set_attn_implementation("sdpa")
    job(tight, too_long)


def test_a_value_made_longer_half_way_is_measured_again() -> None:
    spread = Parts(remote("llama", 2, TapLimits(positions=40)).model)
    refused = pytest.raises(RemoteLayerError, match="42 positions")
    with refused, spread.model.trace(torch.tensor([[5]])):
        spread.layers[0].output = torch.zeros(1, 41, 64)  # and one is cached
        spread.layers[5].output.save()


def test_graphs_that_keep_too_much_are_refused() -> None:
    def graphs(spread: Parts, count: int) -> None:
        with spread.model.session():
            kept = nnsight.save([])
            for _ in range(count):
                with spread.model.trace(torch.full((1, 30), 5)):
                    start = spread.layers[0].output
                    start.requires_grad_(True)
                    kept.append(spread.model.output.logits.sum())

    world = remote("llama", 1, TapLimits(memory_bytes=3 << 20))
    spread = Parts(world.model)
    graphs(spread, 1)
    (session,) = world.channel.sessions
    least = 30 * 64 * 4 * 5 * 10  # positions, width, bytes, layers, what each saves
    assert least < session.meter.held_bytes
    with pytest.raises(LimitReached, match="graphs"):
        graphs(spread, 1 + (3 << 20) // least)
