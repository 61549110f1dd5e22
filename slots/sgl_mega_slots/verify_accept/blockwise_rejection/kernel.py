# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernels of `blockwise_rejection`: masses of each row with the decision, then the draw; or the simulated bonus.

Probabilities exist as base-2 logarithms in registers only: ``(logit - top) * scale - log2_total``, where
``scale = log2(e) / temperature``. The last program of a request to end the first launch decides, so the second reads
one row a request: that of the last token, which is a Gumbel-max draw.
"""

import triton
import triton.language as tl

from sgl_mega_slots.common.device import key_of, winner_of
from sgl_mega_slots.common.noise import exponential_of, log2_of
from sgl_mega_slots.verify_accept.device import (
    LARGEST,
    finite,
    last_of,
    log2_scale,
    simulated_length,
    usable,
    write_accept,
)

_SEED_STEP = tl.constexpr(0x632BE59BD9B4E019)
_NO_MASS = tl.constexpr(-126.0)  # log2 of the least q that a draft can come from: the least normal fp32
_COIN_UNIT = tl.constexpr(4.6566127342e-10)  # as fp32 just below 2**-31, so that no coin is 1
# log2 of p / q at most this is p = q: what is left of p - q there is rounding of the logarithms.
_EQUAL = tl.constexpr(2.0**-20)


@triton.jit
def store_mass(x, scale, max_ptr, sum_ptr, here):
    """The greatest of a block's fp32 logits, and the sum of powers of two below it. NaN counts as -inf.

    Seven instructions a logit; a limit that no logit of the block reaches is not put on each.
    """
    x = tl.maximum(x, -float("inf"))  # of NaN and a number the number
    top = tl.max(x, axis=0)
    if top > LARGEST:
        x = tl.minimum(x, LARGEST)
        top = tl.minimum(top, LARGEST)
    tl.store(max_ptr + here, top)
    tl.store(sum_ptr + here, tl.sum(tl.exp2((x - finite(top)) * scale), axis=0))


@triton.jit
def row_law(max_ptr, sum_ptr, offset, there, scale):
    """Greatest logit and log2 of the whole sum of rows [BLOCK_T], from their partials [BLOCK_T, BLOCK_S]."""
    # Past the L1: another program of this SM may have read the same line before it was written.
    tops = tl.load(max_ptr + offset, mask=there, other=-float("inf"), cache_modifier=".cg")
    sums = tl.load(sum_ptr + offset, mask=there, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, axis=1)
    total = tl.sum(sums * tl.exp2((tops - finite(top)[:, None]) * scale), axis=1)
    return top, tl.log2(tl.where(total > 0, total, 1.0))


@triton.jit
def log2_law(x, ids, top, log_total, scale):
    """log2 of the probability of ids with logits x; a row without a finite logit is certain of id 0."""
    alive = (x - finite(top)) * scale - log_total
    return tl.where(top > -float("inf"), alive, tl.where(ids == 0, 0.0, -float("inf")))


@triton.jit
def step_seed(key, offset):
    """The step's 64-bit seed."""
    return (key.to(tl.int64, bitcast=True) + offset * _SEED_STEP).to(tl.uint64, bitcast=True)


@triton.jit
def folded_word(seed, counter):
    """The first Philox words of counters, folded to 31 bits."""
    c0 = counter.to(tl.uint32)
    zero = c0 * 0
    word, _, _, _ = tl.philox(seed, c0, zero, zero, zero, 10)
    word = word.to(tl.int32, bitcast=True)
    return tl.where(word < 0, -1 - word, word)


@triton.jit
def murmur_word(state, word):
    """One word of MurmurHash3_x86_32."""
    word = word * 0xCC9E2D51
    word = ((word << 15) | (word >> 17)) * 0x1B873593
    state = state ^ word
    return ((state << 13) | (state >> 19)) * 5 + 0xE6546B64


