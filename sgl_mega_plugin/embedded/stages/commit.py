"""The embedded engine's own commit stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_mega_plugin.contract import PADDING_SLOT

_LARGEST_E4M3 = 448.0


def context_kv(
    *,
    projected_kv: Tensor,
    k_norm_weights: Tensor,
    cos_sin: Tensor,
    neox: bool,
    positions: Tensor,
    cache_locs: Tensor,
    location_map: Tensor | None,
    ring_rows: Tensor | None,
    ring_size: int,
    commit_lens: Tensor,
    eps: float,
    kv_scales: Tensor | None,
    out_keys: Sequence[Tensor],
    out_values: Sequence[Tensor],
) -> None:
    """Select the committed rows; then norm, rotate, scale and store each layer's."""
    rows, where = _committed(
        positions, cache_locs, location_map, ring_rows, ring_size, commit_lens, len(out_keys[0]), len(cos_sin)
    )
    cos, sin = cos_sin[positions.flatten()[rows]].unsqueeze(1).chunk(2, dim=-1)
    for layer, (keys, values) in enumerate(zip(out_keys, out_values, strict=True)):
        key, value = projected_kv[rows, layer, 0], projected_kv[rows, layer, 1]
        exact = key.float()
        scale = torch.rsqrt(exact.pow(2).mean(dim=-1, keepdim=True) + eps)
        normed = (exact * scale * k_norm_weights[layer].float()).to(key.dtype)
        rotated = _rotated(normed, cos, sin, neox=neox)
        if kv_scales is not None and keys.dtype != key.dtype:
            rotated = (rotated.float() / kv_scales[layer, 0]).to(key.dtype)
            value = (value.float() / kv_scales[layer, 1]).to(key.dtype)
        _put(keys, where, rotated)
        _put(values, where, value)


def _committed(
    positions: Tensor,
    cache_locs: Tensor,
    location_map: Tensor | None,
    ring_rows: Tensor | None,
    ring_size: int,
    commit_lens: Tensor,
    slots: int,
    table_rows: int,
) -> tuple[Tensor, Tensor]:
    """Indices of the rows that are written, and the slot of each."""
    columns = torch.arange(positions.shape[1], device=positions.device)
    commits = commit_lens.unsqueeze(1).clamp_max(positions.shape[1])
    kept = (columns < commits) & (cache_locs > PADDING_SLOT) & (positions >= 0) & (positions < table_rows)
    where = cache_locs
    if location_map is not None:
        kept &= cache_locs < len(location_map)
        where = location_map[torch.where(kept, cache_locs, PADDING_SLOT)].long()
    elif ring_rows is not None:
        owners = ring_rows.unsqueeze(1)
        kept &= (owners > 0) & (owners < slots) & (columns >= commits - ring_size)
        where = torch.where(kept, owners * ring_size + positions % ring_size, PADDING_SLOT)
    kept &= (where > PADDING_SLOT) & (where < slots)
    rows = kept.flatten().nonzero().squeeze(1)
    return rows, where.flatten()[rows]


def _rotated(keys: Tensor, cos: Tensor, sin: Tensor, *, neox: bool) -> Tensor:
    """The first elements of each head turned in pairs, the rest as it is."""
    half = cos.shape[-1]
    out = keys.clone()
    first, second = (slice(0, half), slice(half, 2 * half)) if neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    low, high = keys[..., first].float(), keys[..., second].float()
    out[..., first] = (low * cos - high * sin).to(keys.dtype)
    out[..., second] = (high * cos + low * sin).to(keys.dtype)
    return out


def _put(buffer: Tensor, where: Tensor, rows: Tensor) -> None:
    if buffer.dtype == torch.float8_e4m3fn:
        rows = rows.clamp(-_LARGEST_E4M3, _LARGEST_E4M3)
    rows = rows.to(buffer.dtype)
    if rows.element_size() == 1:
        buffer, rows = buffer.view(torch.uint8), rows.view(torch.uint8)
    buffer.index_copy_(0, where, rows)


def kv_staging(
    *,
    cache_locs: Tensor,
    positions: Tensor,
    commit_lens: Tensor,
    out_cache_locs: Tensor,
    out_positions: Tensor,
    out_commit_lens: Tensor,
) -> None:
    """Three copies and three fills."""
    batch, width = cache_locs.shape
    out_cache_locs[:batch].copy_(cache_locs)
    out_positions[:batch].copy_(positions)
    out_commit_lens[:batch].copy_(commit_lens.clamp(0, width))
    out_cache_locs[batch:].fill_(PADDING_SLOT)
    out_positions[batch:].zero_()
    out_commit_lens[batch:].zero_()


def staged_kv(
    *,
    projected_kv: Tensor,
    k_norm_weights: Tensor,
    cos_sin: Tensor,
    neox: bool,
    positions: Tensor,
    cache_locs: Tensor,
    location_map: Tensor | None,
    ring_rows: Tensor | None,
    ring_size: int,
    eps: float,
    kv_scales: Tensor | None,
    out_commit_lens: Tensor,
    out_keys: Sequence[Tensor],
    out_values: Sequence[Tensor],
) -> None:
    """Write, then disarm."""
    context_kv(
        projected_kv=projected_kv,
        k_norm_weights=k_norm_weights,
        cos_sin=cos_sin,
        neox=neox,
        positions=positions,
        cache_locs=cache_locs,
        location_map=location_map,
        ring_rows=ring_rows,
        ring_size=ring_size,
        commit_lens=out_commit_lens,
        eps=eps,
        kv_scales=kv_scales,
        out_keys=out_keys,
        out_values=out_values,
    )
    out_commit_lens.zero_()


def history_commit(*, tokens: Tensor, req_pool_indices: Tensor, commit_lens: Tensor, out_histories: Tensor) -> None:
    """Row by row: join, take the end, write back."""
    table_rows, size = out_histories.shape
    owners = req_pool_indices.long()
    commits = commit_lens.long().clamp(0, tokens.shape[1])
    kept = (commits > 0) & (owners >= 0) & (owners < table_rows)
    readable = torch.where(kept, owners, 0)
    joined = torch.cat([out_histories[readable], tokens.to(out_histories.dtype)], dim=1)
    columns = commits.unsqueeze(1) + torch.arange(size, device=tokens.device)
    rows = kept.nonzero().squeeze(1)
    out_histories.index_copy_(0, owners[rows], joined.gather(1, columns)[rows])
