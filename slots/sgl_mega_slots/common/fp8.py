# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Device function that rounds to an fp8 type, the same on a GPU and in the interpreter.

On the bits: a GPU's own conversion saturates e5m2, the interpreter's does not round to nearest even.
"""

import triton
import triton.language as tl


@triton.jit
def round_to_fp8(x, KV: tl.constexpr):  # noqa: N803
    """fp32 values as KV (e4m3 or e5m2), to nearest even; e4m3 saturates at 448, e5m2 overflows to infinity."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    size = magnitude.to(tl.float32, bitcast=True)
    if KV == tl.float8e4nv:  # noqa: SIM300
        kept = tl.minimum(magnitude, 0x43E00000)  # 448
        normal = ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2**-6 the step is 2**-9, that of fp32 at 2**14.
        small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, small, normal)
    else:
        normal = ((magnitude + 0xFFFFF + ((magnitude >> 21) & 1)) >> 21) - (112 << 2)
        # Below 2**-14 the step is 2**-16, that of fp32 at 2**7.
        small = (size + 128.0).to(tl.uint32, bitcast=True) - 0x43000000
        code = tl.minimum(tl.where(size < 0.00006103515625, small, normal), 0x7C)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return ((bits >> 24) & 0x80 | code).to(tl.uint8).to(KV, bitcast=True)
