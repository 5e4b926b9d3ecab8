"""Trace bodies as people write them, each a function (model, x, backend) that returns its names.

They run twice: here, plainly, and behind the fence in a jail; the saved values must be equal.
"""

from __future__ import annotations

import argparse
import collections
import math
import operator
from collections import Counter
from collections.abc import Callable
from functools import partial, reduce
from itertools import chain
from math import sqrt
from pathlib import Path
from typing import Any

import nnsight
import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from nnsight import save
from nnsight.tracing.backend import Backend
from numpy import exp, mean
from torch import matmul, nn
from torch.nn.functional import gelu, softmax
from torch.utils.data import DataLoader
from tqdm import tqdm

from tests.interventions.jail import own_module, toy_model

Names = dict[str, Any]
BENIGN: dict[str, Callable[..., Names]] = {}


def benign(body: Callable[..., Names]) -> Callable[..., Names]:
    BENIGN[body.__name__] = body
    return body


def example() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 3 * 8).reshape(2, 3, 8)


def double(value: torch.Tensor) -> torch.Tensor:
    """A helper that is shipped along by its source."""
    factor: int = 2
    return value * factor


def scaled(value: torch.Tensor, by: float = 3.0) -> torch.Tensor:
    parts = [double(row) * by for row in value]
    return torch.stack(parts)


