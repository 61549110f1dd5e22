# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernel of `kv_staging`: a tile of staged rows by T columns, each element on its own."""

import triton
import triton.language as tl


@triton.jit
def stage_commit(
    locations_ptr,
    locations_stride,
    positions_ptr,
    positions_stride,
    commit_lens_ptr,
    out_locations_ptr,
    out_locations_stride,
    out_positions_ptr,
    out_positions_stride,
    out_commit_lens_ptr,
    B,
    M,
    T,
    PADDING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    column = tl.arange(0, BLOCK_T)[None, :]
    commit = tl.load(commit_lens_ptr + row, mask=row < B, other=0)
    live = (row < B)[:, None] & (column < T)
    location = tl.load(locations_ptr + row[:, None] * locations_stride + column, mask=live, other=PADDING)
    position = tl.load(positions_ptr + row[:, None] * positions_stride + column, mask=live, other=0)

    written = (row < M)[:, None] & (column < T)
    tl.store(out_locations_ptr + row[:, None] * out_locations_stride + column, location, mask=written)
    tl.store(out_positions_ptr + row[:, None] * out_positions_stride + column, position, mask=written)
    tl.store(out_commit_lens_ptr + row, tl.minimum(tl.maximum(commit, 0), T), mask=row < M)
