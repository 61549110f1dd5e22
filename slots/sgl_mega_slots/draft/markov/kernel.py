# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernels of `markov`: one launch a step over the vocabulary, and one that ends the block.

A step's programs leave a winner each; the next launch's programs all reduce those winners to the
previous token themselves, so no launch between them is needed. Two sets of winners take turns,
for a program of a step may still read one while another writes.
"""

import triton
import triton.language as tl

from sgl_mega_slots.common.device import better_of, gumbel_of, key_of, round_to, winner_of


@triton.jit
def previous_winner(
    value_ptr, id_ptr, row, there, PROGRAMS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr
):
    """Ids [BLOCK_B] that the step before chose, from its programs' winners [B, PROGRAMS]."""
    best = tl.full([BLOCK_B], -float("inf"), tl.float32)
    best_id = tl.full([BLOCK_B], 0x7FFFFFFF, tl.int32)
    for start in range(0, PROGRAMS, BLOCK_P):
        program = start + tl.arange(0, BLOCK_P)
        offset = row[:, None] * PROGRAMS + program[None, :]
        inside = there[:, None] & (program < PROGRAMS)[None, :]
        value = tl.load(value_ptr + offset, mask=inside, other=-float("inf"))
        ids = tl.load(id_ptr + offset, mask=inside, other=0x7FFFFFFF)
        value, ids = winner_of(value, ids, 1)
        best, best_id = better_of(best, best_id, value, ids)
    return tl.where(best > -float("inf"), best_id, 0).to(tl.int64)


@triton.jit
def gumbel_noise(quad, row, step, key, offset, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr):
    """``-log(-log1p(-u))`` [BLOCK_B, BLOCK_V]; word k of quad q belongs to id 4q + k."""
    zero = tl.zeros([BLOCK_B, BLOCK_V // 4], tl.uint32)
    c0 = zero + quad.to(tl.uint32)[None, :]
    c1 = zero + row.to(tl.uint32)[:, None]
    w0, w1, w2, w3 = tl.philox(key, c0, c1, zero + step.to(tl.uint32), zero + offset.to(tl.uint32), 10)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    return gumbel_of(u)


@triton.jit(do_not_specialize=["step", "key_low", "key_high"])
def markov_step(
    base_ptr,
    base_stride_b,
    base_stride_g,
    anchors_ptr,
    w1_ptr,
    w1_stride,
    w2_ptr,
    w2_stride,
    temperatures_ptr,
    offset_ptr,
    tokens_ptr,
    tokens_stride,
    logits_ptr,
    logits_stride_b,
    logits_stride_g,
    value_ptr,
    id_ptr,
    winners_stride,
    step,
    key_low,
    key_high,
    B,
    V,
    R: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILES: tl.constexpr,
    STEP_DTYPE: tl.constexpr,
    WRITE_LOGITS: tl.constexpr,
    DOT_IN_FP32: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Program (p, block of rows): the winner of every PROGRAMS-th tile of ids, TILES of them, from tile p on."""
    program = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    there = row < B
    temperature = tl.load(temperatures_ptr + row, mask=there, other=0.0)
    sampled = temperature > 0
    any_sampled = tl.max(sampled.to(tl.int32), axis=0) > 0
    temperature = tl.where(sampled, temperature, 1.0)

    if step == 0:
        previous = tl.load(anchors_ptr + row, mask=there, other=-1)
    else:
        before = ((step - 1) % 2) * winners_stride
        previous = previous_winner(value_ptr + before, id_ptr + before, row, there, PROGRAMS, BLOCK_B, BLOCK_P)
        if program == 0:
            tl.store(tokens_ptr + row * tokens_stride + step - 1, previous, mask=there)
    known = there & (previous >= 0) & (previous < V)

    key = key_of(key_low, key_high)
    offset = tl.load(offset_ptr)
    base_row = base_ptr + row * base_stride_b + step.to(tl.int64) * base_stride_g
    logits_row = logits_ptr + row * logits_stride_b + step.to(tl.int64) * logits_stride_g
    best = tl.full([BLOCK_B], -float("inf"), tl.float32)
    best_id = tl.full([BLOCK_B], 0x7FFFFFFF, tl.int32)
    for turn in range(TILES):
        tile = program + turn * PROGRAMS
        ids = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = there[:, None] & (ids < V)[None, :]
        bias = tl.zeros([BLOCK_B, BLOCK_V], tl.float32)
        for start in tl.static_range(0, R, BLOCK_R):
            rank = start + tl.arange(0, BLOCK_R)
            w1_mask = known[:, None] & (rank < R)[None, :]
            w2_mask = (ids < V)[:, None] & (rank < R)[None, :]
            w1 = tl.load(w1_ptr + previous[:, None] * w1_stride + rank[None, :], mask=w1_mask, other=0.0)
            w2 = tl.load(w2_ptr + ids.to(tl.int64)[:, None] * w2_stride + rank[None, :], mask=w2_mask, other=0.0)
            if DOT_IN_FP32:
                w1 = w1.to(tl.float32)
                w2 = w2.to(tl.float32)
            bias = tl.dot(w1, tl.trans(w2), bias, input_precision="ieee")
        bias = round_to(bias, w1_ptr.dtype.element_ty)
        base = tl.load(base_row[:, None] + ids[None, :], mask=inside, other=0.0)
        score = round_to(base.to(tl.float32) + bias, STEP_DTYPE)
        if WRITE_LOGITS:
            tl.store(logits_row[:, None] + ids[None, :], score.to(STEP_DTYPE), mask=inside & sampled[:, None])
        if any_sampled:
            quad = tile * (BLOCK_V // 4) + tl.arange(0, BLOCK_V // 4)
            noise = gumbel_noise(quad, row, step, key, offset, BLOCK_B, BLOCK_V)
            score = tl.where(sampled[:, None], tl.div_rn(score, temperature[:, None]) + noise, score)
        score = tl.where(inside & (score == score), score, -float("inf"))
        value, value_id = winner_of(score, ids[None, :], 1)
        best, best_id = better_of(best, best_id, value, value_id)

    here = (step % 2) * winners_stride + row * PROGRAMS + program
    tl.store(value_ptr + here, best, mask=there)
    tl.store(id_ptr + here, best_id, mask=there)


@triton.jit(do_not_specialize=["step"])
def markov_finish(
    tokens_ptr,
    tokens_stride,
    value_ptr,
    id_ptr,
    winners_stride,
    step,
    B,
    PROGRAMS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Program of a block of rows: the token of the last step."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    there = row < B
    here = (step % 2) * winners_stride
    token = previous_winner(value_ptr + here, id_ptr + here, row, there, PROGRAMS, BLOCK_B, BLOCK_P)
    tl.store(tokens_ptr + row * tokens_stride + step, token, mask=there)
