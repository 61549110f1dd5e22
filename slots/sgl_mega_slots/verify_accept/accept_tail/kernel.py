# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernels of `accept_tail`: from the logits, in one launch or two, and from their argmax, in one."""

import triton
import triton.language as tl

from sgl_mega_slots.common.device import winner_of
from sgl_mega_slots.verify_accept.device import block_winner, last_of, simulated_length, write_accept

_UNKNOWN_VOCAB = tl.constexpr(1 << 31)  # where only the argmax is known: no id is larger than an int32


@triton.jit
def accept_from_logits(
    candidates_ptr,
    candidates_stride,
    logits_ptr,
    logits_stride,
    seq_lens_ptr,
    verify_lens_ptr,
    simulated_ptr,
    value_ptr,
    id_ptr,
    arrived_ptr,
    correct_ptr,
    bonus_ptr,
    commit_ptr,
    new_seq_ptr,
    tokens_ptr,
    tokens_stride,
    T,
    V,
    SPLITS,
    SIMULATED: tl.constexpr,
    WINNERS: tl.constexpr,
    DECIDES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program (row, split): the winner of BLOCK_V ids of one row; a dead row is not read.

    The last program of a request reduces its winners, accepts and writes. For many rows the two are launches of their
    own, WINNERS alone and then DECIDES alone with a program a request: no winner waits for its arrival to be seen.
    """
    row = tl.program_id(0).to(tl.int64) * (1 if WINNERS else T)
    split = tl.program_id(1)
    request = row // T
    position = row - request * T
    verify_len = tl.minimum(tl.load(verify_lens_ptr + request), T)
    last = (position == 0) & (split == 0) & ((verify_len <= 0) | (not WINNERS)) & DECIDES
    if WINNERS & (position < verify_len):
        group: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
        best, best_id = block_winner(logits_ptr + row * logits_stride, split * BLOCK_V, V, BLOCK_V, group)
        tl.store(value_ptr + row * SPLITS + split, best)
        tl.store(id_ptr + row * SPLITS + split, best_id)
        if DECIDES:
            last = last_of(arrived_ptr + request, verify_len * SPLITS)

    if last:
        column = tl.arange(0, BLOCK_T)
        part = tl.arange(0, BLOCK_S)
        offset = (request * T + column)[:, None] * SPLITS + part[None, :]
        there = (column < verify_len)[:, None] & (part < SPLITS)[None, :]
        # Past the L1: another program of this SM may have read the same line before it was written.
        values = tl.load(value_ptr + offset, mask=there, other=-float("inf"), cache_modifier=".cg")
        value_ids = tl.load(id_ptr + offset, mask=there, other=0, cache_modifier=".cg")
        draft = tl.load(candidates_ptr + request * candidates_stride + column + 1, mask=column < T - 1, other=-1)
        row_best, winner = winner_of(values, value_ids, 1)
        winner = tl.where(row_best > -float("inf"), winner, 0).to(tl.int64)

        # A winner is in [0, V), so a draft outside that range equals none and is a rejection.
        matches = (column + 1 < verify_len) & (draft == winner)
        correct = tl.min(tl.where(matches, BLOCK_T, column), axis=0)
        bonus = tl.sum(tl.where((column == correct) & (column < verify_len), winner, 0), axis=0)
        if SIMULATED:
            correct = simulated_length(simulated_ptr, verify_len)
        write_accept(
            request,
            verify_len,
            correct,
            bonus,
            draft,
            column,
            V,
            seq_lens_ptr,
            correct_ptr,
            bonus_ptr,
            commit_ptr,
            new_seq_ptr,
            tokens_ptr,
            tokens_stride,
            T,
        )


@triton.jit
def accept_from_tokens(
    candidates_ptr,
    candidates_stride,
    target_ptr,
    target_stride,
    seq_lens_ptr,
    verify_lens_ptr,
    simulated_ptr,
    correct_ptr,
    bonus_ptr,
    commit_ptr,
    new_seq_ptr,
    tokens_ptr,
    tokens_stride,
    T,
    SIMULATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Program b: all of request b. Nothing that it loads depends on another load."""
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_T)
    verify_len = tl.minimum(tl.load(verify_lens_ptr + request), T)
    draft = tl.load(candidates_ptr + request * candidates_stride + column + 1, mask=column < T - 1, other=-1)
    winner = tl.load(target_ptr + request * target_stride + column, mask=column < T, other=0)
    winner = tl.where((winner >= 0) & (winner < _UNKNOWN_VOCAB), winner, 0)
    matches = (column + 1 < verify_len) & (draft == winner)
    correct = tl.min(tl.where(matches, BLOCK_T, column), axis=0)
    bonus = tl.sum(tl.where((column == correct) & (column < verify_len), winner, 0), axis=0)
    if SIMULATED:
        correct = simulated_length(simulated_ptr, verify_len)
    write_accept(
        request,
        verify_len,
        correct,
        bonus,
        draft,
        column,
        _UNKNOWN_VOCAB,
        seq_lens_ptr,
        correct_ptr,
        bonus_ptr,
        commit_ptr,
        new_seq_ptr,
        tokens_ptr,
        tokens_stride,
        T,
    )
