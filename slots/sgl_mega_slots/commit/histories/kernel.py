# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernel of `histories`: a tile of requests by N ids, each element moved on its own."""

import triton
import triton.language as tl


@triton.jit
def append_committed(
    tokens_ptr,
    tokens_stride,
    pool_indices_ptr,
    commit_lens_ptr,
    histories_ptr,
    histories_stride,
    B,
    T,
    Q,
    N,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B).to(tl.int64)
    column = tl.arange(0, BLOCK_N)[None, :]
    pool_row = tl.load(pool_indices_ptr + request, mask=request < B, other=-1).to(tl.int64)
    commit = tl.minimum(tl.load(commit_lens_ptr + request, mask=request < B, other=0), T)
    written = ((commit > 0) & (pool_row >= 0) & (pool_row < Q))[:, None] & (column < N)

    # Position in the old ids followed by the committed tokens.
    source = commit[:, None] + column
    row_ptr = histories_ptr + pool_row[:, None] * histories_stride
    old = tl.load(row_ptr + source, mask=written & (source < N), other=0)
    token_ptr = tokens_ptr + request[:, None] * tokens_stride + (source - N)
    token = tl.load(token_ptr, mask=written & (source >= N), other=0)
    # A row is read whole before any of it is overwritten; no other program has it.
    tl.debug_barrier()
    tl.store(row_ptr + column, tl.where(source < N, old, token.to(old.dtype)), mask=written)
