"""A module as people keep beside their notebook: it travels by value, and no node has it."""

from __future__ import annotations

import logging
import math
import os
from abc import ABC, abstractmethod
from collections import namedtuple
from dataclasses import InitVar, dataclass, field
from enum import Enum
from ipaddress import ip_address
from pathlib import Path
from typing import ClassVar, NamedTuple

import nnsight
import numpy as np
import torch
from torch import nn

__all__ = ["Reading", "scaled"]

SCALE = 2.0
_OFFSET = 1.0
logger = logging.getLogger(__name__)
HERE = Path(__file__).parent
LOCALHOST = ip_address("127.0.0.1")


def scaled(value: torch.Tensor) -> torch.Tensor:
    return _shifted(value * SCALE)


def _shifted(value: torch.Tensor) -> torch.Tensor:
    return value + _OFFSET + math.floor(0.5)


class Reading:
    """What it has seen, in attributes of its own."""

    _readings = 0

    def __init__(self) -> None:
        self._seen: list[float] = []
        Reading._readings += 1

    def take(self, value: torch.Tensor) -> float:
        self._seen.append(self._size(value))
        return self._mean

    @property
    def _mean(self) -> float:
        return float(np.array(self._seen).mean())

    @staticmethod
    def _size(value: torch.Tensor) -> float:
        return float(value.detach().numpy().std())


class Outputs:
    """What layers give, by their number."""

    def __init__(self, model: Lens) -> None:
        self.model = model

    def __getitem__(self, layer: int) -> torch.Tensor:
        output: torch.Tensor = self.model.layers[layer].output
        return output

    def __setitem__(self, layer: int, value: torch.Tensor) -> None:
        self.model.layers[layer].output = value


class Lens(nnsight.NNsight):  # type: ignore[misc]  # nnsight is untyped here
    """A model with ways of its author's to its values, as libraries on top of nnsight have them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.outputs = Outputs(self)
        self.count = len(self.layers)

    @property
    def embedded(self) -> torch.Tensor:
        value: torch.Tensor = self.layers[0].input
        return value

    @embedded.setter
    def embedded(self, value: torch.Tensor) -> None:
        self.layers[0].input = value

    def steer(self, layer: int, by: float) -> None:
        self.outputs[layer] += by


class Louder(Reading):
    def _size(self, value: torch.Tensor) -> float:  # type: ignore[override]
        # nnsight ships a method by its source, where `super()` would not know its class.
        return 2 * super(Louder, self)._size(value)  # noqa: UP008


class Loudest(Louder):
    def __init__(self, times: float) -> None:
        super().__init__()
        self._times = times

    def take(self, value: torch.Tensor) -> float:
        return self._times * super().take(value) + self._size(value)


class Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._line = nn.Linear(8, 1, bias=False)
        self._gain = 3.0
        nn.init.ones_(self._line.weight)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._line(value) * self._gain
        return result


class Metric(ABC):
    _calls = 0

    def __init__(self, layer: int) -> None:
        self.layer = layer

    @abstractmethod
    def of(self, value: torch.Tensor) -> float: ...


class Largest(Metric):
    def of(self, value: torch.Tensor) -> float:
        self._calls += 1
        logger.debug("call %d", self._calls)
        logger.warning("largest of %d", value.numel())
        return float(value.max()) * self._calls


class Shouting(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        logger.info(record.getMessage().upper())


def never_in_a_job() -> int:
    return os.getpid()


@dataclass
class Setting:
    layer: int
    _strength: float = 0.5
    tags: list[str] = field(default_factory=list)

    def _doubled(self) -> float:
        return self._strength * 2


@dataclass(frozen=True, slots=True)
class Place:
    layer: int
    half: str = "output"


@dataclass(repr=False)
class Shown:
    layer: int

    def __repr__(self) -> str:
        return f"layer {self.layer}"


@dataclass(order=True, unsafe_hash=True)
class Site(Shown):
    """With all that `dataclass` generates."""

    scale: InitVar[float] = 1.0
    made: ClassVar[int] = 3
    key: str = field(default="k", kw_only=True, repr=False, compare=False)
    strength: float = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.strength = 2 * scale


exec("def told_by_text(): return 1")  # noqa: S102 - nobody has the source of it


class Pair(NamedTuple):
    low: int
    high: int = 7

    def width(self) -> int:
        return self.high - self.low


Point = namedtuple("Point", "x y")


class Side(Enum):
    LEFT = 1
    RIGHT = 2
