# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernel of `relay`: one thread a request."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["B"])
def hand_over(
    pool_indices_ptr,
    verify_lens_ptr,
    new_lens_ptr,
    bonus_ptr,
    relay_lens_ptr,
    relay_tokens_ptr,
    next_lens_ptr,
    next_anchors_ptr,
    B,
    POOL_ROWS,
    BLOCK_B: tl.constexpr,
):
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B).to(tl.int64)
    there = request < B
    row = tl.load(pool_indices_ptr + request, mask=there, other=-1).to(tl.int64)
    live = there & (tl.load(verify_lens_ptr + request, mask=there, other=0) > 0)
    length = tl.load(new_lens_ptr + request, mask=there, other=0).to(tl.int64)
    bonus = tl.load(bonus_ptr + request, mask=there, other=0)
    written = live & (row >= 0) & (row < POOL_ROWS)
    tl.store(relay_lens_ptr + row, length, mask=written)
    tl.store(relay_tokens_ptr + row, bonus, mask=written)
    if next_lens_ptr is not None:
        tl.store(next_lens_ptr + request, tl.where(live, length, 0), mask=there)
    if next_anchors_ptr is not None:
        tl.store(next_anchors_ptr + request, tl.where(live, bonus, 0), mask=there)
