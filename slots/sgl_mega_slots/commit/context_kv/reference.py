"""`context_kv` in plain torch: the definition that the kernel is compared with."""

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
    """See :class:`sgl_mega_plugin.contract.ContextKv`."""
    column = torch.arange(positions.shape[1], device=positions.device)
    slots = out_keys[0].shape[0]
    written = column < commit_lens[:, None]
    written &= (cache_locs >= 0) & (cache_locs < slots) & (cache_locs != PADDING_SLOT)
    written &= (positions >= 0) & (positions < cos_sin.shape[0])

    rows = written.flatten().nonzero().squeeze(1)
    locations, table = cache_locs.flatten()[rows], cos_sin[positions.flatten()[rows]]
    for layer, (keys, values) in enumerate(zip(out_keys, out_values, strict=True)):
        keys[locations] = rope(rms_norm(projected_kv[rows, layer, 0], k_norm_weights[layer], eps), table)
        values[locations] = projected_kv[rows, layer, 1]


def rms_norm(keys: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``keys / sqrt(mean(keys**2) + eps) * weight`` over the last axis, in fp32, rounded to the keys' dtype.

    The sum of squares and the root are taken in fp64, so that neither the order of the sum nor a
    device's root moves the fp32 scale.
    """
    mean = (keys.double().square().sum(-1, keepdim=True) / keys.shape[-1]).float()
    scale = (1.0 / torch.sqrt((mean + eps).double())).float()
    return (keys.float() * scale * weight.float()).to(keys.dtype)


def rope(keys: Tensor, table: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of keys [N, H, D] by table [N, D]: cos of D/2 angles, then sin."""
    cos, sin = table[:, None, :].float().chunk(2, dim=-1)
    low, high = keys.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(keys.dtype)
