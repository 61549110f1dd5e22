# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernels of `blockwise_rejection`: partials of each row, the decision with the draw, the bookkeeping.

Probabilities exist as base-2 logarithms in registers only: ``(logit - top) * scale - log2_total``, where
``scale = log2(e) / temperature``. Every program of the second launch reduces its request's partials and
decides by itself, so no launch between them is needed. The last token is a Gumbel-max draw over the
one row that the decision selects.
"""

import triton
import triton.language as tl

from sgl_mega_slots.common.device import gumbel_of, key_of, winner_of

_LOG2_E = tl.constexpr(1.4426950408889634)
_LARGEST = tl.constexpr(1e30)  # logits above it count as it: times the largest scale it is still finite
_LARGEST_SCALE = tl.constexpr(1e8)  # of a temperature of 1.4e-8
_SEED_STEP = tl.constexpr(0x632BE59BD9B4E019)
_NO_MASS = tl.constexpr(-126.0)  # log2 of the least q that a draft can come from: the least normal fp32
_COIN_UNIT = tl.constexpr(4.6566127342e-10)  # as fp32 just below 2**-31, so that no coin is 1
# log2 of p / q at most this is p = q: what is left of p - q there is rounding of the logarithms.
_EQUAL = tl.constexpr(2.0**-20)


@triton.jit
def usable(logits):
    """fp32 logits, NaN as -inf, at most _LARGEST."""
    x = logits.to(tl.float32)
    return tl.where(x == x, tl.minimum(x, _LARGEST), -float("inf"))


@triton.jit
def log2_scale(temperature):
    """``log2(e) / temperature``, finite and positive; of temperature 1 where there is none."""
    scale = tl.div_rn(tl.full((), _LOG2_E, tl.float32), tl.where(temperature > 0, temperature, 1.0))
    return tl.minimum(tl.maximum(scale, 1e-30), _LARGEST_SCALE)


@triton.jit
def finite(top):
    """A row's greatest logit, 0 where the row has none."""
    return tl.where(top > -float("inf"), top, 0.0)


@triton.jit
def store_mass(x, scale, max_ptr, sum_ptr, here):
    """The greatest of a block's logits, and the sum of powers of two below it."""
    top = tl.max(x, axis=0)
    tl.store(max_ptr + here, top)
    tl.store(sum_ptr + here, tl.sum(tl.exp2((x - finite(top)) * scale), axis=0))


