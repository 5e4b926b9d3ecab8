"""Traces as a researcher writes them; each gives what it saved, the same source on any model."""

# ruff: noqa: RET504 - nnsight gives a name its value when the block has run

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nnsight
import torch

from tests.interventions.worlds import module_of

PROMPT = "The kettle sings on the hearth while rain"
OTHER = "Anna reads"

Case = Callable[["Parts"], Any]
CASES: dict[str, Case] = {}
GRADIENTS: dict[str, Case] = {}


class Parts:
    """A model and what its parts are called in its family."""

    def __init__(self, model: Any) -> None:
        self.model = model
        old = hasattr(model, "transformer")
        base = model.transformer if old else model.model
        base = getattr(base, "language_model", base)  # of a model for images as well
        self.loop = base
        self.layers = base.h if old else base.layers
        self.norm = _part(base, "ln_f", "norm", "embedding_norm", "final_layernorm")
        self.embed = base.wte if old else base.embed_tokens
        self.attn_name = "attn" if old else "self_attn"
        self.out_name = "c_proj" if old else "o_proj"
        self.first_name = "ln_1" if old else "input_layernorm"
        self._has_scores = module_of(model).config.model_type == "gpt_oss"
        self.attention = "eager" if self._has_scores else "sdpa"
        self.second_name = "ln_2" if old else "post_attention_layernorm"

    def attn(self, layer: int) -> Any:
        return _part(self.layers[layer], self.attn_name, "linear_attn", "conv")

    def mlp(self, layer: int) -> Any:
        return _part(self.layers[layer], "mlp", "feed_forward")

    def of_mlp(self, layer: int) -> Any:
        """What it gives, without the scores that gpt-oss's router gives beside it."""
        return first(self.layers[layer].mlp.output)

    def put_mlp(self, layer: int, value: Any) -> None:
        """Have it give that."""
        mlp = self.layers[layer].mlp
        mlp.output = (value, *mlp.output[1:]) if self._has_scores else value

    def skip_mlp(self, layer: int, value: Any) -> None:
        """Have it give that, without computing anything."""
        self.layers[layer].mlp.skip((value, None) if self._has_scores else value)

    def out(self, layer: int) -> Any:
        return getattr(self.attn(layer), self.out_name)

    def first_norm(self, layer: int) -> Any:
        return getattr(self.layers[layer], self.first_name)

    def second_norm(self, layer: int) -> Any:
        return getattr(self.layers[layer], self.second_name)


def first(value: Any) -> Any:
    """A value, or the first of several."""
    return value[0] if isinstance(value, tuple) else value


def _part(module: Any, *names: str) -> Any:
    return next(getattr(module, name) for name in names if hasattr(module, name))


def case(run: Case) -> Case:
    CASES[run.__name__] = run
    return run


def gradient(run: Case) -> Case:
    GRADIENTS[run.__name__] = run
    return run


