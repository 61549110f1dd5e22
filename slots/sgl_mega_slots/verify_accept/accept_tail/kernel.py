# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernels of `accept_tail`: per-split argmax of each live row, then one program a request."""

import triton
import triton.language as tl

from sgl_mega_slots.common.device import winner_of


@triton.jit
def row_partials(
    logits_ptr,
    logits_stride,
    verify_lens_ptr,
    value_ptr,
    id_ptr,
    T,
    V,
    SPLITS,
    BLOCK_V: tl.constexpr,
):
    """Program (row, split): the winner of BLOCK_V ids of one row. A dead row is not read."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    request = row // T
    if row - request * T < tl.load(verify_lens_ptr + request):
        ids = split * BLOCK_V + tl.arange(0, BLOCK_V)
        value = tl.load(logits_ptr + row * logits_stride + ids, mask=ids < V, other=-float("inf")).to(tl.float32)
        value = tl.where(value == value, value, -float("inf"))
        best, best_id = winner_of(value, ids, 0)
        tl.store(value_ptr + row * SPLITS + split, best)
        tl.store(id_ptr + row * SPLITS + split, best_id)


@triton.jit
def accept_request(
    candidates_ptr,
    candidates_stride,
    seq_lens_ptr,
    verify_lens_ptr,
    value_ptr,
    id_ptr,
    correct_ptr,
    bonus_ptr,
    commit_ptr,
    new_seq_ptr,
    tokens_ptr,
    tokens_stride,
    T,
    SPLITS,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program b: reduce the partials of request b's rows, accept, write every output."""
    request = tl.program_id(0).to(tl.int64)
    verify_len = tl.minimum(tl.load(verify_lens_ptr + request), T)
    column = tl.arange(0, BLOCK_T)
    split = tl.arange(0, BLOCK_S)

    offset = (request * T + column)[:, None] * SPLITS + split[None, :]
    there = (column < verify_len)[:, None] & (split < SPLITS)[None, :]
    value = tl.load(value_ptr + offset, mask=there, other=-float("inf"))
    ids = tl.load(id_ptr + offset, mask=there, other=0)
    best, winner = winner_of(value, ids, 1)
    winner = tl.where(best > -float("inf"), winner, 0).to(tl.int64)

    # A winner is in [0, V), so a draft outside that range equals none and is a rejection.
    drafted = column + 1 < verify_len
    draft = tl.load(candidates_ptr + request * candidates_stride + column + 1, mask=drafted, other=-1)
    correct = tl.min(tl.where(drafted & (draft == winner), BLOCK_T, column), axis=0)
    bonus = tl.sum(tl.where(column == correct, winner, 0), axis=0)
    commit = tl.where(verify_len > 0, correct + 1, 0)

    tl.store(correct_ptr + request, correct)
    tl.store(bonus_ptr + request, bonus)
    tl.store(commit_ptr + request, commit)
    tl.store(new_seq_ptr + request, tl.load(seq_lens_ptr + request) + commit)
    tokens = tl.where(column < correct, draft, tl.where(column == correct, bonus, 0))
    tl.store(tokens_ptr + request * tokens_stride + column, tokens, mask=column < T)
