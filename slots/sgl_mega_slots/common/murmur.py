"""MurmurHash3_x86_32 of whole words in plain torch, for references.

Austin Appleby's public-domain hash. Words are 32-bit values held in int64.
"""

from __future__ import annotations

from torch import Tensor

_WORD = 0xFFFFFFFF


def _rotated(word: Tensor, bits: int) -> Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _WORD


def murmur3_32(*words: Tensor) -> Tensor:
    """The hash with seed 0 of words read as little-endian bytes; broadcast against each other.

    Args:
        words: int64 tensors, of which the low 32 bits count.

    Returns:
        int64 in [0, 2**32).
    """
    state = words[0] * 0
    for word in words:
        mixed = _rotated((word & _WORD) * 0xCC9E2D51 & _WORD, 15) * 0x1B873593 & _WORD
        state = (_rotated(state ^ mixed, 13) * 5 + 0xE6546B64) & _WORD
    state = state ^ (4 * len(words))
    state = (state ^ (state >> 16)) * 0x85EBCA6B & _WORD
    state = (state ^ (state >> 13)) * 0xC2B2AE35 & _WORD
    return state ^ (state >> 16)
