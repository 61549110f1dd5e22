# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernels of `sampling_cutoffs`: maxima of small groups of each row, then one program a row that finds the cutoff.

The k-th greatest of the maxima is no greater than the k-th greatest logit, and the maxima's masses bound a top-p
from below as well. So all that can stay is in the few groups whose maximum reaches that bound, and only they are read
again. Where they hold too much for the list, the search runs over the whole row.
"""

import triton
import triton.language as tl

from sgl_mega_slots.verify_accept.device import finite, log2_scale, usable

_LOWEST = tl.constexpr(-(1 << 31))
_HIGHEST = tl.constexpr((1 << 31) - 1)
_SLACK = tl.constexpr(2.0**-10)  # in log2, of the bound by min_p: far above rounding


@triton.jit
def clean(logits):
    """fp32 logits, NaN as -inf, at most LARGEST, no -0.0."""
    x = usable(logits)
    return tl.where(x == 0, 0.0, x)


@triton.jit
def order_of(x):
    """Integers in the order of fp32 values; its own inverse on bits."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """The fp32 value of :func:`order_of`."""
    return tl.where(order >= 0, order, order ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(x, top, scale):
    """exp((x - top) / temperature)."""
    return tl.exp2((x - top) * scale)


@triton.jit
def group_maxima(
    logits_ptr,
    logits_stride,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    verify_lens_ptr,
    max_ptr,
    sum_ptr,
    T,
    V,
    GROUPS,
    BLOCK_G: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Program (row, block): maxima of BLOCK_G groups of SIZE ids, and where top-p needs them sums of their masses.

    A row that asks for nothing is not read.
    """
    row = tl.program_id(0).to(tl.int64)
    request = row // T
    temperature = tl.load(temperatures_ptr + request)
    top_k = tl.load(top_ks_ptr + request)
    by_k = (top_k > 0) & (top_k < V)
    by_p = tl.load(top_ps_ptr + request) < 1
    asks = by_k | by_p | (tl.load(min_ps_ptr + request) > 0)
    if asks & (temperature > 0) & (row - request * T < tl.load(verify_lens_ptr + request)):
        group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
        ids = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        x = clean(tl.load(logits_ptr + row * logits_stride + ids, mask=ids < V, other=-float("inf")))
        top = tl.max(x, axis=1)
        tl.store(max_ptr + row * GROUPS + group, top, mask=group < GROUPS)
        if by_p & (by_k == 0):
            mass = tl.sum(mass_of(x, finite(top)[:, None], log2_scale(temperature)), axis=1)
            tl.store(sum_ptr + row * GROUPS + group, mass, mask=group < GROUPS)


@triton.jit
def reach(source_ptr, length, pivot, top, scale, MASSES: tl.constexpr, BLOCK: tl.constexpr):
    """Of logits at least ``pivot`` the number, or the mass; the least of them, and the greatest of the others."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    above = tl.full([BLOCK], _HIGHEST, tl.int32)
    below = tl.full([BLOCK], _LOWEST, tl.int32)
    start = 0
    while start < length:
        inside = start + lane < length
        x = clean(tl.load(source_ptr + start + lane, mask=inside, other=-float("inf")))
        order = order_of(x)
        reaches = inside & (order >= pivot)
        if MASSES:
            total += tl.where(reaches, mass_of(x, top, scale), 0.0)
        else:
            total += reaches.to(tl.float32)
        above = tl.minimum(above, tl.where(reaches, order, _HIGHEST))
        below = tl.maximum(below, tl.where(inside & (order < pivot), order, _LOWEST))
        start += BLOCK
    return tl.sum(total, axis=0), tl.min(above, axis=0), tl.max(below, axis=0)


@triton.jit
def greatest_reaching(source_ptr, length, low, wanted, top, scale, MASSES: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest logit, as an order, such that it and those above are ``wanted`` many, or have that mass.

    Each pass halves what lies between, and both ends move on to logits that occur: at most 32 passes.
    """
    high = order_of(top)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without a carry
        total, above, below = reach(source_ptr, length, middle, top, scale, MASSES, BLOCK)
        enough = total >= wanted
        high = tl.where(enough, high, tl.maximum(below, low))
        low = tl.where(enough, above, low)
    return low


