# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernel of `params_once`: one thread a request."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["temperatures_stride", "N", "B"])
def stage_params(
    temperatures_ptr,
    temperatures_stride,
    top_ks_ptr,
    verify_lens_ptr,
    out_temperatures_ptr,
    out_greedy_ptr,
    out_step_ptr,
    N,
    B,
    SMALLEST: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B).to(tl.int64)
    there = request < B
    live = request < N
    value = tl.load(temperatures_ptr + request * temperatures_stride, mask=live, other=1.0).to(tl.float32)
    top_k = tl.load(top_ks_ptr + request, mask=live, other=1)
    if verify_lens_ptr is not None:
        live = live & (tl.load(verify_lens_ptr + request, mask=there, other=0) > 0)
    # A comparison with NaN is false, so NaN is greedy, and the smallest temperature.
    sampled = live & (top_k > 1) & (value > 0.0)
    temperature = tl.where(live, tl.where(value > SMALLEST, value, SMALLEST), 1.0)
    tl.store(out_temperatures_ptr + request, temperature, mask=there)
    tl.store(out_greedy_ptr + request, ~sampled, mask=there)
    tl.store(out_step_ptr + request, tl.where(sampled, temperature, 0.0), mask=there)
