# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernels of the gated and the RNN head: what a step multiplies ``markov_w2`` with.

What the mixer makes of the draft's hidden states is known before the first step: one launch for all of them, kept
in fp32. A step's launch adds what depends on the token before and on the state, rounds once, and leaves the
factors [B, R] to the vocabulary's launch. It also settles that token: the words of the step before are all there.
"""

import triton
import triton.language as tl

from sgl_mega_slots.common.device import round_to
from sgl_mega_slots.draft.markov.kernel import winners_of


@triton.jit
def sigmoid_of(x):
    e = tl.exp(-tl.abs(x))  # never overflows
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def tanh_of(x):
    """Within 2**-21 of its value: the odd series below 1/4, for 1 - exp(-2x) would cancel there."""
    size = tl.abs(x)
    small = tl.minimum(size, 0.25)
    z = small * small
    series = ((((62.0 / 2835) * z - 17.0 / 315) * z + 2.0 / 15) * z - 1.0 / 3) * z
    e = tl.exp(-2.0 * size)
    y = tl.where(size < 0.25, small + small * series, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0, -y, y)


@triton.jit
def product(a, b, total, INTERPRETED: tl.constexpr):
    """``total + a @ b``, accumulated in fp32."""
    if INTERPRETED:  # it has no bf16 arithmetic
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def mixer_hidden(
    hidden_ptr,
    hidden_stride_b,
    hidden_stride_g,
    weight_ptr,
    weight_stride,
    bias_ptr,
    mixed_ptr,
    rows,
    G: tl.constexpr,
    H: tl.constexpr,
    OUT: tl.constexpr,
    COLUMN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (block of outputs, of rows): fp32 ``weight[:, COLUMN : COLUMN + H] @ hidden + bias`` [B * G, OUT]."""
    out = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    row = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    hidden_row = hidden_ptr + (row // G) * hidden_stride_b + (row % G) * hidden_stride_g
    weight_row = weight_ptr + out.to(tl.int64) * weight_stride + COLUMN
    total = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    for start in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_H)
        weight_mask = (out < OUT)[:, None] & (column < H)[None, :]
        weight = tl.load(weight_row[:, None] + column[None, :], mask=weight_mask, other=0.0)
        hidden_mask = (row < rows)[None, :] & (column < H)[:, None]
        hidden = tl.load(hidden_row[None, :] + column[:, None], mask=hidden_mask, other=0.0)
        total = product(weight, hidden, total, INTERPRETED)
    if HAS_BIAS:
        total += tl.load(bias_ptr + out, mask=out < OUT, other=0.0).to(tl.float32)[:, None]
    place = mixed_ptr + (row * OUT)[None, :] + out[:, None]
    tl.store(place, total, mask=(row < rows)[None, :] & (out < OUT)[:, None])