@triton.jit
def search(
    source_ptr,
    length,
    top,
    scale,
    whole,
    top_k,
    top_p,
    min_p,
    by_k,
    by_p,
    by_m,
    BLOCK: tl.constexpr,
):
    """The cutoff over logits in memory. ``whole`` is the mass of all logits, read where top-k asks for nothing."""
    cutoff = tl.full((), _LOWEST, tl.int32)
    if by_k:
        cutoff = greatest_reaching(
            source_ptr, length, order_of(tl.full((), -float("inf"), tl.float32)), top_k, top, scale, False, BLOCK
        )
    if by_p:
        if by_k:
            whole, _, _ = reach(source_ptr, length, cutoff, top, scale, True, BLOCK)
        low = tl.maximum(cutoff, order_of(tl.full((), -float("inf"), tl.float32)))
        cutoff = greatest_reaching(source_ptr, length, low, top_p * whole, top, scale, True, BLOCK)
    if by_m:
        lane = tl.arange(0, BLOCK)
        least = tl.full([BLOCK], _HIGHEST, tl.int32)
        start = 0
        while start < length:
            x = clean(tl.load(source_ptr + start + lane, mask=start + lane < length, other=-float("inf")))
            kept = (mass_of(x, top, scale) >= min_p) | (x == top)
            least = tl.minimum(least, tl.where(kept & (start + lane < length), order_of(x), _HIGHEST))
            start += BLOCK
        cutoff = tl.maximum(cutoff, tl.min(least, axis=0))
    return value_of(cutoff)


