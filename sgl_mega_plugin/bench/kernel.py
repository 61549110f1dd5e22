# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernels of the timer: one that only reads, one that does nothing. No slot uses them."""

import triton
import triton.language as tl

#: int32 elements that a program reads: eight 16-byte loads a thread of 256.
READ_BLOCK = 8192


@triton.jit
def stream_read(source_ptr, sums_ptr, BLOCK: tl.constexpr):
    """Read every element of a buffer once; the sums are written so that no load can be left out."""
    program = tl.program_id(0).to(tl.int64)
    values = tl.load(source_ptr + program * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_ptr + program, tl.sum(values, axis=0))


@triton.jit
def nothing(unused_ptr):
    """An empty kernel."""
