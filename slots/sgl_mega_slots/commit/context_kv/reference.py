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
    """See :class:`sgl_mega_plugin.contract.ContextKv`.

    SGLang 0.5.23 departs in places that its own calls do not reach: it writes the padding slot, reads a map at a
    negative location from its end, has no bound on slots and positions, and lets two rows of a commit that is longer
    than the ring race. Its eager write to an fp8 cache, unlike its kernel, rounds a quotient by a Python number
    once more, for torch multiplies by the reciprocal.
    """
    column = torch.arange(positions.shape[1], device=positions.device)
    slots, live = slots_of(positions, cache_locs, location_map, ring_rows, ring_size)
    written = live & (column < commit_lens[:, None])
    if ring_rows is not None:
        written &= column >= commit_lens[:, None].clamp(max=positions.shape[1]) - ring_size
    written &= (slots >= 0) & (slots < out_keys[0].shape[0]) & (slots != PADDING_SLOT)
    written &= (positions >= 0) & (positions < cos_sin.shape[0])

    rows = written.flatten().nonzero().squeeze(1)
    where, table = slots.flatten()[rows], cos_sin[positions.flatten()[rows]]
    for layer, (keys, values) in enumerate(zip(out_keys, out_values, strict=True)):
        key = rope(rms_norm(projected_kv[rows, layer, 0], k_norm_weights[layer], eps), table, neox=neox)
        pair = (None, None) if kv_scales is None else kv_scales[layer]
        for buffer, row, scale in ((keys, key, pair[0]), (values, projected_kv[rows, layer, 1], pair[1])):
            store(buffer, where, row, scale)


def slots_of(
    positions: Tensor, cache_locs: Tensor, location_map: Tensor | None, ring_rows: Tensor | None, ring_size: int
) -> tuple[Tensor, Tensor]:
    """Slot of each row [B, T], and whether its location and ring are ones that a row may have."""
    live = (cache_locs >= 0) & (cache_locs != PADDING_SLOT)
    if location_map is not None:
        live &= cache_locs < len(location_map)
        return location_map[torch.where(live, cache_locs, 0)].long(), live
    if ring_rows is not None:
        ring = ring_rows[:, None]
        live &= (ring > 0) & (ring < 1 << 31)
        return torch.where(live, ring, 0) * ring_size + positions % ring_size, live
    return cache_locs, live


def rms_norm(keys: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``keys / sqrt(mean(keys**2) + eps) * weight`` over the last axis, in fp32, rounded to the keys' dtype.

    The sum of squares and the root are taken in fp64, so that neither the order of the sum nor a
    device's root moves the fp32 scale.
    """
    mean = (keys.double().square().sum(-1, keepdim=True) / keys.shape[-1]).float()
    scale = (1.0 / torch.sqrt((mean + eps).double())).float()
    return (keys.float() * scale * weight.float()).to(keys.dtype)


def rope(keys: Tensor, table: Tensor, *, neox: bool) -> Tensor:
    """Rotate the first R elements of keys [N, H, D] by table [N, R]: cos of R/2 angles, then sin.

    Pairs are (i, i + R/2), or neighbours where ``neox`` is false.
    """
    size = table.shape[-1]
    cos, sin = table[:, None, :].float().chunk(2, dim=-1)
    turned, rest = keys[..., :size].float(), keys[..., size:]
    low, high = turned.chunk(2, dim=-1) if neox else (turned[..., ::2], turned[..., 1::2])
    first, second = low * cos - high * sin, high * cos + low * sin
    pairs = torch.cat([first, second], dim=-1) if neox else torch.stack([first, second], dim=-1).flatten(-2)
    return torch.cat([pairs.to(keys.dtype), rest], dim=-1)


def store(buffer: Tensor, where: Tensor, rows: Tensor, scale: Tensor | None) -> None:
    """Put rows [N, H, D] into slots of a buffer, as its dtype holds them."""
    if buffer.dtype == rows.dtype:
        buffer[where] = rows
        return
    scaled = rows if scale is None else (rows.float() / scale).to(rows.dtype)
    if buffer.dtype == torch.float8_e4m3fn:
        scaled = scaled.clamp(-448.0, 448.0)  # some releases of torch convert what is larger to NaN
    # Indexed stores of fp8 are not implemented everywhere; of its bytes they are.
    buffer.view(torch.uint8)[where] = scaled.to(buffer.dtype).view(torch.uint8)
