"""Helpers for case generators: the same numbers on every device, and awkward strides."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    """A CPU generator, so that a case has the same numbers on every device."""
    return torch.Generator().manual_seed(seed)


def strided(tensor: Tensor, pad: int = 3) -> Tensor:
    """The same values as a view whose rows lie ``pad`` elements further apart (and start one in)."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] + pad)
    storage = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    view = storage[..., 1 : 1 + tensor.shape[-1]]
    view.copy_(tensor)
    return view


def eighths(shape: tuple[int, ...], reach: int, seed: int) -> Tensor:
    """Random multiples of 1/8 in [-reach, reach]: sums and products of a few hundred are exact in fp32."""
    return torch.randint(-8 * reach, 8 * reach + 1, shape, generator=generator(seed)).to(torch.float32) / 8


def mostly(background: float, entries: Mapping[int, float]) -> Callable[[int], Tensor]:
    """A row [V] for any V: one value everywhere but at a few ids."""

    def row(vocab: int) -> Tensor:
        values = torch.full((vocab,), background)
        for index, value in entries.items():
            values[index] = value
        return values

    return row
