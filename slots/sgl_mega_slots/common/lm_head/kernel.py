# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernels of the LM head: programs stream tiles of the weight past a block of hidden rows; then each row's winner."""

import triton
import triton.language as tl

from sgl_mega_slots.common.device import better_of, round_to, winner_of


@triton.jit(do_not_specialize=["scale"])
def head_rows(
    hidden_ptr,
    hidden_stride_b,
    hidden_stride_t,
    hidden_first,
    weight,
    weight_stride,
    verify_lens_ptr,
    logits_ptr,
    logits_stride_b,
    logits_stride_t,
    value_ptr,
    id_ptr,
    scale,
    ROWS,
    T,
    V,
    H: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    HAS_LENS: tl.constexpr,
    SCALED: tl.constexpr,
    WRITE_LOGITS: tl.constexpr,
    WRITE_WINNERS: tl.constexpr,
    DOT_IN_FP32: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Program (block of rows, p): weight tiles p, p + PROGRAMS, ... of BLOCK_V ids against BLOCK_M rows.

    Row r is row r % T of request r // T, which begins at row ``hidden_first`` of the request's hidden states. Logits go
    to ``logits_ptr``; of each row the program's own winner goes to column p of ``value_ptr`` and ``id_ptr``. ``weight``
    is a pointer, or a descriptor of [V, H] in tiles [BLOCK_V, BLOCK_H]. A block in which ``verify_lens_ptr`` wants no
    row reads no weight and writes nothing.
    """
    STEPS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < ROWS
    request = row // T
    token = row - request * T
    if HAS_LENS:
        there = there & (token < tl.load(verify_lens_ptr + request, mask=there, other=0))
    if tl.max(there.to(tl.int32), axis=0) > 0:
        hidden_row = hidden_ptr + request * hidden_stride_b + (token + hidden_first) * hidden_stride_t
        logits_row = logits_ptr + request * logits_stride_b + token * logits_stride_t
        best = tl.full([BLOCK_M], -float("inf"), tl.float32)
        best_id = tl.full([BLOCK_M], 0x7FFFFFFF, tl.int32)
        logits = tl.zeros([BLOCK_V, BLOCK_M], tl.float32)
        # One loop over all tiles, so that the loads of a tile's start are under way while the one before it ends.
        for step in range(TILES * STEPS):
            turn = step // STEPS
            first = (program + turn * PROGRAMS) * BLOCK_V
            start = (step - turn * STEPS) * BLOCK_H
            ids = first + tl.arange(0, BLOCK_V)
            known = ids < V
            depth = start + tl.arange(0, BLOCK_H)
            h_mask = there[None, :]
            w_mask = known[:, None]
            if H % BLOCK_H != 0:
                h_mask = h_mask & (depth < H)[:, None]
                w_mask = w_mask & (depth < H)[None, :]
            h = tl.load(hidden_row[None, :] + depth[:, None], mask=h_mask, other=0.0)
            if BY_DESCRIPTOR:
                w = weight.load([first, start])
            else:
                w = tl.load(weight + ids.to(tl.int64)[:, None] * weight_stride + depth[None, :], mask=w_mask, other=0.0)
            if SCALED:
                h = round_to(h.to(tl.float32) * scale, hidden_ptr.dtype.element_ty).to(hidden_ptr.dtype.element_ty)
            if hidden_ptr.dtype.element_ty != WEIGHT_DTYPE:
                h = round_to(h.to(tl.float32), WEIGHT_DTYPE).to(WEIGHT_DTYPE)
            if DOT_IN_FP32:
                h = h.to(tl.float32)
                w = w.to(tl.float32)
            logits = tl.dot(w, h, logits, input_precision="ieee")
            if step - turn * STEPS == STEPS - 1:
                logits = round_to(logits, WEIGHT_DTYPE)
                if WRITE_LOGITS:
                    where = logits_row[None, :] + ids[:, None]
                    tl.store(where, logits.to(WEIGHT_DTYPE), mask=known[:, None] & there[None, :])
                if WRITE_WINNERS:
                    score = tl.where(known[:, None] & (logits == logits), logits, -float("inf"))
                    value, value_id = winner_of(score, ids[:, None], 0)
                    best, best_id = better_of(best, best_id, value, value_id)
                logits = tl.zeros([BLOCK_V, BLOCK_M], tl.float32)
        if WRITE_WINNERS:
            tl.store(value_ptr + row * PROGRAMS + program, best, mask=there)
            tl.store(id_ptr + row * PROGRAMS + program, best_id, mask=there)


@triton.jit
def head_tokens(
    value_ptr,
    id_ptr,
    verify_lens_ptr,
    tokens_ptr,
    tokens_stride,
    T,
    HAS_LENS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Program r: the winner of row r among its programs'; 0 where no logit is above -inf or nobody wants the row."""
    row = tl.program_id(0).to(tl.int64)
    request = row // T
    token = row - request * T
    column = tl.arange(0, BLOCK_P)
    there = column < PROGRAMS
    if HAS_LENS:
        there = there & (token < tl.load(verify_lens_ptr + request))
    value = tl.load(value_ptr + row * PROGRAMS + column, mask=there, other=-float("inf"))
    ids = tl.load(id_ptr + row * PROGRAMS + column, mask=there, other=0)
    best, winner = winner_of(value, ids, 0)
    winner = tl.where(best > -float("inf"), winner, 0)
    tl.store(tokens_ptr + request * tokens_stride + token, winner.to(tl.int64))