@triton.jit
def row_partials(
    target_ptr,
    target_stride,
    draft_ptr,
    draft_stride_b,
    draft_stride_g,
    target_temperatures_ptr,
    draft_temperatures_ptr,
    verify_lens_ptr,
    target_max_ptr,
    target_sum_ptr,
    draft_max_ptr,
    draft_sum_ptr,
    id_ptr,
    T,
    V,
    DRAFT_V,
    SPLITS,
    HAS_DRAFT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (row, split): BLOCK_V ids of a target row and of the draft row beside it. A dead row is not read.

    A greedy row leaves its winner, a sampled one maximum and sum.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    request = row // T
    position = row - request * T
    if position < tl.load(verify_lens_ptr + request):
        temperature = tl.load(target_temperatures_ptr + request)
        ids = split * BLOCK_V + tl.arange(0, BLOCK_V)
        here = row * SPLITS + split
        x = tl.load(target_ptr + row * target_stride + ids, mask=ids < V, other=-float("inf"))
        if temperature > 0:
            if HAS_DRAFT:
                draft_temperature = tl.load(draft_temperatures_ptr + request)
                # A row of draft temperature 0 has no q to sum, and behind the last draft there is none.
                known = tl.where((draft_temperature > 0) & (position < T - 1), DRAFT_V, 0)
                drafted = draft_ptr + request * draft_stride_b + position * draft_stride_g + ids
                y = tl.load(drafted, mask=ids < known, other=-float("inf"))
                store_mass(usable(y), log2_scale(draft_temperature), draft_max_ptr, draft_sum_ptr, here)
            store_mass(usable(x), log2_scale(temperature), target_max_ptr, target_sum_ptr, here)
        else:
            logits = x.to(tl.float32)
            best, best_id = winner_of(tl.where(logits == logits, logits, -float("inf")), ids, 0)
            tl.store(target_max_ptr + here, best)
            tl.store(id_ptr + here, best_id)


@triton.jit
def row_law(max_ptr, sum_ptr, offset, there, scale):
    """Greatest logit and log2 of the whole sum of rows [BLOCK_T], from their partials [BLOCK_T, BLOCK_S]."""
    tops = tl.load(max_ptr + offset, mask=there, other=-float("inf"))
    sums = tl.load(sum_ptr + offset, mask=there, other=0.0)
    top = tl.max(tops, axis=1)
    total = tl.sum(sums * tl.exp2((tops - finite(top)[:, None]) * scale), axis=1)
    return top, tl.log2(tl.where(total > 0, total, 1.0))


@triton.jit
def log2_law(x, ids, top, log_total, scale):
    """log2 of the probability of ids with logits x; a row without a finite logit is certain of id 0."""
    alive = (x - finite(top)) * scale - log_total
    return tl.where(top > -float("inf"), alive, tl.where(ids == 0, 0.0, -float("inf")))


@triton.jit
def coins(key, offset, first, column):
    """Coins in (0, 1) of a request's drafts, whose first has number ``first`` in the batch."""
    seed = (key.to(tl.int64, bitcast=True) + offset * _SEED_STEP).to(tl.uint64, bitcast=True)
    c0 = (first + column).to(tl.uint32)
    zero = c0 * 0
    word, _, _, _ = tl.philox(seed, c0, zero, zero, zero, 10)
    word = word.to(tl.int32, bitcast=True)
    folded = tl.where(word < 0, -1 - word, word)
    return tl.maximum(folded, 1).to(tl.float32) * _COIN_UNIT


@triton.jit
def murmur_word(state, word):
    """One word of MurmurHash3_x86_32."""
    word = word * 0xCC9E2D51
    word = ((word << 15) | (word >> 17)) * 0x1B873593
    state = state ^ word
    return ((state << 13) | (state >> 19)) * 5 + 0xE6546B64


@triton.jit
def noise_of(key, offset, request, ids):
    """Gumbel noise of ids, from the hash of (seed, request, id)."""
    zero = ids.to(tl.uint32) * 0
    seed = (key.to(tl.int64, bitcast=True) + offset * _SEED_STEP).to(tl.uint64, bitcast=True)
    state = murmur_word(zero, zero + seed.to(tl.uint32))
    state = murmur_word(state, zero + (seed >> 32).to(tl.uint32))
    state = murmur_word(state, zero + request.to(tl.uint32))
    state = murmur_word(state, ids.to(tl.uint32)) ^ 16  # bytes hashed
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    state = state ^ (state >> 16)
    # Both halves are exact in fp32, so their sum rounds once.
    high = (state >> 16).to(tl.int32).to(tl.float32) * 1.52587890625e-05
    low = ((state & 0xFFFF).to(tl.int32).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return gumbel_of(tl.minimum(high + low, 0.99999994))


@triton.jit
def at(values, here):
    """The element of [BLOCK_T] values at the one column that ``here`` marks."""
    return tl.sum(tl.where(here, values, 0), axis=0)


@triton.jit
def keep_best(score, ids, value_ptr, value_id_ptr, spot):
    """Store a block's best score and its id."""
    best, best_id = winner_of(score, ids, 0)
    tl.store(value_ptr + spot, best)
    tl.store(value_id_ptr + spot, best_id)


@triton.jit(do_not_specialize=["key_low", "key_high"])
def decide_and_draw(
    candidates_ptr,
    candidates_stride,
    target_ptr,
    target_stride,
    draft_ptr,
    draft_stride_b,
    draft_stride_g,
    target_temperatures_ptr,
    draft_temperatures_ptr,
    verify_lens_ptr,
    offset_ptr,
    target_max_ptr,
    target_sum_ptr,
    draft_max_ptr,
    draft_sum_ptr,
    id_ptr,
    stood_ptr,
    last_ptr,
    value_ptr,
    value_id_ptr,
    values_stride,
    key_low,
    key_high,
    T,
    V,
    DRAFT_V,
    SPLITS,
    BLOCKS,
    HAS_DRAFT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (b, block): how many of request b's drafts stand, and the best of BLOCK_N ids for its last token.

    Block 0 stores the decision: ``stood``, and the last token or -1 where it is to be drawn. A block keeps its
    best id of max(p - q, 0) and of p, for the first may have nothing left in any block.
    """
    request = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    verify_len = tl.minimum(tl.load(verify_lens_ptr + request), T)
    temperature = tl.load(target_temperatures_ptr + request)
    sampled = temperature > 0
    if (verify_len > 0) & (sampled | (block == 0)):
        column = tl.arange(0, BLOCK_T)
        split = tl.arange(0, BLOCK_S)
        row = request * T + column
        partial = row[:, None] * SPLITS + split[None, :]
        live = column < verify_len
        tested = live & (column < T - 1)
        draft = tl.load(candidates_ptr + request * candidates_stride + column + 1, mask=tested, other=-1)
        there = live[:, None] & (split < SPLITS)[None, :]
        if sampled:
            key, offset = key_of(key_low, key_high), tl.load(offset_ptr)
            inside = tested & (draft >= 0) & (draft < V)
            scale = log2_scale(temperature)
            x = tl.load(target_ptr + row * target_stride + draft, mask=inside, other=-float("inf"))
            top, total = row_law(target_max_ptr, target_sum_ptr, partial, there, scale)
            log_p = log2_law(usable(x), draft, top, total, scale)

            # A draft certain of itself has log q = 0, and q is nothing elsewhere.
            log_q = tl.where(inside, 0.0, -float("inf"))
            certain = draft
            if HAS_DRAFT:
                draft_temperature = tl.load(draft_temperatures_ptr + request)
                soft = draft_temperature > 0
                known = tl.where(soft, DRAFT_V, 0)
                draft_scale = log2_scale(draft_temperature)
                drafted = draft_ptr + request * draft_stride_b + column * draft_stride_g + draft
                y = tl.load(drafted, mask=inside & (draft < known), other=-float("inf"))
                draft_top, draft_total = row_law(draft_max_ptr, draft_sum_ptr, partial, there, draft_scale)
                soft_q = log2_law(usable(y), draft, draft_top, draft_total, draft_scale)
                log_q = tl.where(soft, tl.where(inside, soft_q, -float("inf")), log_q)
                certain = tl.where(soft, tl.where(draft_top > -float("inf"), -1, 0), draft)

            possible = log_q > _NO_MASS
            gap = log_p - tl.where(possible, log_q, 0.0)
            # coin * q < p, and never false where p = q: a coin is less than 1.
            stands = possible & (coins(key, offset, request * T, column) < tl.exp2(tl.minimum(gap, 0.0)))
            stood = tl.min(tl.where(tested & stands, BLOCK_T, column), axis=0)
            if block == 0:
                tl.store(stood_ptr + request, stood)
                # Where the draft of the last live row stands, it is the last token.
                tl.store(last_ptr + request, tl.where(stood == verify_len, at(draft, column == stood - 1), -1))

            if stood < verify_len:
                here = column == stood
                ids = block * BLOCK_N + tl.arange(0, BLOCK_N)
                noise = noise_of(key, offset, request, ids) * _LOG2_E
                target_row = target_ptr + (request * T + stood) * target_stride + ids
                logits = usable(tl.load(target_row, mask=ids < V, other=-float("inf")))
                law = log2_law(logits, ids, at(top, here), at(total, here), scale)
                residual = law
                if HAS_DRAFT:
                    draft_row = draft_ptr + request * draft_stride_b + stood * draft_stride_g + ids
                    read = ids < tl.where(stood < T - 1, known, 0)
                    drafts = usable(tl.load(draft_row, mask=read, other=-float("inf")))
                    law_q = log2_law(drafts, ids, at(draft_top, here), at(draft_total, here), draft_scale)
                    some = law > -float("inf")
                    apart = tl.where(some, law, 0.0) - law_q
                    left = tl.log2(1.0 - tl.exp2(-tl.maximum(apart, _EQUAL)))
                    left = tl.where(some & (apart > _EQUAL), law + left, -float("inf"))
                    residual = tl.where(soft, left, law)
                residual = tl.where(ids == at(certain, here), -float("inf"), residual)
                # A draft that cannot come from q says nothing of it: the law is p, and so it is past the last draft.
                refused = tl.max(tl.where(here & possible, 1, 0), axis=0) > 0
                residual = tl.where(refused, residual, -float("inf"))
                spot = request * BLOCKS + block
                keep_best(residual + noise, ids, value_ptr, value_id_ptr, spot)
                keep_best(law + noise, ids, value_ptr + values_stride, value_id_ptr + values_stride, spot)
        else:
            value = tl.load(target_max_ptr + partial, mask=there, other=-float("inf"))
            value_ids = tl.load(id_ptr + partial, mask=there, other=0)
            best, winner = winner_of(value, value_ids, 1)
            winner = tl.where(best > -float("inf"), winner, 0).to(tl.int64)
            # A winner is in [0, V), so a draft outside that range equals none.
            matches = (column + 1 < verify_len) & (draft == winner)
            stood = tl.min(tl.where(matches, BLOCK_T, column), axis=0)
            tl.store(stood_ptr + request, stood)
            tl.store(last_ptr + request, at(winner, column == stood))


@triton.jit
def best_spot(value_ptr, value_id_ptr, spot, there):
    """Best value and its id over a request's blocks."""
    value = tl.load(value_ptr + spot, mask=there, other=-float("inf"))
    ids = tl.load(value_id_ptr + spot, mask=there, other=0x7FFFFFFF)
    return winner_of(value, ids, 0)


@triton.jit
def finish(
    candidates_ptr,
    candidates_stride,
    seq_lens_ptr,
    verify_lens_ptr,
    stood_ptr,
    last_ptr,
    value_ptr,
    value_id_ptr,
    values_stride,
    correct_ptr,
    bonus_ptr,
    commit_ptr,
    new_seq_ptr,
    tokens_ptr,
    tokens_stride,
    T,
    BLOCKS,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Program b: the last token of request b, and every output."""
    request = tl.program_id(0).to(tl.int64)
    verify_len = tl.minimum(tl.load(verify_lens_ptr + request), T)
    live = verify_len > 0
    stood = tl.load(stood_ptr + request, mask=live, other=0)
    last = tl.load(last_ptr + request, mask=live, other=0)
    correct = tl.where(live, tl.minimum(stood, verify_len - 1), 0)

    block = tl.arange(0, BLOCK_P)
    drawn = live & (last < 0)
    there = block < tl.where(drawn, BLOCKS, 0)
    spot = request * BLOCKS + block
    best, best_id = best_spot(value_ptr, value_id_ptr, spot, there)
    of_p, of_p_id = best_spot(value_ptr + values_stride, value_id_ptr + values_stride, spot, there)
    # Nothing left of p - q means equal laws, of which rounding refused a draft: p is right.
    left = best > -float("inf")
    token = tl.where(left | (of_p > -float("inf")), tl.where(left, best_id, of_p_id), 0)
    bonus = tl.where(drawn, token.to(tl.int64), last)
    commit = tl.where(live, correct + 1, 0)

    tl.store(correct_ptr + request, correct)
    tl.store(bonus_ptr + request, bonus)
    tl.store(commit_ptr + request, commit)
    tl.store(new_seq_ptr + request, tl.load(seq_lens_ptr + request) + commit)
    column = tl.arange(0, BLOCK_T)
    accepted = column < correct
    draft = tl.load(candidates_ptr + request * candidates_stride + column + 1, mask=accepted, other=0)
    tokens = tl.where(accepted, draft, tl.where(column == correct, bonus, 0))
    tl.store(tokens_ptr + request * tokens_stride + column, tokens, mask=column < T)