@benign
def read_output(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        hidden = m.layers[1].output.save()
    return locals()


@benign
def read_input_and_inputs(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        first = m.layers[1].up.input.save()
        args, kwargs = m.layers[2].inputs
        second = args[0].save()
    return locals()


@benign
def add_in_place(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        m.layers[0].output[:] += 1.5
        out = m.output.save()
    return locals()


@benign
def add_to_attribute(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        m.layers[0].output += torch.ones(8)
        m.layers[1].output *= 2
        out = m.output.save()
    return locals()


@benign
def zero_a_slice(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        m.layers[1].output[:, -1, ::2] = 0
        out = m.output.save()
    return locals()


@benign
def replace_output(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        m.layers[1].output = torch.zeros_like(m.layers[1].output)
        out = m.output.save()
    return locals()


@benign
def annotated(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        strength: float = 0.5
        where: int  # noqa: F842
        out: torch.Tensor = (m.layers[0].output * strength).save()
    return locals()


@benign
def loop_over_layers(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        norms = []
        for index, layer in enumerate(m.layers):
            norms.append((index, layer.output.norm().item()))
        norms = nnsight.save(norms)
    return locals()


@benign
def comprehensions(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        outs = [layer.output for layer in m.layers]
        by_name = nnsight.save({f"layer{i}": float(o.mean()) for i, o in enumerate(outs)})
    return locals()


@benign
def patch_between_invokes(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(backend=backend) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(x[:1]):
            source = m.layers[0].output
            barrier()
        with tracer.invoke(x[1:]):
            barrier()
            m.layers[0].output = source
            out = m.output.save()
    return locals()


@benign
def gradients(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        hidden = m.layers[0].output
        hidden.requires_grad_(True)
        loss = m.output.pow(2).sum()
        with loss.backward():
            grad = hidden.grad.save()
    return locals()


@benign
def autograd_grad(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        hidden = m.layers[0].output
        hidden.requires_grad_(True)
        loss = m.output.sum()
        (grad,) = torch.autograd.grad(loss, hidden)
        grad = grad.save()
    return locals()


@benign
def skip_a_layer(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        m.layers[1].skip(m.layers[1].input)
        out = m.output.save()
    return locals()


@benign
def stop_early(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend) as tracer:
        hidden = m.layers[0].output.save()
        tracer.stop()
    return locals()


@benign
def source_operation(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        inner = m.layers[0].source.self_act_0.output.save()
    return locals()


@benign
def cache_everything(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend) as tracer:
        cache = tracer.cache()  # noqa: F841
        total = m.output.sum().save()
    return {"total": total}


@benign
def result_of_the_call(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend) as tracer:
        out = tracer.result.save()
    return locals()


@benign
def helper_functions(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        out = scaled(m.layers[1].output).save()
    return locals()


@benign
def functions_inside(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):

        def centred(value: torch.Tensor, keep: bool = True) -> torch.Tensor:
            mean = value.mean(-1, keepdim=keep)
            return value - mean

        square = lambda value: value**2  # noqa: E731
        out = square(centred(m.layers[2].output)).save()
    return locals()


@benign
def class_inside(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):

        class Meter:
            def __init__(self, start: float = 0.0) -> None:
                self.total = start
                self.seen = 0

            def __call__(self, value: torch.Tensor) -> float:
                self.total += float(value.abs().sum())
                self.seen += 1
                return self.total

        meter = Meter()
        for layer in m.layers:
            meter(layer.output)
        total = nnsight.save([meter.total, meter.seen])
    return locals()


@benign
def a_probe(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):

        class Probe(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.line = torch.nn.Linear(8, 1, bias=False)
                torch.nn.init.ones_(self.line.weight)

            def forward(self, value: torch.Tensor) -> torch.Tensor:
                return torch.sigmoid(self.line(value))

        scores = Probe()(m.layers[1].output).detach().save()
    return locals()


@benign
def functional_and_numpy(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        logits = m.output
        probabilities = F.softmax(logits, dim=-1).save()
        also = torch.nn.functional.log_softmax(logits, dim=-1).exp().save()
        array = logits.detach().numpy()
        top = nnsight.save(np.argmax(array, axis=-1).tolist())
    return locals()


@benign
def imports_inside(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        import itertools
        from collections import Counter, defaultdict
        from functools import reduce

        import torch.nn.functional as tnf

        out = tnf.gelu(m.layers[0].output).save()
        groups = defaultdict(list)
        for key, value in zip("abab", itertools.count()):
            groups[key].append(value)
        counted = nnsight.save(dict(Counter("abca")))
        product = nnsight.save(reduce(lambda a, b: a * b, [1, 2, 3]))
        grouped = nnsight.save(dict(groups))
    return locals()


@benign
def texts(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        value = m.output.mean().item()
        one = nnsight.save(f"{value:.3f} {value!r}")
        two = nnsight.save("{:.2f} {name} {shape[0]}".format(value, name="x", shape=[7]))
        three = nnsight.save("%.1f" % value)  # noqa: UP031
        print("mean", value)
    return locals()


@benign
def exceptions_and_conditions(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        hidden = m.layers[0].output
        try:
            hidden.reshape(5, 5)
        except RuntimeError as error:
            message = nnsight.save("shape" in str(error))
        many = ExceptionGroup("many", [ConnectionError("one"), *[ValueError("other")] * 2])
        others = nnsight.save(len(many.subgroup(ValueError).exceptions))
        found = nnsight.save("big" if (largest := float(hidden.max())) > 100 else "small")
        assert largest < 1000
        del hidden
    return locals()


@benign
def unpacking(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        batch, length, _ = m.output.shape
        (first, *rest), last = (1, 2, 3), 4
        pairs = nnsight.save([a + b for a, (b, c) in [(1, (2, 3))]])
        sizes = nnsight.save({"batch": batch, "length": length, "rest": rest})
        options = {"dim": -1}
        top = torch.topk(m.output if False else torch.ones(4), *[2], **options).values.save()
    return locals()


@benign
def ad_hoc_module_call(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        lens = [m.head(layer.output).argmax(-1) for layer in m.layers]
        lens = nnsight.save(lens)
    return locals()


@benign
def weights_are_read(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        direction = m.head.weight[3]
        score = (m.layers[2].output @ direction).save()
    return locals()


@benign
def captured_values(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    steering = torch.arange(8.0)
    settings = collections.OrderedDict(strength=0.25)
    with m.trace(x, backend=backend):
        m.layers[0].output[:, -1] += steering * settings["strength"]
        out = (m.output * math.pi).save()
    return locals()


@benign
def dictionaries_in_place(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        counts = nnsight.save({"a": 1})
        counts["a"] += 2
        counts["b"] = [0, 0]
        counts["b"][1] -= 5
        total = 0
        for layer in m.layers:
            total += layer.output.sum()
        total = total.save()
    return locals()


@benign
def sessions(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.session(backend=backend):
        with m.trace(x):
            before = m.layers[0].output
        with m.trace(x):
            m.layers[0].output = before * 2
            out = m.output.save()
    return locals()


class Plan:
    def __init__(self, layer: int, strength: float = 1.0) -> None:
        self.layer = layer
        self.strength = strength

    def weight(self) -> float:
        return self.strength * 2


@benign
def own_class(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    plan, draws = Plan(layer=1, strength=0.5), np.random.default_rng(3)
    with m.trace(x, backend=backend):
        plan.strength += 0.25
        out = (m.layers[plan.layer].output * plan.weight()).save()
        drawn = nnsight.save(draws.normal(size=2).tolist())
    return locals()


@benign
def dataclass_inside(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        from dataclasses import dataclass, field

        @dataclass
        class Point:
            layer: int
            tags: list[str] = field(default_factory=list)

        point = Point(layer=1)
        point.tags.append("seen")
        out = m.layers[point.layer].output.save()
        tags = nnsight.save(point.tags)
    return locals()


@benign
def other_classes_inside(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        import enum
        import typing

        class Mode(enum.Enum):
            ZERO = 0
            DOUBLE = 2

        class Pair(typing.NamedTuple):
            left: int
            right: int = 3

        pair = Pair(1)
        m.layers[0].output *= Mode.DOUBLE.value
        out = (m.output + pair.right).save()
    return locals()


@benign
def what_numpy_fetches_at_first_use(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        array = m.layers[1].output.detach().numpy()
        sizes = [array.mean(), array.sum(), array.std(), array.var(), array.max(), array.min()]
        sizes += [array.any(), array.all(), array.prod(), np.median(array), np.ptp(array)]
        sizes = nnsight.save([float(size) for size in sizes])
        clipped = nnsight.save(array.clip(-0.5, 0.5).tolist())
        shown = nnsight.save([repr(array), str(array), f"{array[0, 0, 0]:.3f}"])
        order = nnsight.save(np.argsort(array, axis=-1).tolist())
        lengths = nnsight.save(np.linalg.norm(array, axis=-1).tolist())
        rank = nnsight.save(np.linalg.svd(array[0], compute_uv=False).round(3).tolist())
        wave = nnsight.save(np.abs(np.fft.rfft(array[0, 0])).round(3).tolist())
        drawn = nnsight.save(np.random.default_rng(0).normal(size=3).tolist())
        counted = nnsight.save([part.tolist() for part in np.unique(array > 0, return_counts=True)])
        joined = nnsight.save(np.einsum("bij->j", array).tolist())
    return locals()


def _halved(value: torch.Tensor, _by: float = 2.0, **_more: float) -> torch.Tensor:
    return value / _by


@benign
def names_of_one_s_own(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    _strength = 0.5
    with m.trace(x, backend=backend):
        import math as _math
        from collections import namedtuple

        _hidden = m.layers[0].output * _strength

        class Mean:
            _made = 0

            def __init__(self) -> None:
                self._values = []
                Mean._made += 1

            def add(self, value: torch.Tensor) -> None:
                self._values.append(value)
                self._last = value
                self._last += 0

            def _mean(self) -> torch.Tensor:
                return sum(self._values) / len(self._values)

        class Shifted(Mean):
            def _mean(self) -> torch.Tensor:
                return super()._mean() + _math.pi

        mean = Shifted()
        for _layer in m.layers:
            mean.add(_halved(_layer.output, _by=4.0))
        out = mean._mean().save()
        last = (mean._last + _hidden).save()
        Point = namedtuple("Point", "layer side")
        moved = Point(1, "left")._replace(layer=2)
        told = nnsight.save([Mean._made, moved._asdict(), list(moved._fields)])
    return locals()


@benign
def a_match(m: Any, x: torch.Tensor, backend: Backend) -> Names:  # noqa: C901
    with m.trace(x, backend=backend):
        from dataclasses import dataclass

        @dataclass
        class Edit:
            layer: int
            strength: float = 1.0

        class Plain:
            __match_args__ = ("kind",)

            def __init__(self, kind: str) -> None:
                self.kind = kind

        def read(thing: Any) -> Any:  # noqa: C901, PLR0911
            first = "untouched"
            match thing:
                case 0 | -1 | None | True:
                    return ["nothing", thing]
                case [first, *_, 99]:
                    return ["never", first]
                case [int(first), *rest] if len(rest) > 1:
                    return ["long", first, rest]
                case [a, [b, c]] | [a, b, c]:
                    return ["three", a, b, c]
                case {"layer": int() as layer, **others}:
                    return ["map", layer, others]
                case Edit(0, strength=strength) | Edit(strength, 0.0):
                    return ["edit", strength]
                case Edit(layer, strength):
                    return ["any edit", layer, strength, first]
                case Plain("a" | "b" as kind):
                    return ["plain", kind]
                case str(text) | bytes(text):
                    return ["text", len(text)]
                case float(value) if value > 1:
                    return ["large", value]
                case tuple() | {}:
                    return ["empty", first]
            return ["else", first]

        things = [0, -1, None, True, [1, 2, 3], [1, [2, 3]], [1, 2, 3, 4], (5, 6), [7], "abc", b"x"]
        things += [{"layer": 3, "side": 1}, {"layer": "x"}, Edit(0, 2.0), Edit(3, 0.0), Edit(3)]
        things += [Plain("b"), Plain("c"), 2.5, 0.5, (), {}, range(3), {1}, [[1], 99]]
        found = nnsight.save([read(thing) for thing in things])
        match m.output:
            case torch.Tensor(shape=(batch, length, _), ndim=3):
                shape = nnsight.save([batch, length])
        match float(m.output.sum()):
            case total:
                total = nnsight.save(round(total, 3))
    return locals()


@benign
def a_module_of_one_s_own(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    setting, place = own_module.Setting(1), own_module.Place(1)
    pair, point, side = own_module.Pair(3), own_module.Point(1, 2), own_module.Side.RIGHT
    with m.trace(x, backend=backend):
        reading, louder = own_module.Reading(), own_module.Louder()
        means = nnsight.save([r.take(m.layers[1].output) for r in (reading, louder)])
        out = own_module.scaled(m.layers[2].output).save()
        inner = own_module._shifted(torch.ones(2)).save()
        setting._strength += 0.25
        sizes = nnsight.save([setting._doubled(), own_module.SCALE + own_module._OFFSET])
        where = nnsight.save([place.layer, place.half, side.value])
        ends = nnsight.save([pair.width(), pair._replace(high=9).high, own_module.Pair(1)[1]])
        ends.append(point.y + own_module.Point(5, 6).x)
        score = own_module.Probe()(torch.ones(1, 8)).detach().save()
    return locals()


@benign
def a_class_of_models_of_one_s_own(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    lens = own_module.Lens(toy_model.toy())
    with lens.trace(x, backend=backend):
        lens.embedded = lens.embedded * 2
        lens.steer(0, 0.5)
        seen = nnsight.save([lens.outputs[layer] for layer in range(lens.count)])
        out = lens.output.save()
    return locals()


@benign
def numbers_that_a_module_has(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        up = m.layers[1].up
        told = nnsight.save([up.in_features, up.out_features, up.training, m.layers[0].up.bias])
        heads = up.output.reshape(2, 3, -1, up.in_features).save()
    return locals()


@benign
def data_classes_of_one_s_own_made_inside(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        setting = own_module.Setting(1, tags=["a"])
        other = own_module.Setting(layer=1)
        told = nnsight.save([repr(setting), setting == other, other == own_module.Setting(1)])
        site, late = own_module.Site(1, scale=4.0, key="x"), own_module.Site(2)
        told += [repr(site), site.strength, site.key, site.made, site < late]
        told += [len({site, own_module.Site(1, scale=4.0)}), repr(own_module.Shown(3))]
        place, same = own_module.Place(1, "input"), own_module.Place(layer=1, half="input")
        told += [repr(place), place == same, hash(place) == hash(same)]
        try:
            place.layer = 5
        except AttributeError as error:
            told.append(type(error).__name__)
        match late:
            case own_module.Site(layer, strength=strength):
                told += [layer, strength]
        out = (m.layers[site.layer].output * site.strength).save()
    return locals()


@benign
def configurations(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    options = argparse.Namespace(layer=1, out=Path("/nowhere/results"))
    with m.trace(x, backend=backend):
        out = m.layers[options.layer].output.save()
        name = nnsight.save(str(options.out / f"{options.layer}.pt"))
        near = nnsight.save([own_module.HERE.name, options.out.suffix])
    return locals()


@benign
def classes_that_ask_their_bases(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        loud = own_module.Loudest(0.5)
        taken = nnsight.save([loud.take(m.layers[1].output)])
        score = own_module.Probe()(torch.ones(1, 8)).detach().save()
    return locals()


@benign
def a_module_of_one_s_own_in_the_model(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    probe = own_module.Probe()
    with m.trace(x, backend=backend):
        m.layers[1].probe = probe
        m.layers[2].act = torch.nn.Tanh()
        score = m.layers[1].probe(m.layers[1].output, hook=True).detach().save()
        out = m.output.save()
    return locals()


@benign
def abstract_classes(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        from abc import ABC, abstractmethod

        class Metric(ABC):
            def __init__(self) -> None:
                self._seen = 0

            @abstractmethod
            def of(self, value: torch.Tensor) -> float: ...

        class Mean(Metric):
            def of(self, value: torch.Tensor) -> float:
                self._seen += 1
                return float(value.mean()) + self._seen

        found = nnsight.save([Mean().of(m.layers[0].output)])
        found.append(own_module.Largest(1).of(m.layers[1].output))
        for kind in (Metric, own_module.Metric):
            try:
                kind(0) if kind is own_module.Metric else kind()
            except TypeError:
                found.append("abstract")
    return locals()


@benign
def progress_bars_and_loaders(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        import tqdm as bars
        from torch.utils.data import TensorDataset
        from tqdm.auto import trange

        hidden = m.layers[0].output
        sums = nnsight.save([float(hidden[:, i].sum()) for i in tqdm(range(2), desc="rows")])
        with bars.tqdm(total=3, leave=False) as bar:
            for step in trange(3):
                bar.update(1)
                bar.set_description(f"{step}")
            sums.append(bar.n)
        batches = DataLoader(TensorDataset(hidden[0]), batch_size=2)
        sums += [float(batch.sum()) for (batch,) in batches]
        sums += map(len, torch.utils.data.DataLoader(hidden[0], batch_size=3))
    return locals()


@benign
def names_imported_at_the_top(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        double_ = partial(torch.mul, 2)
        out = softmax(double_(matmul(m.layers[0].output, torch.eye(8))), dim=-1).save()
        act = gelu(out).save()
        counted = save(dict(Counter(chain("ab", "b"))))
        total = save(reduce(operator.add, [sqrt(4.0), float(mean(exp(np.zeros(3))))]))
        heads = rearrange(m.layers[1].output, "b s (h d) -> b h s d", h=2).save()
        kinds: dict[str, Any] = save({"int": isinstance(1, Any if False else int)})
        line = nn.Linear(8, 2)
        nn.init.ones_(line.weight)
        nn.init.zeros_(line.bias)
        lined = line(m.layers[2].output).detach().save()
    return locals()


@benign
def housekeeping(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        import contextlib
        import gc
        import heapq
        import warnings
        from types import SimpleNamespace

        place = SimpleNamespace(layer=1, device="cuda" if torch.cuda.device_count() else "cpu")
        with contextlib.nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = m.layers[place.layer].output.to(place.device).save()
        lengths = torch.func.vmap(lambda row: row.norm())(out[0]).save()
        most = nnsight.save(heapq.nlargest(2, lengths.tolist()))
        torch.cuda.empty_cache()
        gc.collect()
    return locals()


@benign
def einops_where_it_is_installed(m: Any, x: torch.Tensor, backend: Backend) -> Names:
    with m.trace(x, backend=backend):
        from einops import einsum, rearrange, reduce, repeat

        out = m.layers[0].output
        heads = rearrange(out, "b s (h d) -> b h s d", h=2).save()
        means = reduce(out, "b s d -> b d", "mean").save()
        again = repeat(means, "b d -> b k d", k=3).save()
        scores = einsum(out, out, "b i d, b j d -> b i j").save()
    return locals()
