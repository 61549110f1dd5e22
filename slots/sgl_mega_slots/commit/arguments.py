"""Checks that the slots of the commit stage share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_mega_plugin.contract import SlotSetup
from sgl_mega_slots.common.checks import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    require_batch,
    require_setup,
    require_tensor,
)

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_LEAST_EPS = 1e-30  # keeps what a root is taken of a normal fp32 number


def require_context(
    setup: SlotSetup,
    *,
    projected_kv: Tensor,
    k_norm_weights: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    cache_locs: Tensor,
    location_map: Tensor | None,
    ring_rows: Tensor | None,
    ring_size: int,
    kv_scales: Tensor | None,
    lens_name: str,
    commit_lens: Tensor,
    eps: float,
    out_keys: Sequence[Tensor],
    out_values: Sequence[Tensor],
) -> None:
    """Raise ValueError where an argument of a context-KV write is not the seam's."""
    batch, rows = positions.shape
    require_batch("positions", batch, setup.max_batch)
    require_setup("positions", rows, setup.gamma + 1, "T")
    if projected_kv.dim() != 5:
        raise ValueError(f"projected_kv: shape {tuple(projected_kv.shape)}; must be [B * T, L, 2, H, D]")
    _, layers, _, heads, size = projected_kv.shape
    if size % 2:
        raise ValueError(f"projected_kv: D {size}; must be even, for RoPE turns pairs")
    rotated = cos_sin.shape[-1]
    if rotated % 2 or not 2 <= rotated <= size:
        raise ValueError(f"cos_sin: R {rotated}; must be even, from 2 to D, {size}")
    if eps < _LEAST_EPS:
        raise ValueError(f"eps: {eps}; must be at least {_LEAST_EPS}, or the norm of a row of zeros is none")
    device = torch.device(setup.device).type
    for name, value, shape, dtypes in (
        ("projected_kv", projected_kv, (batch * rows, layers, 2, heads, size), FLOAT_DTYPES),
        ("k_norm_weights", k_norm_weights, (layers, size), FLOAT_DTYPES),
        ("cos_sin", cos_sin, (cos_sin.shape[0], rotated), (torch.float32,)),
        ("positions", positions, (batch, rows), (torch.int64,)),
        ("cache_locs", cache_locs, (batch, rows), (torch.int64,)),
        (lens_name, commit_lens, (batch,), (torch.int32,)),
    ):
        require_tensor(name, value, shape=shape, dtypes=dtypes, device=device)
    _require_places(location_map, ring_rows, ring_size, batch, device)
    _require_buffers(projected_kv, kv_scales, out_keys, out_values, device)


def _require_places(
    location_map: Tensor | None, ring_rows: Tensor | None, ring_size: int, batch: int, device: str
) -> None:
    if location_map is not None:
        if ring_rows is not None:
            raise ValueError("location_map, ring_rows: both are given; a pool has a map or rings, so give one of them")
        require_tensor("location_map", location_map, shape=location_map.shape[:1], dtypes=INDEX_DTYPES, device=device)
    if ring_rows is not None:
        require_tensor("ring_rows", ring_rows, shape=(batch,), dtypes=(torch.int64,), device=device)
        if ring_size < 1:
            raise ValueError(f"ring_size: {ring_size}; must be at least 1 where ring_rows is given")


def _require_buffers(
    projected_kv: Tensor,
    kv_scales: Tensor | None,
    out_keys: Sequence[Tensor],
    out_values: Sequence[Tensor],
    device: str,
) -> None:
    """Every layer's buffer has the shape, dtype and strides of the first."""
    _, layers, _, heads, size = projected_kv.shape
    for name, buffers in (("out_keys", out_keys), ("out_values", out_values)):
        if len(buffers) != layers:
            raise ValueError(f"{name}: {len(buffers)} buffers; must be {layers}, one a layer of projected_kv")
    first = out_keys[0]
    dtypes = (projected_kv.dtype, *FP8_DTYPES)
    require_tensor("out_keys[0]", first, shape=(first.shape[0], heads, size), dtypes=dtypes, device=device)
    for name, buffers in (("out_keys", out_keys), ("out_values", out_values)):
        for layer, buffer in enumerate(buffers):
            label = f"{name}[{layer}]"
            require_tensor(label, buffer, shape=tuple(first.shape), dtypes=(first.dtype,), device=device)
            if buffer.stride() != first.stride():
                raise ValueError(f"{label}: strides {buffer.stride()}; must be {first.stride()}, those of out_keys[0]")
    if kv_scales is not None:
        require_tensor("kv_scales", kv_scales, shape=(layers, 2), dtypes=(torch.float32,), device=device)
        if first.dtype not in FP8_DTYPES:
            raise ValueError(f"kv_scales: given with a {first.dtype} cache; only an fp8 cache is scaled, so pass None")