def tokens(model: Any, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(4, 300, (1, count), generator=generator)


# Reading


@case
def logits(p: Parts) -> Any:
    m = p.model
    with m.trace(PROMPT):
        out = m.output.logits.save()
    return out


@case
def every_layer(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        seen = nnsight.save([])
        for layer in p.layers:
            seen.append(layer.input)
            seen.append(layer.output)
    return seen


@case
def inside_layers(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        seen = nnsight.save([])
        for i in (0, 3, 5):
            seen.append(p.first_norm(i).input)
            seen.append(p.first_norm(i).output)
            seen.append(p.out(i).input)
            seen.append(p.out(i).output)
            seen.append(p.attn(i).output[0])
            seen.append(p.layers[i].mlp.input)
            seen.append(p.of_mlp(i))
    return seen


@case
def long_prompt(p: Parts) -> Any:
    ids = tokens(p.model, 90)
    with p.model.trace(ids):
        seen = nnsight.save([layer.output for layer in p.layers])
        out = p.model.output.logits.save()
    return seen, out


@case
def batch_with_padding(p: Parts) -> Any:
    with p.model.trace([PROMPT, OTHER]):
        a = p.layers[1].output.save()
        b = p.of_mlp(4).save()
        out = p.model.output.logits.save()
    return a, b, out


@case
def keyword_inputs(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        args, kwargs = p.layers[2].inputs
        hidden = nnsight.save(args[0])
        names = nnsight.save(sorted(k for k, v in kwargs.items() if isinstance(v, torch.Tensor)))
        out = p.model.output.logits.save()
    return hidden, names, out


@case
def one_trace_after_another(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        a = p.layers[2].output.save()
    with p.model.trace(OTHER):
        b = p.layers[2].output.save()
    return a, b


# Writing


@case
def replace_output(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        p.layers[1].output = p.layers[1].output * 0.5
        p.put_mlp(4, torch.zeros_like(p.of_mlp(4)))
        out = p.model.output.logits.save()
    return out


@case
def replace_input(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        p.layers[3].input = p.layers[3].input + 1.0
        p.layers[4].mlp.input = p.layers[4].mlp.input * 2
        out = p.model.output.logits.save()
    return out


@case
def replace_tuple(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        value = p.attn(2).output
        p.attn(2).output = (value[0] * 0.1, *value[1:])
        out = p.model.output.logits.save()
    return out


@case
def edit_in_place(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        p.layers[0].output[:, -1] = 0
        first(p.mlp(2).output)[:] *= 3
        p.attn(3).output[0][:, :2] = 1.5
        seen = p.layers[3].output.save()
        out = p.model.output.logits.save()
    return seen, out


@case
def edit_without_a_new_version(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        older = p.layers[1].output
        p.layers[2].output.data[:, -1] = 0
        p.layers[3].output[0].numpy()[1:3] = 1.5
        kept = p.layers[4].input.save()
        older.data.mul_(0.5)
        early = older.clone().save()
        value = p.of_mlp(4)
        value.data = value * 2
        out = p.model.output.logits.save()
    return kept, early, out


@case
def edit_memory_that_was_given_out_before_it_crosses(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        mine = p.layers[0].output * 0.5
        memory = mine.data
        p.layers[1].output = mine
        p.first_norm(2).output.save()
        memory[:, 1:] = 2.0
        kept = p.layers[2].output.save()
        out = p.model.output.logits.save()
    return kept, out


@case
def edit_an_older_name(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        older = p.layers[2].output
        now = p.layers[3].input
        older[:] = older * 0.25
        kept = now.save()
        out = p.model.output.logits.save()
    return kept, out


@case
def edit_the_residual_in_place(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        residual = p.first_norm(4).input
        normed = p.first_norm(4).output.save()
        residual[:] = 0.5
        after = p.layers[4].output.save()
        out = p.model.output.logits.save()
    return normed, after, out


@case
def early_value_into_late_layer(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        early = p.layers[0].output
        p.layers[5].output = p.layers[5].output * 0.5 + early
        out = p.model.output.logits.save()
    return out


@case
def edit_attention_mask(p: Parts) -> Any:
    with p.model.trace([PROMPT, OTHER]):
        args, kwargs = p.layers[1].inputs
        p.layers[1].inputs = ((args[0] * 2, *args[1:]), kwargs)
        out = p.model.output.logits.save()
    return out


@case
def a_view_edited_in_place(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        part = p.layers[1].output[:, 1:3]
        part[:] = 2.0
        out = p.model.output.logits.save()
    return out


@case
def skip_layer(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        p.layers[2].skip(p.layers[2].input)
        out = p.model.output.logits.save()
    return out


@case
def skip_mlp(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        p.skip_mlp(3, p.layers[3].mlp.input * 0.5)
        seen = p.of_mlp(3).save()
        out = p.model.output.logits.save()
    return seen, out


@case
def skip_batched(p: Parts) -> Any:
    with p.model.trace() as tracer:
        with tracer.invoke(PROMPT):
            p.layers[2].skip(p.layers[2].input)
            a = p.model.output.logits.save()
        with tracer.invoke(OTHER):
            p.layers[2].skip(p.layers[2].input * 2)
            b = p.model.output.logits.save()
    return a, b


# Order, errors


@case
def out_of_order(p: Parts) -> Any:
    try:
        with p.model.trace(PROMPT):
            later = p.layers[5].output.save()
            p.layers[0].output.save()
    except Exception as error:  # noqa: BLE001 - nnsight's kinds are the client's business
        return type(error).__name__, str(error)
    return later


@case
def out_of_order_within_a_layer(p: Parts) -> Any:
    try:
        with p.model.trace(PROMPT):
            later = p.of_mlp(3).save()
            p.attn(3).output[0].save()
    except Exception as error:  # noqa: BLE001 - nnsight's kinds are the client's business
        return type(error).__name__, str(error)
    return later


@case
def stop_early(p: Parts) -> Any:
    with p.model.trace(PROMPT) as tracer:
        a = p.of_mlp(1).save()
        tracer.stop()
    with p.model.trace(PROMPT):
        out = p.model.output.logits.save()
    return a, out


@case
def error_of_the_user(p: Parts) -> Any:
    try:
        with p.model.trace(PROMPT):
            p.of_mlp(3)[:] = 0
            raise ZeroDivisionError("mine")  # noqa: TRY301 - the user's own
    except ZeroDivisionError as error:
        said = str(error)
    with p.model.trace(PROMPT):
        out = p.model.output.logits.save()
    return said, out


@case
def wrong_shape(p: Parts) -> Any:
    failed = False
    try:
        with p.model.trace(PROMPT):
            p.put_mlp(2, torch.zeros(3, 5))
    except RuntimeError:
        failed = True
    with p.model.trace(PROMPT):
        out = p.model.output.logits.save()
    return failed, out


# Several invokes


@case
def barrier(p: Parts) -> Any:
    with p.model.trace() as tracer:
        meet = tracer.barrier(2)
        with tracer.invoke(PROMPT):
            clean = p.layers[2].output[:, -1]
            meet()
            a = p.model.output.logits.save()
        with tracer.invoke(OTHER):
            meet()
            p.layers[2].output[:, -1] = clean
            b = p.model.output.logits.save()
    return a, b


@case
def invokes_are_isolated(p: Parts) -> Any:
    with p.model.trace() as tracer:
        with tracer.invoke(PROMPT):
            p.of_mlp(1)[:] = 0
            a = p.layers[4].output.save()
        with tracer.invoke(OTHER):
            b = p.layers[4].output.save()
        with tracer.invoke():
            both = p.model.output.logits.save()
    return a, b, both


# Generation


@case
def generate(p: Parts) -> Any:
    with p.model.generate(PROMPT, max_new_tokens=5, do_sample=False) as tracer:
        ids = tracer.result.save()
    return ids


@case
def generate_untraced(p: Parts) -> Any:
    return p.model.generate(PROMPT, max_new_tokens=4, do_sample=False)


@case
def generate_iter(p: Parts) -> Any:
    with p.model.generate(PROMPT, max_new_tokens=4, do_sample=False) as tracer:
        seen = nnsight.save([])
        for _ in tracer.iter[:]:
            seen.append(p.layers[1].output)
            seen.append(p.of_mlp(4))
    return seen


@case
def generate_all(p: Parts) -> Any:
    with p.model.generate(PROMPT, max_new_tokens=3, do_sample=False) as tracer:
        seen = nnsight.save([])
        for _ in tracer.all():
            seen.append(p.out(3).output)
    return seen


@case
def generate_some_steps(p: Parts) -> Any:
    with p.model.generate(PROMPT, max_new_tokens=5, do_sample=False) as tracer:
        seen = nnsight.save([])
        for _ in tracer.iter[2:4]:
            seen.append(p.layers[2].output)
    with p.model.generate(PROMPT, max_new_tokens=5, do_sample=False) as tracer:
        more = nnsight.save([])
        for _ in tracer.iter[[1, 3]]:
            more.append(p.layers[5].output)
    return seen, more


@case
def generate_steered(p: Parts) -> Any:
    with p.model.generate(PROMPT, max_new_tokens=5, do_sample=False) as tracer:
        for _ in tracer.iter[:]:
            p.layers[3].output[:, -1] += 4.0
    with p.model.generate(PROMPT, max_new_tokens=5, do_sample=False) as tracer:
        for step in tracer.iter[:3]:
            p.layers[2].output = p.layers[2].output * (1.0 + step)
        ids = tracer.result.save()
    return ids


@case
def generate_past_the_window(p: Parts) -> Any:
    ids = tokens(p.model, 62)
    with p.model.generate(ids, max_new_tokens=6, do_sample=False) as tracer:
        seen = nnsight.save([])
        for _ in tracer.iter[:6]:
            seen.append(p.layers[4].output[:, -1])
        out = tracer.result.save()
    return seen, out


@case
def generate_batched(p: Parts) -> Any:
    with p.model.generate(max_new_tokens=4, do_sample=False) as tracer:
        with tracer.invoke(PROMPT):
            a = nnsight.save([])
            for _ in tracer.iter[:3]:
                a.append(p.layers[2].output)
        with tracer.invoke(OTHER):
            b = nnsight.save([])
            for _ in tracer.iter[1:3]:
                p.layers[3].output[:] = 0
                b.append(p.model.lm_head.output)
        with tracer.invoke():
            ids = tracer.result.save()
    return a, b, ids


@case
def generate_beams(p: Parts) -> Any:
    with p.model.generate(PROMPT, max_new_tokens=4, num_beams=3, do_sample=False) as tracer:
        seen = nnsight.save([])
        for _ in tracer.iter[:]:
            seen.append(p.layers[3].output)
    with p.model.generate(PROMPT, max_new_tokens=4, num_beams=3, do_sample=False) as tracer:
        ids = tracer.result.save()
    return seen, ids


@case
def generate_by_prompt_lookup(p: Parts) -> Any:
    ids = tokens(p.model, 24).repeat(1, 3)
    options = {"max_new_tokens": 10, "do_sample": False, "prompt_lookup_num_tokens": 4}
    with p.model.generate(ids, **options) as tracer:
        seen = nnsight.save([])
        for _ in tracer.iter[:2]:
            seen.append(p.layers[3].output)
    with p.model.generate(ids, **options) as tracer:
        out = tracer.result.save()
    return seen, out


@case
def generate_sampled(p: Parts) -> Any:
    torch.manual_seed(5)
    with p.model.generate(PROMPT, max_new_tokens=5, do_sample=True, top_k=20) as tracer:
        ids = tracer.result.save()
    return ids


@case
def generate_skipping_a_layer(p: Parts) -> Any:
    with p.model.generate(PROMPT, max_new_tokens=3, do_sample=False) as tracer:
        for _ in tracer.iter[:]:
            p.layers[4].skip(p.layers[4].input)
    with p.model.generate(PROMPT, max_new_tokens=3, do_sample=False) as tracer:
        ids = tracer.result.save()
    return ids


@case
def cache_cut_short(p: Parts) -> Any:
    ids = tokens(p.model, 9)
    with p.model.session():
        with p.model.trace(ids):
            kept = p.model.output.past_key_values
        refused = nnsight.save([])
        try:
            kept.crop(4)
        except Exception as error:  # noqa: BLE001 - its kind is that of the machine it comes from
            refused.append("positive value" in str(error) and "malformed" not in str(error))
        kept.crop(tokens_to_remove=-3)
        with p.model.trace(ids[:, 6:8], past_key_values=kept):
            out = p.model.output.logits.save()
    return refused, out


# Operations inside a forward


@case
def source_read(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        a = p.attn(2).source.attention_interface_1.output[0].save()
        out = p.model.output.logits.save()
    return a, out


@case
def source_names(p: Parts) -> Any:
    return [op.name for op in p.attn(1).source]


@case
def source_edit(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        value = p.attn(2).source.attention_interface_1.output
        p.attn(2).source.attention_interface_1.output = (value[0] * 0.5, *value[1:])
        args, kwargs = p.attn(4).source.attention_interface_1.inputs
        p.attn(4).source.attention_interface_1.inputs = ((args[0], args[1] * 2, *args[2:]), kwargs)
        out = p.model.output.logits.save()
    return out


@case
def source_recursive(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        op = p.attn(3).source.attention_interface_1
        names = ("torch_nn_functional_scaled_dot_product_attention_0", "nn_functional_dropout_0")
        inner = next(each for each in op.source if each.name in names).output.save()
        out = p.model.output.logits.save()
    return inner, out


@case
def source_of_the_loop(p: Parts) -> Any:
    """Between two layers of one machine."""
    with p.model.trace(PROMPT) as tracer:
        call = next(op for op in p.loop.source if op.name in ("decoder_layer_0", "block_0"))
        for _ in tracer.iter[2]:
            between = call.output.save()
            call.output = call.output * 2
        inside = p.of_mlp(3).save()
        out = p.model.output.logits.save()
    return between, inside, out


@case
def source_in_generation(p: Parts) -> Any:
    with p.model.generate(PROMPT, max_new_tokens=3, do_sample=False) as tracer:
        seen = nnsight.save([])
        for _ in tracer.iter[:]:
            seen.append(p.attn(2).source.attention_interface_1.output[0])
    return seen


# Modules and weights on their own


@case
def logit_lens(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        seen = nnsight.save([])
        for layer in p.layers:
            seen.append(p.model.lm_head(p.norm(layer.output)))
    return seen


@case
def modules_called_by_hand(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        hidden = p.layers[1].output
        seen = nnsight.save([])
        seen.append(first(p.layers[4].mlp(hidden)))
        seen.append(p.first_norm(0)(hidden))
        p.layers[2].output[:] += first(p.layers[0].mlp(hidden))
        seen.append(p.of_mlp(4))
        out = p.model.output.logits.save()
    return seen, out


@case
def weights_read(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        weight = p.out(3).weight
        norm = weight.norm().save()
        own = nnsight.save(p.out(3).input @ weight.T)
    return norm, own


@case
def attached_module(p: Parts) -> Any:
    torch.manual_seed(1)
    adapter = torch.nn.Linear(64, 64)
    adapter.requires_grad_(False)
    p.layers[2].adapter = adapter
    with p.model.trace(PROMPT):
        p.layers[2].output = p.layers[2].adapter(p.layers[2].output, hook=True)
        out = p.model.output.logits.save()
    return out


# Caches, edits, sessions


@case
def cache_everything(p: Parts) -> Any:
    with p.model.trace(PROMPT) as tracer:
        cache = tracer.cache()
    return {name: cache[name].output for name in sorted(cache.keys()) if "layers" in name}


@case
def cache_inputs(p: Parts) -> Any:
    wanted = [p.layers[1].mlp, p.layers[4].mlp]
    with p.model.trace(PROMPT) as tracer:
        cache = tracer.cache(modules=wanted, include_inputs=True)
    return [(cache[m.path].output, cache[m.path].input) for m in wanted]


@case
def cache_in_generation(p: Parts) -> Any:
    path = p.layers[3].path
    with p.model.generate(PROMPT, max_new_tokens=3, do_sample=False) as tracer:
        cache = tracer.cache(modules=[path])
    return [entry.output for entry in cache[path]._cache.entries[path]]


@case
def cache_after_edit(p: Parts) -> Any:
    path = p.layers[3].path
    with p.model.trace(PROMPT) as tracer:
        cache = tracer.cache(modules=[path])
        p.layers[3].output[:, 0] = 7
    return cache[path].output


@case
def edited_model(p: Parts) -> Any:
    layers = p.layers.path.removeprefix("model.")
    with p.model.edit() as (_, edited):
        first(edited.get(layers)[1].mlp.output)[:] = 0
    with p.model.trace(PROMPT):
        before = p.model.output.logits.save()
    with edited.trace(PROMPT):
        after = edited.output.logits.save()
    return before, after


@case
def session(p: Parts) -> Any:
    with p.model.session():
        with p.model.trace(PROMPT):
            hidden = p.layers[3].output
        with p.model.trace(PROMPT):
            p.layers[1].output = hidden
            out = p.model.output.logits.save()
    return out


@case
def activation_patching(p: Parts) -> Any:
    with p.model.session():
        with p.model.trace(PROMPT):
            clean = [layer.output for layer in p.layers]
        scores = nnsight.save([])
        for i in range(len(clean)):
            with p.model.trace("The visitor sings on the garden while rain"):
                p.layers[i].output[:, -1] = clean[i][:, -1]
                scores.append(p.model.lm_head.output[0, -1].max())
    return scores


# What transformers collects itself


@case
def hidden_states(p: Parts) -> Any:
    with p.model.trace(PROMPT, output_hidden_states=True):
        states = p.model.output.hidden_states.save()
        p.layers[0]
    return states


@case
def hidden_states_edited(p: Parts) -> Any:
    with p.model.trace(PROMPT, output_hidden_states=True):
        p.layers[1].output[:] *= 2
        p.layers[4].output = p.layers[4].output + 1
        states = p.model.output.hidden_states.save()
    return states


@case
def attentions(p: Parts) -> Any:
    module = module_of(p.model)
    module.set_attn_implementation("eager")
    try:
        with p.model.trace(PROMPT, output_attentions=True, output_hidden_states=True):
            found = p.model.output.attentions.save()
            states = p.model.output.hidden_states.save()
    finally:
        module.set_attn_implementation(p.attention)
    return found, states


# Gradients


@gradient
def at_boundaries(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        first = p.layers[0].output
        first.requires_grad_(True)
        second = p.layers[2].output
        third = p.layers[4].input
        loss = p.model.output.logits.pow(2).sum()
        with loss.backward():
            c = third.grad.save()
            b = second.grad.save()
            a = first.grad.save()
    return a, b, c


@gradient
def inside(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        start = p.embed.output
        start.requires_grad_(True)
        a = p.of_mlp(1)
        b = p.out(3).input
        c = p.layers[5].mlp.input
        loss = p.model.output.logits.logsumexp(-1).sum()
        with loss.backward():
            grads = nnsight.save([c.grad, b.grad, a.grad, start.grad])
    return grads


@gradient
def of_the_residual(p: Parts) -> Any:
    """The norm's input is the residual stream, which goes on beside the norm."""
    with p.model.trace(PROMPT):
        start = p.layers[0].output
        start.requires_grad_(True)
        residual = p.first_norm(3).input
        middle = p.second_norm(4).input
        loss = p.model.output.logits.pow(2).mean()
        with loss.backward():
            grads = nnsight.save([middle.grad, residual.grad, start.grad])
    return grads


@gradient
def edited(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        start = p.layers[0].output
        start.requires_grad_(True)
        a = p.of_mlp(2)
        b = p.layers[4].output
        loss = p.model.output.logits.pow(2).sum()
        with loss.backward():
            b.grad = b.grad * 2
            a.grad = torch.zeros_like(a.grad)
            found = start.grad.save()
    return found


@gradient
def edited_residual(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        start = p.layers[0].output
        start.requires_grad_(True)
        residual = p.first_norm(3).input
        loss = p.model.output.logits.pow(2).sum()
        with loss.backward():
            residual.grad = residual.grad * 0.5
            found = start.grad.save()
    return found


@gradient
def by_autograd_grad(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        start = p.layers[0].output
        start.requires_grad_(True)
        points = [layer.output for layer in p.layers[1:]]
        loss = p.model.output.logits[0, -1].max()
        grads = nnsight.save(list(torch.autograd.grad(loss, [start, *points])))
    return grads


@gradient
def twice(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        start = p.layers[0].output
        start.requires_grad_(True)
        middle = p.of_mlp(3)
        out = p.model.output.logits
        with out[0, -1].sum().backward(retain_graph=True):
            a = nnsight.save([middle.grad, start.grad])
        with out[0, 0].pow(2).sum().backward():
            b = nnsight.save([middle.grad, start.grad])
    return a, b


@gradient
def batched(p: Parts) -> Any:
    torch.manual_seed(3)
    vector = torch.randn(64, requires_grad=True)
    with p.model.trace() as tracer:
        with tracer.invoke(PROMPT):
            p.layers[1].output = p.layers[1].output + vector
            inner = p.of_mlp(3)
            loss = p.model.output.logits.pow(2).sum()
            with loss.backward(retain_graph=True):
                a = inner.grad.save()
        with tracer.invoke(OTHER):
            seen = p.layers[4].output
            loss = p.model.output.logits.logsumexp(-1).sum()
            with loss.backward():
                b = seen.grad.save()
    return a, b, vector.grad


@gradient
def of_a_vector(p: Parts) -> Any:
    torch.manual_seed(2)
    vector = torch.randn(64, requires_grad=True)
    with p.model.trace(PROMPT):
        p.layers[2].output[:] += vector
        loss = p.model.output.logits.pow(2).sum()
        found = nnsight.save(torch.autograd.grad(loss, vector)[0])
    return found


@gradient
def through_replacements(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        start = p.layers[0].output
        start.requires_grad_(True)
        p.put_mlp(1, p.of_mlp(1) * 0.5)
        p.attn(2).output[0][:] *= 2
        p.layers[3].output = p.layers[3].output + start
        last = p.layers[5].input
        loss = p.model.output.logits.pow(2).sum()
        with loss.backward():
            grads = nnsight.save([last.grad, start.grad])
    return grads


@gradient
def past_the_graph(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        start = p.layers[0].output
        start.requires_grad_(True)
        p.of_mlp(2).data[:, 1:] *= 0.5
        middle = p.layers[3].input
        loss = p.model.output.logits.pow(2).sum()
        with loss.backward():
            grads = nnsight.save([middle.grad, start.grad])
    return grads


@gradient
def in_place_on_the_residual(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        start = p.layers[0].output
        start.requires_grad_(True)
        p.first_norm(3).input[:] *= 0.5
        loss = p.model.output.logits.pow(2).sum()
        with loss.backward():
            found = start.grad.save()
    return found


@gradient
def through_a_skip(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        start = p.layers[0].output
        start.requires_grad_(True)
        p.layers[2].skip(p.layers[2].input * 2)
        p.skip_mlp(3, p.layers[3].mlp.input)
        loss = p.model.output.logits.pow(2).sum()
        with loss.backward():
            found = start.grad.save()
    return found


@gradient
def from_the_middle(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        start = p.layers[0].output
        start.requires_grad_(True)
        middle = p.of_mlp(2)
        loss = p.layers[4].output[:, -1].pow(2).sum() + p.of_mlp(5).sum()
        with loss.backward():
            grads = nnsight.save([middle.grad, start.grad])
    return grads


@gradient
def across_a_session(p: Parts) -> Any:
    with p.model.session():
        with p.model.trace(PROMPT):
            start = p.layers[0].output
            start.requires_grad_(True)
            early = p.layers[3].output
        with p.model.trace(PROMPT):
            p.layers[4].output = p.layers[4].output + early
            loss = p.model.output.logits.pow(2).sum()
            with loss.backward():
                grads = nnsight.save([early.grad, start.grad])
    return grads


@gradient
def switched_off_half_way(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        start = p.layers[0].output
        start.requires_grad_(True)
        before = p.first_norm(2).output
        with torch.no_grad():
            attention = p.attn(2).output[0]
            with torch.enable_grad():
                inner = p.layers[2].mlp.input
        after = p.layers[3].mlp.input
        with torch.no_grad():
            later = p.of_mlp(3)
        out = p.model.output.logits
        seen = (before, attention, inner, after, later, out)
        tracked = nnsight.save([value.requires_grad for value in seen])
        with out.pow(2).sum().backward():
            grads = nnsight.save([inner.grad, start.grad])
    return tracked, grads


@gradient
def switched_on_half_way(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        with torch.no_grad():
            start = p.layers[1].output
            start.requires_grad_(True)
            p.attn(2).output[0].save()
            with torch.enable_grad():
                first = p.of_mlp(2)
                second = p.layers[4].output
                loss = second.pow(2).sum()
            last = p.layers[5].output
        tracked = nnsight.save([value.requires_grad for value in (first, second, last)])
        with loss.backward():
            grads = nnsight.save([first.grad, start.grad])
    return tracked, grads


@gradient
def of_an_older_name(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        residual = p.first_norm(2).input
        p.attn(2).output[0].save()
        residual.requires_grad_(True)
        inner = p.of_mlp(3)
        loss = p.model.output.logits.pow(2).sum()
        with loss.backward():
            grads = nnsight.save([inner.grad, residual.grad])
    return grads


@gradient
def through_a_cache(p: Parts) -> Any:
    ids = tokens(p.model, 10)
    with p.model.session():
        with p.model.trace(ids[:, :6], use_cache=True):
            start = p.layers[0].output
            start.requires_grad_(True)
            kept = p.model.output.past_key_values
        with p.model.trace(ids[:, 6:], past_key_values=kept):
            loss = p.model.output.logits.pow(2).sum()
            found = nnsight.save(torch.autograd.grad(loss, start)[0])
    return found


@gradient
def of_an_output_that_is_kept(p: Parts) -> Any:
    """Each backward frees its own graph; the next one has nothing to look for there."""
    weight = torch.linspace(-0.1, 0.1, 64 * 64).reshape(64, 64)
    with p.model.session():
        trained = weight.clone().requires_grad_()
        for _ in range(3):
            with p.model.trace(PROMPT):
                hidden = p.layers[2].output
                p.layers[2].output = hidden + hidden @ trained
                out = p.model.output
                out.logits[0, -1].logsumexp(-1).backward()
            with torch.no_grad():
                trained -= 0.1 * trained.grad
        found = nnsight.save([trained.grad, trained.detach()])
    return found


@gradient
def behind_a_cut(p: Parts) -> Any:
    """Nothing arrives before it, neither zeros nor an error of a graph that is freed."""
    with p.model.trace(PROMPT):
        start = p.layers[0].output
        start.requires_grad_(True)
        p.layers[1].output = p.layers[1].output * p.layers[1].output.sigmoid()
        p.of_mlp(2).sum().backward()
        fresh = p.layers[3].output.detach().requires_grad_(True)
        p.layers[3].output = fresh
        loss = p.model.output.logits.pow(2).sum()
        asked = [start, fresh]
        grads = nnsight.save(list(torch.autograd.grad(loss, asked, allow_unused=True)))
    return grads


@gradient
def of_operations(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        start = p.layers[0].output
        start.requires_grad_(True)
        mixed = p.attn(3).source.attention_interface_1.output[0]
        loss = p.model.output.logits.pow(2).sum()
        with loss.backward():
            grads = nnsight.save([mixed.grad, start.grad])
    return grads


@gradient
def of_hidden_states(p: Parts) -> Any:
    with p.model.trace(PROMPT, output_hidden_states=True):
        start = p.embed.output
        start.requires_grad_(True)
        states = p.model.output.hidden_states
        loss = p.model.output.logits.pow(2).sum() + states[3].sum()
        with loss.backward():
            grads = nnsight.save([states[4].grad, states[2].grad, start.grad])
    return grads


@gradient
def of_a_module_called_by_hand(p: Parts) -> Any:
    with p.model.trace(PROMPT):
        start = p.layers[0].output
        start.requires_grad_(True)
        extra = first(p.layers[4].mlp(start))
        p.layers[2].output = p.layers[2].output + extra
        loss = p.model.output.logits.pow(2).sum()
        with loss.backward():
            grads = nnsight.save([extra.grad, start.grad])
    return grads


@gradient
def attribution_patching(p: Parts) -> Any:
    ids = tokens(p.model, 9)
    with p.model.trace(ids):
        clean = nnsight.save([p.of_mlp(i) for i in range(6)])
    with p.model.trace(ids.flip(1)):
        start = p.embed.output
        start.requires_grad_(True)
        values = [p.of_mlp(i) for i in range(6)]
        loss = p.model.output.logits[0, -1, 7]
        scores = nnsight.save([])
        with loss.backward():
            for i in reversed(range(6)):
                scores.append(((clean[i] - values[i]) * values[i].grad).sum())
    # Together: sums that cancel out are compared with the largest of them.
    return torch.stack(scores)
