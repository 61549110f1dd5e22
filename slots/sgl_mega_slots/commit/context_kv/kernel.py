# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernel of `context_kv`: one program a row and layer, every head at once."""

import triton
import triton.language as tl

from sgl_mega_slots.common.device import round_to


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
    commit_lens_ptr,
    eps,
    key_ptrs,
    value_ptrs,
    out_stride_slot,
    out_stride_head,
    T,
    P,
    S,
    H: tl.constexpr,
    D: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (row, layer). Nothing of a row that is not written is read but its length and addresses.

    Compile without fused multiply-add: each product and sum is rounded on its own, as the reference's are.
    """
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    request = row // T
    column = row - request * T
    if column < tl.load(commit_lens_ptr + request):
        location = tl.load(locations_ptr + request * locations_stride + column)
        position = tl.load(positions_ptr + request * positions_stride + column)
        owned = (location >= 0) & (location < S) & (location != PADDING)
        if owned & (position >= 0) & (position < P):
            DTYPE: tl.constexpr = projected_ptr.dtype.element_ty
            HALF: tl.constexpr = D // 2
            head = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
            lane = tl.arange(0, BLOCK_D)[None, :]
            inside = (head < H) & (lane < HALF)

            k_offset = row * projected_stride_row + layer * projected_stride_layer + head * projected_stride_head + lane
            v_offset = k_offset + projected_stride_kv
            k_low = tl.load(projected_ptr + k_offset, mask=inside, other=0.0).to(tl.float32)
            k_high = tl.load(projected_ptr + k_offset + HALF, mask=inside, other=0.0).to(tl.float32)
            v_low = tl.load(projected_ptr + v_offset, mask=inside, other=0.0)
            v_high = tl.load(projected_ptr + v_offset + HALF, mask=inside, other=0.0)

            low64, high64 = k_low.to(tl.float64), k_high.to(tl.float64)
            total = tl.sum(low64 * low64 + high64 * high64, axis=1)
            mean = (total / D).to(tl.float32)
            scale = (1.0 / tl.sqrt((mean + eps).to(tl.float64))).to(tl.float32)[:, None]
            weight_ptr = norm_ptr + layer * norm_stride + lane
            weight_low = tl.load(weight_ptr, mask=lane < HALF, other=0.0).to(tl.float32)
            weight_high = tl.load(weight_ptr + HALF, mask=lane < HALF, other=0.0).to(tl.float32)
            low = round_to(k_low * scale * weight_low, DTYPE)
            high = round_to(k_high * scale * weight_high, DTYPE)

            table_ptr = cos_sin_ptr + position * cos_sin_stride + lane
            cos = tl.load(table_ptr, mask=lane < HALF, other=0.0)
            sin = tl.load(table_ptr + HALF, mask=lane < HALF, other=0.0)
            rotated_low = round_to(low * cos - high * sin, DTYPE).to(DTYPE)
            rotated_high = round_to(high * cos + low * sin, DTYPE).to(DTYPE)

            out_offset = location * out_stride_slot + head * out_stride_head + lane
            for index in tl.static_range(len(key_ptrs)):
                if layer == index:
                    tl.store(key_ptrs[index] + out_offset, rotated_low, mask=inside)
                    tl.store(key_ptrs[index] + out_offset + HALF, rotated_high, mask=inside)
                    tl.store(value_ptrs[index] + out_offset, v_low, mask=inside)
                    tl.store(value_ptrs[index] + out_offset + HALF, v_high, mask=inside)
