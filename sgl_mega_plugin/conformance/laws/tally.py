"""What the frequency tests share: a test as a record, counts held to their binomial law, a batch of mixed rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Call = Callable[..., None]

DRAWS = 20_000  # tokens a temperature, at least
SIGMAS = 5.0  # one count in 1.7 million lies further off by chance
_SMALLEST = 20.0  # expected counts below this are summed: there a binomial is no Gaussian
TEMPERATURES = (1.0, 0.6, 0.0)
BATCH = 96
KEY = 0x5DEECE66D1234567
IDS = 8
QWEN3_VOCAB = 151_936


@dataclass
class Tally:
    """Counts of one kind of event, each with its trials and its probability; all [N] fp64."""

    at: str  # what the events have in common
    name: Callable[[int], str]  # of an event, by its number
    probability: Tensor
    count: Tensor = field(init=False)
    trials: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.count = torch.zeros_like(self.probability)
        self.trials = torch.zeros_like(self.probability)

    def problems(self) -> list[str]:
        """The events that are too frequent or too rare: the frequency, its probability and the bound."""
        p, n = self.probability, self.trials
        expected, variance = p * n, p * (1 - p) * n
        wrong = (self.count - expected).abs() > SIGMAS * variance.sqrt()
        certain = (p == 0) | (p == 1)
        lines = [self._line(i) for i in (wrong & (certain | (variance >= _SMALLEST))).nonzero().flatten().tolist()]
        rare = ~certain & (variance < _SMALLEST)
        found, wanted, spread = (float(x[rare].sum()) for x in (self.count, expected, variance))
        bound = SIGMAS * math.sqrt(spread)
        if spread >= _SMALLEST and abs(found - wanted) > bound:
            rarest = f"{self.at}, the {int(rare.sum())} rarest"
            lines.append(f"{rarest}: found {found:.0f} times, expected {wanted:.1f}, bound {bound:.1f}")
        return lines

    def _line(self, index: int) -> str:
        p, n = float(self.probability[index]), float(self.trials[index])
        bound = SIGMAS * math.sqrt(p * (1 - p) / n)
        return (
            f"{self.at}, {self.name(index)}: frequency {float(self.count[index]) / n:.5f} of {n:.0f}, "
            f"expected {p:.5f}, bound {bound:.5f} ({SIGMAS:g} sigma)"
        )


@dataclass(frozen=True)
class Law:
    """A frequency test: ``arguments(device)`` sizes the slot, ``run(call, arguments)`` returns what is wrong."""

    id: str
    arguments: Callable[[str], dict[str, Any]]
    run: Callable[[Call, dict[str, Any]], list[str]]
    kernel_only: bool = False  # needs a GPU


def rows_at(temperature: float) -> slice:
    """The rows of a batch that have a temperature: they take turns."""
    return slice(TEMPERATURES.index(temperature), None, len(TEMPERATURES))


def mixed_temperatures(device: str, batch: int = BATCH) -> Tensor:
    """[B] fp32: the temperatures in turn."""
    return torch.tensor(TEMPERATURES * (batch // len(TEMPERATURES)), device=device)


def softmax(logits: Tensor, temperature: float) -> Tensor:
    """[..., V] fp64 on the CPU; temperature 0 has all its mass on the lowest id with the greatest logit."""
    values = logits.double().cpu()
    if temperature > 0:
        return (values / temperature).softmax(-1)
    best = (values == values.amax(-1, keepdim=True)).int().argmax(-1)
    return torch.nn.functional.one_hot(best, values.shape[-1]).double()


def outside(ids: Tensor, vocab: int) -> str:
    """The first id outside [0, V), or nothing."""
    wrong = ids[(ids < 0) | (ids >= vocab)]
    return f"found {int(wrong[0])}, allowed 0 to {vocab - 1}" if len(wrong) else ""
