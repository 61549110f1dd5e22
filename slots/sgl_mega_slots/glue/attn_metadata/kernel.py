# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernel of `attn_metadata`: a request's programs walk its table row together; each sums the lengths itself."""

import triton
import triton.language as tl


@triton.jit
def _mapped(slot, map_ptr, SLOTS, PADDING: tl.constexpr):
    if map_ptr is None:
        place = slot
    else:
        place = tl.load(map_ptr + slot, mask=(slot >= 0) & (slot < SLOTS), other=PADDING).to(tl.int64)
    return tl.maximum(place, PADDING)


@triton.jit(do_not_specialize=["B", "LIMIT", "ROOM", "WINDOW_ROOM", "QUERY_ROWS", "KV_ROWS", "WINDOW"])
def fill_attention_metadata(
    pool_indices_ptr,
    table_ptr,
    table_stride,
    seq_lens_ptr,
    verify_lens_ptr,
    map_ptr,
    kv_lens_ptr,
    kv_indptr_ptr,
    qo_indptr_ptr,
    mask_indptr_ptr,
    page_table_ptr,
    page_table_stride,
    window_table_ptr,
    window_table_stride,
    kv_indices_ptr,
    window_indptr_ptr,
    window_indices_ptr,
    window_offsets_ptr,
    B,
    POOL_ROWS,
    SLOTS,
    LIMIT,
    ROOM,
    WINDOW_ROOM,
    QUERY_ROWS,
    KV_ROWS,
    WINDOW,
    PAGE_SIZE: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    chunk = tl.program_id(0)
    request = tl.program_id(1)

    # Every request's length, and again this one's as scalars, all in the first wait for memory.
    every = tl.arange(0, BLOCK_B)
    there = every < B
    rows = tl.load(pool_indices_ptr + every, mask=there, other=-1).to(tl.int64)
    verified = tl.load(verify_lens_ptr + every, mask=there, other=0)
    lengths = tl.load(seq_lens_ptr + every, mask=there, other=0).to(tl.int64)
    row = tl.load(pool_indices_ptr + request).to(tl.int64)
    live = (tl.load(verify_lens_ptr + request) > 0) & (row >= 0) & (row < POOL_ROWS)
    prefix = tl.minimum(tl.maximum(tl.load(seq_lens_ptr + request).to(tl.int64), 0), LIMIT)
    prefix = tl.where(live, prefix, 0)
    whole = tl.where(live, tl.minimum(prefix + KV_ROWS, LIMIT), 0)
    table_row_ptr = table_ptr + tl.where(live, row, 0) * table_stride

    alive = (verified > 0) & (rows >= 0) & (rows < POOL_ROWS)
    prefixes = tl.where(alive, tl.minimum(tl.maximum(lengths, 0), LIMIT), 0)
    wholes = tl.where(alive, tl.minimum(prefixes + KV_ROWS, LIMIT), 0)
    before = there & (every < request)

    start = tl.zeros((), tl.int64)
    length = whole
    if kv_indices_ptr is not None:
        start += tl.sum(tl.where(before, wholes, 0), axis=0)
        length = tl.minimum(start + whole, ROOM) - tl.minimum(start, ROOM)
        start = tl.minimum(start, ROOM)
    first_seen = tl.maximum(prefix - WINDOW, 0)
    window_start = tl.zeros((), tl.int64)
    window_length = whole - first_seen
    if window_indptr_ptr is not None:
        firsts = tl.maximum(prefixes - WINDOW, 0)
        window_start += tl.sum(tl.where(before, wholes - firsts, 0), axis=0)
        window_length = tl.minimum(window_start + window_length, WINDOW_ROOM) - tl.minimum(window_start, WINDOW_ROOM)
        window_start = tl.minimum(window_start, WINDOW_ROOM)

    if chunk == 0:
        # The same sum where the slots are not listed: only these programs need it.
        total = tl.minimum(tl.sum(tl.where(before, wholes, 0), axis=0), ROOM)
        end = tl.minimum(total + whole, ROOM)
        last = request == B - 1
        tl.store(kv_lens_ptr + request, length)
        tl.store(kv_indptr_ptr + request, total)
        tl.store(kv_indptr_ptr + B, end, mask=last)
        if qo_indptr_ptr is not None:
            tl.store(qo_indptr_ptr + request, request * QUERY_ROWS)
            tl.store(qo_indptr_ptr + B, B * QUERY_ROWS, mask=last)
        if mask_indptr_ptr is not None:
            masked = tl.sum(tl.where(before, prefixes + QUERY_ROWS, 0), axis=0)
            tl.store(mask_indptr_ptr + request, masked * QUERY_ROWS)
            tl.store(mask_indptr_ptr + B, (masked + prefix + QUERY_ROWS) * QUERY_ROWS, mask=last)
        if window_indptr_ptr is not None:
            tl.store(window_indptr_ptr + request, window_start)
            tl.store(window_indptr_ptr + B, window_start + window_length, mask=last)
        if window_offsets_ptr is not None:
            tl.store(window_offsets_ptr + request, first_seen)

    # A tile that is full is moved without a mask, which alone lets 16 bytes move at once.
    if (page_table_ptr is not None) or (window_table_ptr is not None):
        pages = tl.cdiv(length, PAGE_SIZE)
        written = tl.where(live, pages, 1)
        tile = chunk
        while tile * BLOCK_C < written:
            page = tile * BLOCK_C + tl.arange(0, BLOCK_C)
            full = (tile + 1) * BLOCK_C <= pages
            if full:
                slot = tl.load(table_row_ptr + page * PAGE_SIZE)
            else:
                slot = tl.load(table_row_ptr + page * PAGE_SIZE, mask=page < pages, other=PADDING)
            if page_table_ptr is not None:
                to = page_table_ptr + request.to(tl.int64) * page_table_stride + page
                value = tl.maximum(slot, PADDING) // PAGE_SIZE
                if full:
                    tl.store(to, value)
                else:
                    tl.store(to, value, mask=page < written)
            if window_table_ptr is not None:
                to = window_table_ptr + request.to(tl.int64) * window_table_stride + page
                place = _mapped(slot, map_ptr, tl.where(live, SLOTS, 0), PADDING)
                value = (place // PAGE_SIZE).to(tl.int32)
                if full:
                    tl.store(to, value)
                else:
                    tl.store(to, value, mask=page < written)
            tile += tl.num_programs(0)

    if (kv_indices_ptr is not None) or (window_indices_ptr is not None):
        tile = chunk
        if kv_indices_ptr is None:
            tile += (first_seen // BLOCK_C).to(tl.int32)
        while tile * BLOCK_C < whole:
            token = tile * BLOCK_C + tl.arange(0, BLOCK_C)
            if (tile + 1) * BLOCK_C <= whole:
                slot = tl.load(table_row_ptr + token)
            else:
                slot = tl.load(table_row_ptr + token, mask=token < whole, other=PADDING)
            if kv_indices_ptr is not None:
                tl.store(kv_indices_ptr + start + token, tl.maximum(slot, PADDING), mask=token < length)
            if window_indices_ptr is not None:
                behind = token - first_seen
                place = _mapped(slot, map_ptr, SLOTS, PADDING)
                tl.store(
                    window_indices_ptr + window_start + behind, place, mask=(behind >= 0) & (behind < window_length)
                )
            tile += tl.num_programs(0)
