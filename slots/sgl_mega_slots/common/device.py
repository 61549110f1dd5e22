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


@triton.jit
def gumbel_of(u):
    """``-log(-log1p(-u))`` of fp32 uniforms in (0, 1), at most 1 - 2**-24."""
    # Below 1/2: 2 atanh(s) with s = u / (2 - u) <= 1/3, whose ninth term is below 2**-27 of the first.
    # Above: 1 - u is exact in fp32.
    s = tl.div_rn(u, 2.0 - u)
    z = s * s
    p = 1.0 / 15
    p = p * z + 1.0 / 13
    p = p * z + 1.0 / 11
    p = p * z + 1.0 / 9
    p = p * z + 1.0 / 7
    p = p * z + 1.0 / 5
    p = p * z + 1.0 / 3
    p = p * z + 1.0
    exponential = tl.where(u < 0.5, 2.0 * s * p, -tl.log(1.0 - tl.maximum(u, 0.5)))
    return -tl.log(exponential)


@triton.jit
def key_of(low, high):
    """A 64-bit key from its words as :func:`sgl_mega_slots.common.keys.signed_words` gives them."""
    unsigned = low.to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | unsigned
