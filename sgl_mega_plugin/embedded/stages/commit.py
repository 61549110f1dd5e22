"""The embedded engine's own commit stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_mega_plugin.contract import PADDING_SLOT


def context_kv(
    *,
    projected_kv: Tensor,
    k_norm_weights: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    cache_locs: Tensor,
    commit_lens: Tensor,
    eps: float,
    out_keys: Sequence[Tensor],
    out_values: Sequence[Tensor],
) -> None:
    """Select the committed rows; then norm, rotate and store each layer's."""
    columns = torch.arange(positions.shape[1], device=positions.device)
    slots = out_keys[0].shape[0]
    kept = columns < commit_lens.unsqueeze(1)
    kept &= (cache_locs != PADDING_SLOT) & (cache_locs >= 0) & (cache_locs < slots)
    kept &= (positions >= 0) & (positions < len(cos_sin))
    rows = kept.flatten().nonzero().squeeze(1)
    where = cache_locs.flatten()[rows]
    cos, sin = cos_sin[positions.flatten()[rows]].unsqueeze(1).chunk(2, dim=-1)
    for layer, (keys, values) in enumerate(zip(out_keys, out_values, strict=True)):
        key, value = projected_kv[rows, layer, 0], projected_kv[rows, layer, 1]
        exact = key.float()
        scale = torch.rsqrt(exact.pow(2).mean(dim=-1, keepdim=True) + eps)
        normed = (exact * scale * k_norm_weights[layer].float()).to(key.dtype)
        first, second = normed.float().chunk(2, dim=-1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        keys.index_copy_(0, where, rotated.to(keys.dtype))
        values.index_copy_(0, where, value.to(values.dtype))
