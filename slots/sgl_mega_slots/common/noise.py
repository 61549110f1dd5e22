# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Triton device functions of exponential noise, for the slots that draw by the greatest of a row."""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

_LN_2 = tl.constexpr(0.6931471805599453)
_SMALL = tl.constexpr(0.125)


@triton.jit
def log2_of(x, APPROXIMATE: tl.constexpr):  # noqa: N803
    """Logarithm in base 2; with lg2.approx within 2**-22: absolute for x in (1/2, 2), relative elsewhere."""
    return libdevice.fast_log2f(x) if APPROXIMATE else tl.log2(x)


@triton.jit
def exponential_of(u, APPROXIMATE: tl.constexpr):  # noqa: N803
    """``-log1p(-u)`` of fp32 uniforms in (0, 1), at most 1 - 2**-24; relative error at most 2**-19.5.

    Below 1/8 a polynomial, minimax for the relative error, 2**-26: that is where the noise is that wins. Above it
    ``1 - u`` loses 2**-25 and the logarithm is at least 0.19.
    """
    p = tl.fma(u, 0.2628692090511322, 0.24270178377628326)
    p = tl.fma(p, u, 0.33366885781288147)
    p = tl.fma(p, u, 0.4999946653842926)
    p = tl.fma(p, u, 1.0)
    return tl.where(u < _SMALL, u * p, log2_of(1.0 - u, APPROXIMATE) * -_LN_2)
