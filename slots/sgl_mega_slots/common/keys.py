"""A 64-bit noise key as arguments of a kernel."""

from __future__ import annotations


def signed_words(key: int) -> tuple[int, int]:
    """The low and the high 32 bits as signed integers, so that a kernel sees one argument type for every key."""
    low, high = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    return _signed(low), _signed(high)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
