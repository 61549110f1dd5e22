# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The vocabulary kernel of `markov`: all steps of a block in one launch, or one step a launch.

A step depends on the token of the step before, so programs have to agree on it. Each leaves its winner in one
64-bit word that says all: the score, so that the greatest word wins, below it the id, the lower the greater. Whoever
needs the token reads the words of that step, again while one of them is ``EMPTY``. So there is no barrier, no fence
and no second round trip. The last program empties the words for the next call.

``markov_w2`` is read once a step and is larger than an L2. Tiles come in turn forwards and backwards: a step
starts with the tiles that were read last. What does not depend on the token (``markov_w2``, base logits, noise) is
asked for before it is known; ``markov_w2`` by Triton's pipelining of the one loop over all steps' tiles, which is why
the words are read inside an ``if``: a load there is not moved ahead. The first step's factors are read before the
loop: a value that enters it by a load keeps the load's layout, with the rank contiguous, as the tensor cores take it.
Entered by a constant, the factors were transposed tile by tile in shared memory, 6 us each at 32 rows on H200.
"""

import triton
import triton.language as tl

from sgl_mega_slots.common.device import key_of, round_to
from sgl_mega_slots.common.noise import exponential_of, log2_of

#: A word that no program writes: its score would be NaN. As in ``launch.EMPTY``.
EMPTY = tl.constexpr(-(1 << 63))
#: What a launch that waits in vain prints before it fails.
WAIT = tl.constexpr("markov: the other programs of a step did not leave their winners in time")
_LOWEST = tl.constexpr(-(1 << 63) + 1)  # loses to every word
_WORD_OF_MINUS_INF = tl.constexpr(-0x7F800001 << 32)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def word_of(score, ids):
    """Scores, none of them NaN, and ids in one int64 each, in the order of the scores and then of falling ids."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is 0: equal scores have equal bits
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def winners_of(words_ptr, row, there, looks, PROGRAMS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr):
    """Ids [BLOCK_B] int64 that a step chose, as soon as all its programs left their words [B, PROGRAMS].

    Also how many looks at missing words are left; without any, the ids are none that the step chose. A thread has words
    of its own (BLOCK_B * BLOCK_P is no less than the number of threads): so what one warp saw is what all go by, and
    they leave the loop together.
    """
    best = tl.full([BLOCK_B], _LOWEST, tl.int64)
    for start in tl.static_range(0, PROGRAMS, BLOCK_P):
        program = start + tl.arange(0, BLOCK_P)
        place = words_ptr + row[:, None] * PROGRAMS + program[None, :]
        inside = there[:, None] & (program < PROGRAMS)[None, :]
        word = tl.load(place, mask=inside, other=_LOWEST, volatile=True)
        while (tl.max((word == EMPTY).to(tl.int32)) > 0) & (looks > 0):
            word = tl.load(place, mask=inside, other=_LOWEST, volatile=True)
            looks -= 1
        best = tl.maximum(best, tl.max(word, axis=1))
    ids = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    return tl.where(best >= _WORD_OF_MINUS_INF + (1 << 32), ids, 0), looks


