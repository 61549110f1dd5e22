# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernel of `step_inputs`: a tile of requests by T columns, each element on its own."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["mask_token", "max_positions", "B"])
def fill_step_inputs(
    pool_indices_ptr,
    table_ptr,
    table_stride,
    seq_lens_ptr,
    verify_lens_ptr,
    anchors_ptr,
    relay_lens_ptr,
    relay_tokens_ptr,
    mask_token,
    max_positions,
    positions_ptr,
    positions_stride,
    locations_ptr,
    locations_stride,
    draft_ids_ptr,
    draft_ids_stride,
    used_lens_ptr,
    used_anchors_ptr,
    B,
    T,
    POOL_ROWS,
    COLUMNS,
    PADDING: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B).to(tl.int64)
    column = tl.arange(0, BLOCK_T)
    there = request < B
    if relay_lens_ptr is not None:
        # Loaded beside the lengths that say which rows are live, so that two waits do, not three.
        pool_row = tl.load(pool_indices_ptr + request, mask=there, other=-1).to(tl.int64)
        live = there & (tl.load(verify_lens_ptr + request, mask=there, other=0) > 0)
        known = (pool_row >= 0) & (pool_row < POOL_ROWS)
        start = tl.load(relay_lens_ptr + pool_row, mask=known, other=0)
        anchor = tl.load(relay_tokens_ptr + pool_row, mask=known, other=0)
        live = live & known
    else:
        live = there & (tl.load(verify_lens_ptr + request, mask=there, other=0) > 0)
        start = tl.load(seq_lens_ptr + request, mask=there, other=0).to(tl.int64)
        pool_row = tl.load(pool_indices_ptr + request, mask=there, other=-1).to(tl.int64)
        anchor = tl.load(anchors_ptr + request, mask=there, other=0)
        known = (pool_row >= 0) & (pool_row < POOL_ROWS)

    limit = tl.minimum(max_positions, COLUMNS)
    wanted = start[:, None] + column[None, :]
    inside = (live & known)[:, None] & (wanted >= 0) & (wanted < limit)
    position = tl.where(live[:, None], tl.minimum(tl.maximum(wanted, 0), limit - 1), 0)
    location = tl.load(table_ptr + pool_row[:, None] * table_stride + wanted, mask=inside, other=PADDING).to(tl.int64)

    written = there[:, None] & (column < T)[None, :]
    tl.store(positions_ptr + request[:, None] * positions_stride + column[None, :], position, mask=written)
    tl.store(locations_ptr + request[:, None] * locations_stride + column[None, :], location, mask=written)
    draft_id = tl.where(live[:, None] & (column == 0)[None, :], anchor[:, None], mask_token)
    drafted = there[:, None] & (column < T - 1)[None, :]
    tl.store(draft_ids_ptr + request[:, None] * draft_ids_stride + column[None, :], draft_id, mask=drafted)
    if used_lens_ptr is not None:
        tl.store(used_lens_ptr + request, tl.where(live, start, 0), mask=there)
    if used_anchors_ptr is not None:
        tl.store(used_anchors_ptr + request, tl.where(live, anchor, 0), mask=there)
