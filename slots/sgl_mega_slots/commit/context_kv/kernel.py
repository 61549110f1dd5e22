# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernel of `context_kv` and `deferred_kv`: one program a row and layer, every head at once."""

import triton
import triton.language as tl

from sgl_mega_slots.common.device import round_to
from sgl_mega_slots.common.fp8 import round_to_fp8


@triton.jit
def stored(x, scale, DTYPE: tl.constexpr, KV: tl.constexpr, SCALED: tl.constexpr):
    """fp32 values that are numbers of DTYPE, as the cache holds them."""
    if KV == DTYPE:
        y = x.to(DTYPE)
    else:
        if SCALED:
            x = round_to(tl.div_rn(x, scale), DTYPE)
        y = round_to_fp8(x, KV)
    return y


@triton.jit
def mean_of(total, D: tl.constexpr):
    """fp64 sums over D elements, divided and rounded to fp32."""
    if D & (D - 1) == 0:  # noqa: SIM108 - only one side is compiled
        mean = total * (1.0 / D)  # exact, without the chain of a division
    else:
        mean = total / D
    return mean.to(tl.float32)


@triton.jit
def reciprocal_root(x):
    """``1 / sqrt(x)`` of normal fp32 values, rounded from one that is right to 2**-50.

    Two Newton steps from fp32's approximation: a shorter chain than fp64's own root and division.
    """
    start = tl.rsqrt(x)
    exact = x.to(tl.float64)
    root = start.to(tl.float64)
    root = root * (1.5 - 0.5 * exact * root * root)
    root = root * (1.5 - 0.5 * exact * root * root)
    return tl.where(x < float("inf"), root.to(tl.float32), start)


@triton.jit
def write_context_kv(
    projected_ptr,
    projected_stride_row,
    projected_stride_layer,
    projected_stride_kv,
    projected_stride_head,
    norm_ptr,
    norm_stride,
    cos_sin_ptr,
    cos_sin_stride,
    positions_ptr,
    positions_stride,
    locations_ptr,
    locations_stride,
    map_ptr,
    ring_rows_ptr,
    scales_ptr,
    scales_stride,
    commit_lens_ptr,
    arrivals_ptr,
    eps,
    key_ptrs,
    value_ptrs,
    out_stride_slot,
    out_stride_head,
    T,
    P,
    S,
    MAPPED,
    RING,
    H: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    NEOX: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_RING: tl.constexpr,
    SCALED: tl.constexpr,
    DISARM: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (row, layer). Of a row that is not written only its length, place and position are read.

    With DISARM the last program of a request to have read its commit length sets it to 0.
    Compile without fused multiply-add: each product and sum is rounded on its own, as the reference's are.
    """
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    request = row // T
    column = row - request * T
    # These loads wait for memory once, together.
    commit = tl.load(commit_lens_ptr + request)
    location = tl.load(locations_ptr + request * locations_stride + column)
    position = tl.load(positions_ptr + request * positions_stride + column)

    DTYPE: tl.constexpr = projected_ptr.dtype.element_ty
    KV: tl.constexpr = key_ptrs[0].dtype.element_ty
    HALF: tl.constexpr = D // 2
    TURNED: tl.constexpr = ROTATED // 2
    lane = tl.arange(0, BLOCK_D)[None, :]
    head = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    # Elements of a head by the pairs that turn together; behind the rotated ones any two make a pair.
    if NEOX:
        if TURNED == HALF:
            low_at = lane
            high_at = lane + HALF
        else:
            low_at = tl.where(lane < TURNED, lane, lane + TURNED)
            high_at = tl.where(lane < TURNED, lane + TURNED, lane + HALF)
    else:
        low_at = 2 * lane
        high_at = 2 * lane + 1
    weight_low = tl.load(norm_ptr + layer * norm_stride + low_at, mask=lane < HALF, other=0.0).to(tl.float32)
    weight_high = tl.load(norm_ptr + layer * norm_stride + high_at, mask=lane < HALF, other=0.0).to(tl.float32)
    k_scale = 1.0
    v_scale = 1.0
    if SCALED:
        k_scale = tl.load(scales_ptr + layer * scales_stride)
        v_scale = tl.load(scales_ptr + layer * scales_stride + 1)

    live = (column < commit) & (location >= 0) & (location != PADDING) & (position >= 0) & (position < P)
    if HAS_MAP:
        location = tl.load(map_ptr + location, mask=live & (location < MAPPED), other=-1).to(tl.int64)
    if HAS_RING:
        ring_row = tl.load(ring_rows_ptr + request)
        live &= (ring_row > 0) & (ring_row < S) & (column >= tl.minimum(commit, T) - RING)
        location = ring_row * RING + position % RING
    live &= (location >= 0) & (location < S) & (location != PADDING)

    inside = (head < H) & (lane < HALF) & live
    k_ptr = projected_ptr + row * projected_stride_row + layer * projected_stride_layer + head * projected_stride_head
    v_ptr = k_ptr + projected_stride_kv
    k_low = tl.load(k_ptr + low_at, mask=inside, other=0.0).to(tl.float32)
    k_high = tl.load(k_ptr + high_at, mask=inside, other=0.0).to(tl.float32)
    v_low = tl.load(v_ptr + low_at, mask=inside, other=0.0).to(tl.float32)
    v_high = tl.load(v_ptr + high_at, mask=inside, other=0.0).to(tl.float32)
    table_ptr = cos_sin_ptr + position * cos_sin_stride + lane
    turned = lane < TURNED
    cos = tl.load(table_ptr, mask=turned & live, other=0.0)
    sin = tl.load(table_ptr + TURNED, mask=turned & live, other=0.0)

    if DISARM:  # noqa: SIM102 - decided when compiled, the other on the device
        if commit != 0:
            tl.debug_barrier()  # every warp has its length
            arrived = tl.atomic_add(arrivals_ptr + request, 1, sem="acq_rel")
            if arrived == T * tl.num_programs(1) - 1:
                tl.store(arrivals_ptr + request, 0)
                tl.store(commit_lens_ptr + request, 0)

    if live:
        low64, high64 = k_low.to(tl.float64), k_high.to(tl.float64)
        total = tl.sum(low64 * low64 + high64 * high64, axis=1)
        scale = reciprocal_root(mean_of(total, D) + eps)[:, None]
        low = round_to(k_low * scale * weight_low, DTYPE)
        high = round_to(k_high * scale * weight_high, DTYPE)
        first = tl.where(turned, low, 0.0)
        second = tl.where(turned, high, 0.0)
        key_low = tl.where(turned, round_to(first * cos - second * sin, DTYPE), low)
        key_high = tl.where(turned, round_to(second * cos + first * sin, DTYPE), high)

        key_low = stored(key_low, k_scale, DTYPE, KV, SCALED)
        key_high = stored(key_high, k_scale, DTYPE, KV, SCALED)
        value_low = stored(v_low, v_scale, DTYPE, KV, SCALED)
        value_high = stored(v_high, v_scale, DTYPE, KV, SCALED)
        out_offset = location * out_stride_slot + head * out_stride_head
        for index in tl.static_range(len(key_ptrs)):
            if layer == index:
                tl.store(key_ptrs[index] + out_offset + low_at, key_low, mask=inside)
                tl.store(key_ptrs[index] + out_offset + high_at, key_high, mask=inside)
                tl.store(value_ptrs[index] + out_offset + low_at, value_low, mask=inside)
                tl.store(value_ptrs[index] + out_offset + high_at, value_high, mask=inside)