@triton.jit(do_not_specialize=["step", "B"])
def mixer_step(
    anchors_ptr,
    anchors_stride,
    w1_ptr,
    w1_stride,
    weight_ptr,
    weight_stride,
    mixed_ptr,
    state_ptr,
    latent_ptr,
    tokens_ptr,
    tokens_stride,
    features_ptr,
    features_stride_b,
    features_stride_g,
    words_ptr,
    step,
    B,
    V,
    R: tl.constexpr,
    G: tl.constexpr,
    RNN: tl.constexpr,
    OUT: tl.constexpr,
    COLUMN: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WRITE_FEATURES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Program (block of the rank, block of rows): factors [B, R], and of an RNN the next of two states [B, R].

    The columns of ``weight`` for the token before start at COLUMN; an RNN's for the state at 0.
    """
    out = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    row = tl.program_id(1).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    there = row < B
    own = there[None, :] & (out < R)[:, None]
    dtype: tl.constexpr = w1_ptr.dtype.element_ty
    if step == 0:
        previous = tl.load(anchors_ptr + row * anchors_stride, mask=there, other=-1)
    else:
        before = words_ptr + (step - 1) * B.to(tl.int64) * PROGRAMS
        no_wait = tl.full([], 0, tl.int32)  # a launch has ended since: all words are there
        previous, _ = winners_of(before, row, there, no_wait, PROGRAMS, BLOCK_B, BLOCK_P)
        if tl.program_id(0) == 0:
            tl.store(tokens_ptr + row * tokens_stride + step - 1, previous, mask=there)
    known = there & (previous >= 0) & (previous < V)
    w1_row = w1_ptr + previous * w1_stride
    states = B.to(tl.int64) * R
    state_row = state_ptr + (step % 2) * states + row * R

    first = tl.zeros([BLOCK_O, BLOCK_B], tl.float32)
    second = tl.zeros([BLOCK_O, BLOCK_B], tl.float32)
    third = tl.zeros([BLOCK_O, BLOCK_B], tl.float32)
    weight_row = weight_ptr + out.to(tl.int64)[:, None] * weight_stride
    part = R * weight_stride.to(tl.int64)
    for start in tl.static_range(0, R, BLOCK_R):
        rank = start + tl.arange(0, BLOCK_R)
        mask = (out < R)[:, None] & (rank < R)[None, :]
        w1 = tl.load(w1_row[None, :] + rank[:, None], mask=known[None, :] & (rank < R)[:, None], other=0.0)
        column = weight_row + COLUMN + rank[None, :]
        first = product(tl.load(column, mask=mask, other=0.0), w1, first, INTERPRETED)
        if RNN:
            second = product(tl.load(column + part, mask=mask, other=0.0), w1, second, INTERPRETED)
            third = product(tl.load(column + 2 * part, mask=mask, other=0.0), w1, third, INTERPRETED)
            state_mask = there[None, :] & (rank < R)[:, None] & (step > 0)
            state = tl.load(state_row[None, :] + rank[:, None], mask=state_mask, other=0.0)
            column = weight_row + rank[None, :]
            first = product(tl.load(column, mask=mask, other=0.0), state, first, INTERPRETED)
            second = product(tl.load(column + part, mask=mask, other=0.0), state, second, INTERPRETED)
            third = product(tl.load(column + 2 * part, mask=mask, other=0.0), state, third, INTERPRETED)

    mixed = mixed_ptr + ((row * G + step) * OUT)[None, :] + out[:, None]
    gate = round_to(first + tl.load(mixed, mask=own, other=0.0), dtype)
    gate = round_to(sigmoid_of(gate), dtype)
    latent_place = latent_ptr + (row * R)[None, :] + out[:, None]
    own_w1 = tl.load(w1_row[None, :] + out[:, None], mask=own & known[None, :], other=0.0)
    if RNN:
        candidate = round_to(second + tl.load(mixed + R, mask=own, other=0.0), dtype)
        candidate = round_to(tanh_of(candidate), dtype)
        output = round_to(third + tl.load(mixed + 2 * R, mask=own, other=0.0), dtype)
        tl.store(latent_place, round_to(tanh_of(output), dtype).to(dtype), mask=own)
        own_state = tl.load(state_row[None, :] + out[:, None], mask=own & (step > 0), other=0.0).to(tl.float32)
        kept = round_to(gate * own_state, dtype)
        added = round_to(round_to(1.0 - gate, dtype) * candidate, dtype)
        next_row = state_ptr + ((step + 1) % 2) * states + row * R
        tl.store(next_row[None, :] + out[:, None], round_to(kept + added, dtype).to(dtype), mask=own)
    else:
        tl.store(latent_place, round_to(gate * own_w1.to(tl.float32), dtype).to(dtype), mask=own)
    if WRITE_FEATURES:
        of_step = row * features_stride_b + step.to(tl.int64) * features_stride_g
        tl.store(features_ptr + of_step[None, :] + out[:, None], own_w1, mask=own)