@triton.jit
def log2_exponential(seed, request, ids, APPROXIMATE: tl.constexpr):
    """log2 of ``-log1p(-u)``, u from the hash of (seed, request, id): its negative is Gumbel noise in base 2."""
    state = murmur_word(request.to(tl.uint32) * 0, seed.to(tl.uint32))
    state = murmur_word(state, (seed >> 32).to(tl.uint32))
    state = murmur_word(state, request.to(tl.uint32))
    state = murmur_word(state, ids.to(tl.uint32)) ^ 16  # bytes hashed
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    state = state ^ (state >> 16)
    # Within 2**-24 of the definition's value, which rounds once.
    u = tl.minimum(tl.fma(state.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10), 0.99999994)
    return log2_of(exponential_of(u, APPROXIMATE), APPROXIMATE)


@triton.jit
def at(values, here):
    """The element of [BLOCK_T] values at the one column that ``here`` marks; 0 where it marks none."""
    return tl.sum(tl.where(here, values, 0), axis=0)


@triton.jit(do_not_specialize=["key_low", "key_high"])
def masses_and_decision(
    candidates_ptr,
    candidates_stride,
    target_ptr,
    target_stride,
    draft_ptr,
    draft_stride_b,
    draft_stride_g,
    target_temperatures_ptr,
    draft_temperatures_ptr,
    cutoffs_ptr,
    seq_lens_ptr,
    verify_lens_ptr,
    offset_ptr,
    target_max_ptr,
    target_sum_ptr,
    draft_max_ptr,
    draft_sum_ptr,
    id_ptr,
    arrived_ptr,
    drawn_ptr,
    forms_ptr,
    correct_ptr,
    bonus_ptr,
    commit_ptr,
    new_seq_ptr,
    tokens_ptr,
    tokens_stride,
    key_low,
    key_high,
    T,
    V,
    DRAFT_V,
    SPLITS,
    HAS_DRAFT: tl.constexpr,
    HAS_CUTOFFS: tl.constexpr,
    MASSES: tl.constexpr,
    DECIDES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program (row, split): BLOCK_V ids of a target row and of the draft row beside it. A dead row is not read.

    A greedy row leaves its winner, a sampled one maximum and sum. The last program of a request decides: it writes
    every output but a bonus that is to be drawn, and leaves what the draw needs. For many rows the two are launches of
    their own, MASSES alone and then DECIDES alone with a program a request: masses by themselves take so few registers
    that twice as many programs fit, and nobody waits for an arrival to be seen. ``drawn`` [B, 3]: the row, or -1 where
    nothing is drawn; the id that the residual leaves out, or -1; whether the draft's row is subtracted. ``forms``
    [B, 4]: top and log2 of the sum of the target's row and of the draft's.
    """
    row = tl.program_id(0).to(tl.int64) * (1 if MASSES else T)
    split = tl.program_id(1)
    request = row // T
    position = row - request * T
    verify_len = tl.minimum(tl.load(verify_lens_ptr + request), T)
    temperature = tl.load(target_temperatures_ptr + request)
    draft_temperature = tl.load(draft_temperatures_ptr + request) if HAS_DRAFT else temperature
    sampled = temperature > 0
    last = (position == 0) & (split == 0) & ((verify_len <= 0) | (not MASSES)) & DECIDES
    if MASSES & (position < verify_len):
        ids = split * BLOCK_V + tl.arange(0, BLOCK_V)
        here = row * SPLITS + split
        x = tl.load(target_ptr + row * target_stride + ids, mask=ids < V, other=-float("inf"))
        if HAS_DRAFT:
            # Asked for beside the target's. A row of draft temperature 0 has no q to sum, nor a greedy one, and behind
            # the last draft there is none.
            known = tl.where(sampled & (draft_temperature > 0) & (position < T - 1), DRAFT_V, 0)
            drafted = draft_ptr + request * draft_stride_b + position * draft_stride_g + ids
            y = tl.load(drafted, mask=ids < known, other=-float("inf"))
        if sampled:
            logits = x.to(tl.float32)
            if HAS_CUTOFFS:
                logits = tl.where(usable(x) >= tl.load(cutoffs_ptr + row), logits, -float("inf"))
            store_mass(logits, log2_scale(temperature), target_max_ptr, target_sum_ptr, here)
            if HAS_DRAFT:
                store_mass(y.to(tl.float32), log2_scale(draft_temperature), draft_max_ptr, draft_sum_ptr, here)
        else:
            logits = x.to(tl.float32)
            best, best_id = winner_of(tl.where(logits == logits, logits, -float("inf")), ids, 0)
            tl.store(target_max_ptr + here, best)
            tl.store(id_ptr + here, best_id)
        if DECIDES:
            last = last_of(arrived_ptr + request, verify_len * SPLITS)

    if last:
        column = tl.arange(0, BLOCK_T)
        part = tl.arange(0, BLOCK_S)
        rows = request * T + column
        partial = rows[:, None] * SPLITS + part[None, :]
        live = column < verify_len
        tested = live & (column < T - 1)
        draft = tl.load(candidates_ptr + request * candidates_stride + column + 1, mask=column < T - 1, other=-1)
        there = live[:, None] & (part < SPLITS)[None, :]
        drawn = tl.full((), -1, tl.int32)
        bonus = tl.full((), 0, tl.int64)
        if sampled & (verify_len > 0):
            inside = tested & (draft >= 0) & (draft < V)
            scale = log2_scale(temperature)
            x = tl.load(target_ptr + rows * target_stride + draft, mask=inside, other=-float("inf"))
            logits = usable(x)
            if HAS_CUTOFFS:
                cutoffs = tl.load(cutoffs_ptr + rows, mask=live, other=0.0)
                logits = tl.where(logits >= cutoffs, logits, -float("inf"))
            top, total = row_law(target_max_ptr, target_sum_ptr, partial, there, scale)
            log_p = log2_law(logits, draft, top, total, scale)

            # A draft certain of itself has log q = 0, and q is nothing elsewhere.
            log_q = tl.where(inside, 0.0, -float("inf"))
            certain = draft
            draft_top, draft_total = top, total
            soft = False
            if HAS_DRAFT:
                soft = draft_temperature > 0
                known = tl.where(soft, DRAFT_V, 0)
                draft_scale = log2_scale(draft_temperature)
                drafted = draft_ptr + request * draft_stride_b + column * draft_stride_g + draft
                y = tl.load(drafted, mask=inside & (draft < known), other=-float("inf"))
                draft_top, draft_total = row_law(draft_max_ptr, draft_sum_ptr, partial, there, draft_scale)
                soft_q = log2_law(usable(y), draft, draft_top, draft_total, draft_scale)
                log_q = tl.where(soft, tl.where(inside, soft_q, -float("inf")), log_q)
                certain = tl.where(soft, tl.where(draft_top > -float("inf"), -1, 0), draft)

            seed = step_seed(key_of(key_low, key_high), tl.load(offset_ptr))
            coin = tl.maximum(folded_word(seed, request * T + column), 1).to(tl.float32) * _COIN_UNIT
            possible = log_q > _NO_MASS
            gap = log_p - tl.where(possible, log_q, 0.0)
            # coin * q < p, and never false where p = q: a coin is less than 1.
            stands = possible & (coin < tl.exp2(tl.minimum(gap, 0.0)))
            stood = tl.min(tl.where(tested & stands, BLOCK_T, column), axis=0)
            here = column == stood
            if stood < verify_len:
                drawn = stood
                # A draft that cannot come from q says nothing of it: the law is p, and so it is past the last draft.
                refused = at(possible.to(tl.int32), here) > 0
                tl.store(drawn_ptr + request * 3 + 1, tl.where(refused, at(certain, here), -1).to(tl.int32))
                tl.store(
                    drawn_ptr + request * 3 + 2, (refused & soft & (at(draft_top, here) > -float("inf"))).to(tl.int32)
                )
                tl.store(forms_ptr + request * 4, at(top, here))
                tl.store(forms_ptr + request * 4 + 1, at(total, here))
                tl.store(forms_ptr + request * 4 + 2, at(draft_top, here))
                tl.store(forms_ptr + request * 4 + 3, at(draft_total, here))
            else:
                # The draft of the last live row stands: it is the last token.
                bonus = at(draft, column == stood - 1)
        else:
            value = tl.load(target_max_ptr + partial, mask=there, other=-float("inf"), cache_modifier=".cg")
            value_ids = tl.load(id_ptr + partial, mask=there, other=0, cache_modifier=".cg")
            row_best, winner = winner_of(value, value_ids, 1)
            winner = tl.where(row_best > -float("inf"), winner, 0).to(tl.int64)
            # A winner is in [0, V), so a draft outside that range equals none.
            matches = (column + 1 < verify_len) & (draft == winner)
            stood = tl.min(tl.where(matches, BLOCK_T, column), axis=0)
            bonus = at(winner, (column == stood) & live)
        tl.store(drawn_ptr + request * 3, drawn)
        write_accept(
            request,
            verify_len,
            tl.maximum(tl.minimum(stood, verify_len - 1), 0),
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


@triton.jit(do_not_specialize=["key_low", "key_high"])
def draw_last_token(
    target_ptr,
    target_stride,
    draft_ptr,
    draft_stride_b,
    draft_stride_g,
    target_temperatures_ptr,
    draft_temperatures_ptr,
    cutoffs_ptr,
    offset_ptr,
    drawn_ptr,
    forms_ptr,
    value_ptr,
    value_id_ptr,
    arrived_ptr,
    bonus_ptr,
    tokens_ptr,
    tokens_stride,
    key_low,
    key_high,
    T,
    V,
    DRAFT_V,
    BLOCKS,
    HAS_DRAFT: tl.constexpr,
    HAS_CUTOFFS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Program (b, block): the best of BLOCK_N ids for the last token of request b; the last program writes it.

    A block in which nothing is left of max(p - q, 0) keeps the best of p, as id -1 - id: it counts where no
    block has anything left.
    """
    request = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(drawn_ptr + request * 3)
    left_out = tl.load(drawn_ptr + request * 3 + 1)
    subtract = tl.load(drawn_ptr + request * 3 + 2)
    top = tl.load(forms_ptr + request * 4)
    total = tl.load(forms_ptr + request * 4 + 1)
    scale = log2_scale(tl.load(target_temperatures_ptr + request))
    seed = step_seed(key_of(key_low, key_high), tl.load(offset_ptr))
    if row >= 0:
        ids = block * BLOCK_N + tl.arange(0, BLOCK_N)
        place = request * T + row
        logits = usable(tl.load(target_ptr + place * target_stride + ids, mask=ids < V, other=-float("inf")))
        if HAS_CUTOFFS:
            logits = tl.where(logits >= tl.load(cutoffs_ptr + place), logits, -float("inf"))
        law = (logits - finite(top)) * scale - total
        if top == -float("inf"):
            law = tl.where(ids == 0, 0.0, -float("inf"))
        residual = law
        if HAS_DRAFT:  # noqa: SIM102  a constant, and a value of the device
            if subtract > 0:
                draft_top = tl.load(forms_ptr + request * 4 + 2)
                draft_total = tl.load(forms_ptr + request * 4 + 3)
                draft_scale = log2_scale(tl.load(draft_temperatures_ptr + request))
                drafted = draft_ptr + request * draft_stride_b + row * draft_stride_g + ids
                drafts = usable(tl.load(drafted, mask=ids < DRAFT_V, other=-float("inf")))
                law_q = (drafts - draft_top) * draft_scale - draft_total
                some = law > -float("inf")
                apart = tl.where(some, law, 0.0) - law_q
                left = log2_of(1.0 - tl.exp2(-tl.maximum(apart, _EQUAL)), not INTERPRETED)
                residual = tl.where(some & (apart > _EQUAL), law + left, -float("inf"))
        if left_out >= 0:
            residual = tl.where(ids == left_out, -float("inf"), residual)
        spot = request * BLOCKS + block
        best = tl.full((), -float("inf"), tl.float32)
        best_id = tl.full((), 0, tl.int32)
        if tl.max(law, axis=0) > -float("inf"):  # under a cutoff most blocks have nothing
            noise = log2_exponential(seed, request, ids, not INTERPRETED)
            best, best_id = winner_of(residual - noise, ids, 0)
            if best == -float("inf"):
                best, best_id = winner_of(law - noise, ids, 0)
                best_id = -1 - best_id
        tl.store(value_ptr + spot, best)
        tl.store(value_id_ptr + spot, best_id)

        if last_of(arrived_ptr + request, BLOCKS):
            blocks = tl.arange(0, BLOCK_P)
            there = blocks < BLOCKS
            spots = request * BLOCKS + blocks
            values = tl.load(value_ptr + spots, mask=there, other=-float("inf"), cache_modifier=".cg")
            value_ids = tl.load(value_id_ptr + spots, mask=there, other=0, cache_modifier=".cg")
            of_r, of_r_id = winner_of(tl.where(value_ids >= 0, values, -float("inf")), value_ids, 0)
            of_p, of_p_id = winner_of(tl.where(value_ids < 0, values, -float("inf")), -1 - value_ids, 0)
            token = tl.where(of_r > -float("inf"), of_r_id, tl.where(of_p > -float("inf"), of_p_id, 0))
            tl.store(bonus_ptr + request, token)
            tl.store(tokens_ptr + request * tokens_stride + row, token.to(tl.int64))


@triton.jit
def simulate(
    candidates_ptr,
    candidates_stride,
    target_ptr,
    target_stride,
    target_temperatures_ptr,
    cutoffs_ptr,
    seq_lens_ptr,
    verify_lens_ptr,
    simulated_ptr,
    seed_ptr,
    value_ptr,
    value_id_ptr,
    arrived_ptr,
    correct_ptr,
    bonus_ptr,
    commit_ptr,
    new_seq_ptr,
    tokens_ptr,
    tokens_stride,
    T,
    V,
    BLOCKS,
    HAS_CUTOFFS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Program (b, block): the best of BLOCK_N ids behind the simulated drafts of request b; the last one writes."""
    request = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    verify_len = tl.minimum(tl.load(verify_lens_ptr + request), T)
    correct = simulated_length(simulated_ptr, verify_len)
    last = (verify_len <= 0) & (block == 0)
    if verify_len > 0:
        place = request * T + correct
        temperature = tl.load(target_temperatures_ptr + request)
        ids = block * BLOCK_N + tl.arange(0, BLOCK_N)
        x = tl.load(target_ptr + place * target_stride + ids, mask=ids < V, other=-float("inf"))
        score = x.to(tl.float32)
        score = tl.where(score == score, score, -float("inf"))
        if temperature > 0:
            logits = usable(x)
            if HAS_CUTOFFS:
                logits = tl.where(logits >= tl.load(cutoffs_ptr + place), logits, -float("inf"))
            seed = tl.load(seed_ptr).to(tl.int64).to(tl.uint64, bitcast=True)
            u = folded_word(seed, request * V + ids).to(tl.float32) * _COIN_UNIT
            # As SGLang's kernel has it, term by term.
            score = logits / tl.maximum(temperature, 1e-5) - tl.log(-tl.log(u))
        best, best_id = winner_of(score, ids, 0)
        tl.store(value_ptr + request * BLOCKS + block, best)
        tl.store(value_id_ptr + request * BLOCKS + block, best_id)
        last = last_of(arrived_ptr + request, BLOCKS)

    if last:
        blocks = tl.arange(0, BLOCK_P)
        column = tl.arange(0, BLOCK_T)
        there = (blocks < BLOCKS) & (verify_len > 0)
        values = tl.load(value_ptr + request * BLOCKS + blocks, mask=there, other=-float("inf"), cache_modifier=".cg")
        value_ids = tl.load(value_id_ptr + request * BLOCKS + blocks, mask=there, other=0, cache_modifier=".cg")
        row_best, winner = winner_of(values, value_ids, 0)
        draft = tl.load(candidates_ptr + request * candidates_stride + column + 1, mask=column < T - 1, other=-1)
        write_accept(
            request,
            verify_len,
            correct,
            tl.where(row_best > -float("inf"), winner, 0).to(tl.int64),
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
