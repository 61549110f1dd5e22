# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Triton device functions that more than one slot calls."""

import triton
import triton.language as tl


@triton.jit
def round_to(x, DTYPE: tl.constexpr):  # noqa: N803
    """fp32 values rounded to nearest even at DTYPE, kept in fp32.

    bf16 is rounded on the bits: Triton's interpreter truncates that conversion.
    """
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        y = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    else:
        y = x.to(DTYPE).to(tl.float32)
    return y


@triton.jit
def winner_of(value, ids, AXIS: tl.constexpr):  # noqa: N803
    """Greatest value along an axis and the lowest id that holds it. No value may be NaN."""
    best = tl.max(value, axis=AXIS)
    held = tl.where(value == tl.expand_dims(best, AXIS), ids, 0x7FFFFFFF)
    return best, tl.min(held, axis=AXIS)


@triton.jit
def better_of(best, best_id, value, ids):
    """The greater of two candidates, the lower id where they are equal."""
    take = (value > best) | ((value == best) & (ids < best_id))
    return tl.where(take, value, best), tl.where(take, ids, best_id)