@triton.jit
def by_pairs(
    source_ptr,
    length,
    top,
    scale,
    whole,
    top_k,
    top_p,
    min_p,
    by_k,
    by_p,
    by_m,
    PAIRS: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """The cutoff over at most PAIRS logits: each is compared with each."""
    lane, other = tl.arange(0, PAIRS), tl.arange(0, BLOCK_J)
    x = tl.load(source_ptr + lane, mask=lane < length, other=-float("inf"))
    greater = tl.zeros([PAIRS], tl.int32)
    mass_above = tl.zeros([PAIRS], tl.float32)
    start = 0
    while start < length:
        y = tl.load(source_ptr + start + other, mask=start + other < length, other=-float("inf"))
        less = x[None, :] < y[:, None]
        greater += tl.sum(less.to(tl.int32), axis=0)
        mass_above += tl.sum(tl.where(less, mass_of(y, top, scale)[:, None], 0.0), axis=0)
        start += BLOCK_J
    mass = mass_of(x, top, scale)
    kept = (lane < length) & ((by_k == 0) | (greater < top_k))
    if by_k:
        whole = tl.sum(tl.where(kept, mass, 0.0), axis=0)
    first = x == top
    kept = kept & ((by_p == 0) | first | (mass_above < top_p * whole))
    kept = kept & ((by_m == 0) | first | (mass >= min_p))
    return tl.min(tl.where(kept, x, float("inf")), axis=0)


@triton.jit
def find_cutoff(
    logits_ptr,
    logits_stride,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    verify_lens_ptr,
    max_ptr,
    sum_ptr,
    hits_ptr,
    list_ptr,
    cutoffs_ptr,
    T,
    V,
    GROUPS,
    SIZE: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_H: tl.constexpr,
    LIST: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_X: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Program row: bound, list of what reaches it, cutoff."""
    row = tl.program_id(0).to(tl.int64)
    request = row // T
    temperature = tl.load(temperatures_ptr + request)
    top_k = tl.load(top_ks_ptr + request)
    top_p = tl.load(top_ps_ptr + request)
    min_p = tl.load(min_ps_ptr + request)
    by_k = (top_k > 0) & (top_k < V)
    by_p = top_p < 1
    by_m = min_p > 0
    cutoff = tl.full((), -float("inf"), tl.float32)
    wanted = (by_k | by_p | by_m) & (temperature > 0)
    if wanted & (row - request * T < tl.load(verify_lens_ptr + request)):
        group = tl.arange(0, BLOCK_A)
        maxima = tl.load(max_ptr + row * GROUPS + group, mask=group < GROUPS, other=-float("inf"))
        top = tl.max(maxima, axis=0)
        if top > -float("inf"):
            scale = log2_scale(temperature)
            masses = mass_of(maxima, top, scale)
            summed = tl.where(by_p & (by_k == 0), GROUPS, 0)
            sums = tl.load(sum_ptr + row * GROUPS + group, mask=group < summed, other=0.0)
            sums = tl.where(maxima > -float("inf"), sums * masses, 0.0)
            whole = tl.sum(sums, axis=0)

            # The greatest value on a grid that what stays cannot be below; -inf where there is none.
            low = tl.min(tl.where(maxima > -float("inf"), maxima, top), axis=0)
            high = top
            bound = tl.full((), -float("inf"), tl.float32)
            if by_k | by_p:
                for step in range(STEPS):
                    value = tl.where(step == 0, low, low * 0.5 + high * 0.5)
                    reaches = maxima >= value
                    if by_k:
                        fits = tl.sum(reaches.to(tl.int32), axis=0) >= top_k
                    else:
                        # Of a group's sum, all but what SIZE - 1 logits just below the value can have is above it.
                        rest = sums - (SIZE - 1) * mass_of(value, top, scale)
                        known = tl.where(reaches, tl.maximum(masses, rest), 0.0)
                        fits = tl.sum(known, axis=0) >= top_p * whole
                    low = tl.where(fits, value, low)
                    high = tl.where(fits | (step == 0), high, value)
                    bound = tl.where(fits, value, bound)
            if by_m & (by_k == 0):
                bound = tl.maximum(bound, top + (tl.log2(tl.minimum(min_p, 1.0)) - _SLACK) / scale)

            # Groups that reach the bound, then their logits that do.
            listed = tl.full((), 0, tl.int32)
            hit = maxima >= bound
            hits = tl.sum(hit.to(tl.int32), axis=0)
            if (bound > -float("inf")) & (hits <= LIST):
                tl.store(hits_ptr + row * GROUPS + tl.cumsum(hit.to(tl.int32), axis=0) - 1, group, mask=hit)
                tl.debug_barrier()
                start = 0
                while (start < hits) & (listed <= LIST):
                    slot = start + tl.arange(0, BLOCK_H)
                    found = tl.load(hits_ptr + row * GROUPS + slot, mask=slot < hits, other=GROUPS)
                    ids = tl.reshape(found[:, None] * SIZE + tl.arange(0, SIZE)[None, :], [BLOCK_H * SIZE])
                    x = clean(tl.load(logits_ptr + row * logits_stride + ids, mask=ids < V, other=-float("inf")))
                    taken = (x >= bound) & (ids < V)
                    place = listed + tl.cumsum(taken.to(tl.int32), axis=0) - 1
                    tl.store(list_ptr + row * LIST + place, x, mask=taken & (place < LIST))
                    listed += tl.sum(taken.to(tl.int32), axis=0)
                    start += BLOCK_H
                tl.debug_barrier()
            else:
                listed = tl.full((), LIST + 1, tl.int32)

            here = list_ptr + row * LIST
            if listed <= PAIRS:
                cutoff = by_pairs(
                    here, listed, top, scale, whole, top_k, top_p, min_p, by_k, by_p, by_m, PAIRS, BLOCK_J
                )
            elif listed <= LIST:
                cutoff = search(here, listed, top, scale, whole, top_k, top_p, min_p, by_k, by_p, by_m, BLOCK_X)
            else:
                source = logits_ptr + row * logits_stride
                cutoff = search(source, V, top, scale, whole, top_k, top_p, min_p, by_k, by_p, by_m, BLOCK_X)
    tl.store(cutoffs_ptr + row, cutoff)
