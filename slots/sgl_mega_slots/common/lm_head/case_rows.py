"""Hidden rows and weights of the conformance cases of both slots: exact sums, planted winners, dead rows."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_slots.common.case_tools import generator

NAN = float("nan")
_LARGE = {torch.float32: 3e38, torch.bfloat16: 3e38, torch.float16: 6e4}  # twice this rounds to an infinity


def exact(shape: tuple[int, int], reach: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Multiples of 1/8 in [-reach, reach]: a sum of a few thousand products is exact in fp32 in any order."""
    eighths = torch.randint(-8 * reach, 8 * reach + 1, shape, generator=generator(seed), dtype=torch.int8)
    return eighths.to(dtype) / 8


def exact_weight(vocab: int, depth: int, dtype: torch.dtype, seed: int, *, padding: int = 0) -> Tensor:
    """[V + padding, H] for :func:`exact` rows; the padded rows are NaN, so that a read of one shows."""
    weight = exact((vocab + padding, depth), 1, dtype, seed)
    weight[vocab:] = NAN
    return weight


def planted(rows: int, vocab: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random rows [rows, H] and weights [V, H], whose sums round by order. Winners (31 * row + 3) % V, all different,
    have logits of about 2 * sqrt(H), the others of about 1."""
    source = generator(11)
    hidden = torch.randn(rows, depth, generator=source)
    weight = torch.randn(vocab, depth, generator=source) * depth**-0.5
    weight[(31 * torch.arange(rows) + 3) % vocab] = 2 * hidden * depth**-0.5
    return hidden.to(dtype), weight.to(dtype)


def dead_rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Hidden [6, 16] and weight [37, 16], whose row 3 is NaN. Winners: 0, 0, 36, 20, 33, 0."""
    large = _LARGE[dtype]
    hidden, weight = torch.zeros(6, 16), torch.zeros(37, 16)
    hidden[0] = NAN
    hidden[1, 0] = large  # every logit -inf
    weight[:, 0] = -2.0
    hidden[2, 1] = large  # every logit -inf but one, which is -1
    weight[:36, 1] = -2.0
    hidden[2, 5], weight[36, 5] = 1.0, -1.0
    hidden[3, 2] = large  # two infinities
    weight[[20, 36], 2] = 2.0
    hidden[4, 3] = 1.0  # two ids share the first place
    weight[:, 3] = -1.0
    weight[[33, 34], 3] = 5.0
    weight[3] = NAN
    return hidden.to(dtype), weight.to(dtype)


def one_live_id(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Hidden [2, 16] and weight [37, 16]: every id is NaN but 36, which wins with a negative logit."""
    hidden, weight = torch.ones(2, 16), torch.full((37, 16), NAN)
    weight[36] = -0.5
    return hidden.to(dtype), weight.to(dtype)