@triton.jit
def gumbel_noise(quad, row, step, key, offset, APPROXIMATE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr):
    """``-log(-log1p(-u))`` [BLOCK_V, BLOCK_B]; word k of quad q belongs to id 4q + k."""
    zero = tl.zeros([BLOCK_B, BLOCK_V // 4], tl.uint32)
    c0 = zero + quad.to(tl.uint32)[None, :]
    c1 = zero + row.to(tl.uint32)[:, None]
    w0, w1, w2, w3 = tl.philox(key, c0, c1, zero + step.to(tl.uint32), zero + offset.to(tl.uint32), 10)
    # [BLOCK_B, BLOCK_V / 4, 2, 2]: a thread's four words stay its own until the noise is done.
    word = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # With the two logarithms noise is within 2**-17 of its value.
    noise = log2_of(exponential_of(u, APPROXIMATE), APPROXIMATE) * -_LN2
    return tl.trans(tl.reshape(noise, [BLOCK_B, BLOCK_V]))


@triton.jit
def place_of(turn, first, program, TILES: tl.constexpr, PROGRAMS: tl.constexpr):
    """How far a step is, the step, and the tile of a turn: every other step goes through the tiles backwards."""
    at = turn % TILES
    step = first + turn // TILES
    return at, step, program + tl.where(step % 2 == 0, at, TILES - 1 - at) * PROGRAMS


@triton.jit
def base_of(base_ptr, base_stride_b, base_stride_g, row, step, tile, mask, V, BLOCK_V: tl.constexpr):
    """Base logits [BLOCK_V, BLOCK_B] of a tile."""
    ids = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    place = base_ptr + (row * base_stride_b + step.to(tl.int64) * base_stride_g)[None, :] + ids[:, None]
    return tl.load(place, mask=(ids < V)[:, None] & mask[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def token_before(
    anchors_ptr,
    anchors_stride,
    words_ptr,
    words_stride,
    tokens_ptr,
    tokens_stride,
    row,
    there,
    program,
    step,
    looks,
    PROGRAMS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Ids [BLOCK_B] int64 before a step: anchors, or what the step before chose, which the first program writes."""
    if step == 0:
        previous = tl.load(anchors_ptr + row * anchors_stride, mask=there, other=-1)
    else:
        words = words_ptr + (step - 1) * words_stride
        previous, looks = winners_of(words, row, there, looks, PROGRAMS, BLOCK_B, BLOCK_P)
        if program == 0:
            tl.store(tokens_ptr + row * tokens_stride + step - 1, previous, mask=there)
    return previous, looks


@triton.jit
def factors_of(source, known, rank, features_row, leads, R: tl.constexpr, WRITE_FEATURES: tl.constexpr):
    """Factors [BLOCK_B, ranks] from each row's place, zeros for an unknown token; leading rows write them."""
    w1 = tl.load(source[:, None] + rank[None, :], mask=known[:, None] & (rank < R)[None, :], other=0.0)
    if WRITE_FEATURES:
        tl.store(features_row[:, None] + rank[None, :], w1, mask=leads[:, None] & (rank < R)[None, :])
    return w1


@triton.jit(do_not_specialize=["first", "key_low", "key_high", "B"])
def markov_steps(
    base_ptr,
    base_stride_b,
    base_stride_g,
    anchors_ptr,
    anchors_stride,
    w1_ptr,
    w1_stride,
    w2_ptr,
    w2_stride,
    latent_ptr,
    latent_stride,
    temperatures_ptr,
    offset_ptr,
    tokens_ptr,
    tokens_stride,
    logits_ptr,
    logits_stride_b,
    logits_stride_g,
    features_ptr,
    features_stride_b,
    features_stride_g,
    words_ptr,
    first,
    key_low,
    key_high,
    B,
    V,
    R: tl.constexpr,
    G: tl.constexpr,
    STEPS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILES: tl.constexpr,
    STEP_DTYPE: tl.constexpr,
    LATENT: tl.constexpr,
    WRITE_LOGITS: tl.constexpr,
    WRITE_FEATURES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    LOOKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (p, block of rows): every PROGRAMS-th tile of ids from tile p on, TILES of them, in STEPS steps.

    LATENT: the factors of ``markov_w2`` are in ``latent_ptr`` [B, R]; the mixer's launch has written them, the token
    before and the features. BLOCK_R below R: factors are read where they are used, as only an unpipelined loop may.
    """
    program = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    there = row < B
    temperature = tl.load(temperatures_ptr + row, mask=there, other=0.0)
    sampled = temperature > 0
    any_sampled = tl.max(sampled.to(tl.int32), axis=0) > 0
    temperature = tl.where(sampled, temperature, 1.0)
    key = key_of(key_low, key_high)
    offset = tl.load(offset_ptr)
    words_stride = B.to(tl.int64) * PROGRAMS

    looks = tl.full([], LOOKS, tl.int32)
    known = there
    source = latent_ptr + row * latent_stride
    if not LATENT:
        if STEPS == G:
            previous = tl.load(anchors_ptr + row * anchors_stride, mask=there, other=-1)
        else:
            previous, looks = token_before(
                anchors_ptr, anchors_stride, words_ptr, words_stride, tokens_ptr, tokens_stride,
                row, there, program, first, looks, PROGRAMS, BLOCK_B, BLOCK_P,
            )  # fmt: skip
        known = there & (previous >= 0) & (previous < V)
        source = w1_ptr + previous * w1_stride
    features_row = features_ptr + row * features_stride_b
    leads = (program == 0) & WRITE_FEATURES
    whole = tl.arange(0, BLOCK_R)
    if BLOCK_R >= R:
        of_step = features_row + first.to(tl.int64) * features_stride_g
        w1 = factors_of(source, known, whole, of_step, there & leads, R, WRITE_FEATURES)
    best = tl.full([BLOCK_V, BLOCK_B], -float("inf"), tl.float32)
    best_id = tl.full([BLOCK_V, BLOCK_B], 0x7FFFFFFF, tl.int32)
    at, step, tile = place_of(0, first, program, TILES, PROGRAMS)
    next_base = base_of(base_ptr, base_stride_b, base_stride_g, row, step, tile, there, V, BLOCK_V)
    for turn in tl.range(0, STEPS * TILES, num_stages=STAGES):
        at, step, tile = place_of(turn, first, program, TILES, PROGRAMS)
        ids = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = (ids < V)[:, None] & there[None, :]
        base = next_base
        _, later, next_tile = place_of(turn + 1, first, program, TILES, PROGRAMS)
        more = there & (turn + 1 < STEPS * TILES)
        next_base = base_of(base_ptr, base_stride_b, base_stride_g, row, later, next_tile, more, V, BLOCK_V)
        noise = tl.zeros([BLOCK_V, BLOCK_B], tl.float32)
        if any_sampled:
            quad = tile * (BLOCK_V // 4) + tl.arange(0, BLOCK_V // 4)
            noise = gumbel_noise(quad, row, step, key, offset, not INTERPRETED, BLOCK_V, BLOCK_B)

        of_step = features_row + step.to(tl.int64) * features_stride_g
        if STEPS > 1:  # noqa: SIM102 (known as it compiles: what follows is left out)
            if (at == 0) & (turn > 0):
                previous, looks = token_before(
                    anchors_ptr, anchors_stride, words_ptr, words_stride, tokens_ptr, tokens_stride,
                    row, there, program, step, looks, PROGRAMS, BLOCK_B, BLOCK_P,
                )  # fmt: skip
                known = there & (previous >= 0) & (previous < V)
                source = w1_ptr + previous * w1_stride
                if BLOCK_R >= R:
                    w1 = factors_of(source, known, whole, of_step, there & leads, R, WRITE_FEATURES)
                best = tl.full([BLOCK_V, BLOCK_B], -float("inf"), tl.float32)
                best_id = tl.full([BLOCK_V, BLOCK_B], 0x7FFFFFFF, tl.int32)

        bias = tl.zeros([BLOCK_V, BLOCK_B], tl.float32)
        for start in tl.static_range(0, R, BLOCK_R):
            rank = start + whole
            if BLOCK_R < R:
                w1 = factors_of(source, known, rank, of_step, there & leads & (at == 0), R, WRITE_FEATURES)
            w2_place = w2_ptr + ids.to(tl.int64)[:, None] * w2_stride + rank[None, :]
            w2 = tl.load(w2_place, mask=(ids < V)[:, None] & (rank < R)[None, :], other=0.0)
            if INTERPRETED:  # it has no bf16 arithmetic
                bias = tl.dot(w2.to(tl.float32), tl.trans(w1).to(tl.float32), bias, input_precision="ieee")
            else:
                bias = tl.dot(w2, tl.trans(w1), bias, input_precision="ieee")
        bias = round_to(bias, w1_ptr.dtype.element_ty)
        score = round_to(base.to(tl.float32) + bias, STEP_DTYPE)
        if WRITE_LOGITS:
            logits_row = row * logits_stride_b + step.to(tl.int64) * logits_stride_g
            logits_place = logits_ptr + logits_row[None, :] + ids[:, None]
            tl.store(logits_place, score.to(STEP_DTYPE), mask=inside & sampled[None, :], eviction_policy="evict_first")
        score = tl.where(sampled[None, :], score / temperature[None, :] + noise, score)
        score = tl.where(inside & (score == score), score, -float("inf"))
        better = (score > best) | ((score == best) & (ids[:, None] < best_id))
        best = tl.where(better, score, best)
        best_id = tl.where(better, ids[:, None], best_id)

        if at == TILES - 1:
            most = tl.max(best, axis=0)
            lowest = tl.min(tl.where(best == most[None, :], best_id, 0x7FFFFFFF), axis=0)
            place = words_ptr + step * words_stride + row * PROGRAMS + program
            tl.atomic_xchg(place, word_of(most, lowest), mask=there, sem="relaxed")

    # Of a step's programs the last one starts last: where a launch has one step, it waits for none that has not begun.
    if (program == PROGRAMS - 1) & (first + STEPS == G):
        last = words_ptr + (G - 1) * words_stride
        token, looks = winners_of(last, row, there, looks, PROGRAMS, BLOCK_B, BLOCK_P)
        tl.store(tokens_ptr + row * tokens_stride + G - 1, token, mask=there)
        # All words of the last step are here, so no program reads any of the others any more.
        column = tl.arange(0, BLOCK_P)
        for step in range(G):
            for start in tl.static_range(0, PROGRAMS, BLOCK_P):
                program_there = there[:, None] & (start + column < PROGRAMS)[None, :]
                place = words_ptr + step * words_stride + row[:, None] * PROGRAMS + start + column[None, :]
                tl.store(place, tl.full([BLOCK_B, BLOCK_P], EMPTY, tl.int64), mask=program_there)
    # After the loop: within it, an assertion would keep Triton from pipelining.
    tl.device_assert(looks > 0, WAIT)
