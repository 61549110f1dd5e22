"""The kernel of `scan_accept`: program b walks the rows of request b until a draft falls."""

import triton
import triton.language as tl


@triton.jit
def scan_accept(
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
    V,
    HAS_TOKENS: tl.constexpr,
    SIMULATED: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)  # 64 bits: row * stride passes 2**31 soon
    verify_len = tl.load(verify_lens_ptr + request)
    standing = verify_len > 0
    commit = tl.full((), 0, tl.int32)
    bonus = tl.full((), 0, tl.int64)
    for t in range(T):
        if HAS_TOKENS:
            winner = tl.load(target_ptr + request * target_stride + t)
            winner = tl.where((winner >= 0) & (winner < V), winner, 0)
        else:
            row_ptr = target_ptr + (request * T + t) * target_stride
            readable = tl.where(standing, V, 0)  # a row behind the first that falls is not read
            best = tl.full((), -float("inf"), tl.float32)
            winner = tl.full((), 0, tl.int32)
            for tile in range(TILES):
                ids = tile * BLOCK_V + tl.arange(0, BLOCK_V)
                value = tl.load(row_ptr + ids, mask=ids < readable, other=-float("inf")).to(tl.float32)
                value = tl.where(value == value, value, -float("inf"))
                top = tl.max(value, axis=0)
                first = tl.min(tl.where(value == top, ids, 0x7FFFFFFF), axis=0)
                winner = tl.where(top > best, first, winner)
                best = tl.maximum(best, top)
        token = tl.where(standing, winner, 0).to(tl.int64)
        tl.store(tokens_ptr + request * tokens_stride + t, token)
        bonus = tl.where(standing, token, bonus)
        commit += standing.to(tl.int32)
        asked = standing & (t + 1 < verify_len)
        draft = tl.load(candidates_ptr + request * candidates_stride + tl.where(asked, t + 1, 0))
        standing = asked & (draft == token)
    correct = tl.maximum(commit - 1, 0)
    if SIMULATED:
        correct = tl.maximum(tl.minimum(tl.load(simulated_ptr).to(tl.int64), verify_len - 1), 0).to(tl.int32)
        commit = tl.where(verify_len > 0, correct + 1, 0)
        for t in range(T):
            draft = tl.load(candidates_ptr + request * candidates_stride + tl.where(t < correct, t + 1, 0))
            known = tl.where((draft >= 0) & (draft < V), draft, 0)
            token = tl.where(t < correct, known, tl.where(t == correct, bonus, 0))
            tl.store(tokens_ptr + request * tokens_stride + t, token)
    tl.store(correct_ptr + request, correct)
    tl.store(bonus_ptr + request, bonus)
    tl.store(commit_ptr + request, commit)
    tl.store(new_seq_ptr + request, tl.load(seq_lens_ptr + request) + commit)
