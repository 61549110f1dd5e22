"""Philox4x32-10 in plain torch, for references.

The generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011): a function of a key and a counter, with no state between calls. Words are 32-bit
values held in int64, for torch has little arithmetic on unsigned words.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10

#: The largest uniform: fp32 would round the next one to 1, whose noise is infinite.
LARGEST_UNIFORM = 1 - 2.0**-24


def _multiply(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product, in halves so that int64 holds each step."""
    low_part = multiplier * (word & 0xFFFF)
    high_part = multiplier * (word >> 16)
    high = (high_part + (low_part >> 16)) >> 16
    return high, (low_part + ((high_part & 0xFFFF) << 16)) & _WORD


def philox_4x32_10(
    key: int | Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for each counter.

    Args:
        key: 64 bits, in an int64 where it is a tensor; the low word is the first.
        counter: four int64 tensors of words, broadcast against each other.
    """
    k0, k1 = key & _WORD, (key >> 32) & _WORD
    c0, c1, c2, c3 = (c & _WORD for c in counter)
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniforms(words: Tensor) -> Tensor:
    """Words to fp32 in (0, 1): ``(word + 0.5) / 2**32``, at most ``LARGEST_UNIFORM``."""
    return ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=LARGEST_UNIFORM)
