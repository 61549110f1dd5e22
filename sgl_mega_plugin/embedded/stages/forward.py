"""The embedded engine's own forwards, an operator at a time; its models run a layer at a time instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def target_forward(
    *,
    input_ids: Tensor,
    positions: Tensor,
    cache_locs: Tensor,
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    embedding: Tensor,
    input_norms: Sequence[Tensor],
    qkv_weights: Sequence[Tensor],
    qkv_scales: Sequence[Tensor] | None,
    qkv_biases: Sequence[Tensor] | None,
    q_norms: Sequence[Tensor] | None,
    k_norms: Sequence[Tensor] | None,
    output_weights: Sequence[Tensor],
    output_scales: Sequence[Tensor] | None,
    mlp_norms: Sequence[Tensor],
    gate_up_weights: Sequence[Tensor],
    gate_up_scales: Sequence[Tensor] | None,
    down_weights: Sequence[Tensor],
    down_scales: Sequence[Tensor] | None,
    final_norm: Tensor,
    lm_head_weight: Tensor,
    cos_sin: Tensor,
    eps: float,
    taps: Sequence[int],
    out_keys: Sequence[Tensor],
    out_values: Sequence[Tensor],
    out_tapped: Tensor | None,
    out_hidden: Tensor | None,
    out_logits: Tensor | None,
) -> None:
    """Residual streams of every layer, of which the taps' are kept; the last one normalised and its logits."""
    residuals = _residuals(locals(), causal=True)
    last = _normed(residuals[-1], final_norm, eps)
    if out_tapped is not None:
        out_tapped.copy_(torch.cat([residuals[tap] for tap in taps], dim=-1))
    if out_hidden is not None:
        out_hidden.copy_(last)
    if out_logits is not None:
        out_logits.copy_(last @ lm_head_weight.float().T)


def draft_forward(
    *,
    input_ids: Tensor,
    positions: Tensor,
    cache_locs: Tensor,
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    embedding: Tensor,
    input_norms: Sequence[Tensor],
    qkv_weights: Sequence[Tensor],
    qkv_scales: Sequence[Tensor] | None,
    qkv_biases: Sequence[Tensor] | None,
    q_norms: Sequence[Tensor] | None,
    k_norms: Sequence[Tensor] | None,
    output_weights: Sequence[Tensor],
    output_scales: Sequence[Tensor] | None,
    mlp_norms: Sequence[Tensor],
    gate_up_weights: Sequence[Tensor],
    gate_up_scales: Sequence[Tensor] | None,
    down_weights: Sequence[Tensor],
    down_scales: Sequence[Tensor] | None,
    final_norm: Tensor,
    cos_sin: Tensor,
    eps: float,
    out_keys: Sequence[Tensor],
    out_values: Sequence[Tensor],
    out_hidden: Tensor,
) -> None:
    """The last residual stream of a block whose rows see each other, normalised."""
    out_hidden.copy_(_normed(_residuals(locals(), causal=False)[-1], final_norm, eps))


def _normed(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed: Tensor = functional.rms_norm(values, values.shape[-1:], weight.float(), eps)
    return normed


def _doubled(angles: Tensor) -> Tensor:
    """[N, D / 2] for both halves of every head, [N, 1, D]."""
    return angles.repeat(1, 2)[:, None]


def _residuals(arguments: Mapping[str, Any], *, causal: bool) -> list[Tensor]:
    """[N, E] fp32 before each layer and after the last. Reads all of a request's committed rows at once, a mask on what
    comes later, and stores the step's own after.
    """
    a = SimpleNamespace(**arguments)
    heads, size = a.out_keys[0].shape[1:]
    batch, columns = a.seq_lens.numel(), a.req_to_token.shape[1]
    rows, queries = a.input_ids.numel() // batch, a.output_weights[0].shape[1] // size
    kept = torch.nonzero(a.cache_locs > 0).flatten()
    cosine, sine = (_doubled(part) for part in a.cos_sin[a.positions].chunk(2, dim=-1))
    tokens = a.req_to_token[a.req_pool_indices].long()
    column = torch.arange(columns, device=tokens.device)
    committed = (column < a.seq_lens[:, None]).unsqueeze(1).expand(-1, rows, -1)
    own = torch.ones(rows, rows, dtype=torch.bool, device=tokens.device)
    own = (own.tril() if causal else own).expand(batch, -1, -1)
    mask = torch.cat([committed, own], dim=-1).unsqueeze(1)

    def whole(name: str, layer: int) -> Tensor:
        weight, scales = getattr(a, f"{name}_weights")[layer].float(), getattr(a, f"{name}_scales")
        matrix: Tensor = weight if scales is None else weight * _of_each_value(scales[layer], *weight.shape)
        return matrix

    def turned(values: Tensor, weights: Sequence[Tensor] | None, layer: int) -> Tensor:
        values = values if weights is None else _normed(values, weights[layer], a.eps)
        low, high = values.chunk(2, dim=-1)
        return values * cosine + torch.cat([-high, low], dim=-1) * sine

    def seen(cached: Tensor, new: Tensor) -> Tensor:
        """[B, A, C + T, D]: a request's committed rows, then its own; no number where there is none."""
        old = cached[tokens].float().masked_fill(column.ge(a.seq_lens[:, None])[..., None, None], 0.0)
        together: Tensor = torch.cat([old, new.view(batch, rows, heads, size)], dim=1)
        spread: Tensor = together.repeat_interleave(queries // heads, dim=2).transpose(1, 2)
        return spread

    residual = a.embedding[a.input_ids].float()
    found = [residual]
    for layer in range(len(a.qkv_weights)):
        bias = None if a.qkv_biases is None else a.qkv_biases[layer].float()
        mixed = functional.linear(_normed(residual, a.input_norms[layer], a.eps), whole("qkv", layer), bias)
        mixed = mixed.view(len(residual), -1, size)
        query = turned(mixed[:, :queries], a.q_norms, layer)
        key, value = turned(mixed[:, queries : queries + heads], a.k_norms, layer), mixed[:, queries + heads :]
        attended = functional.scaled_dot_product_attention(
            query.view(batch, rows, queries, size).transpose(1, 2),
            seen(a.out_keys[layer], key),
            seen(a.out_values[layer], value),
            attn_mask=mask,
        )
        for cache, new in ((a.out_keys[layer], key), (a.out_values[layer], value)):
            cache[a.cache_locs[kept]] = new[kept].to(cache.dtype)
        residual = residual + attended.transpose(1, 2).reshape(len(residual), -1) @ whole("output", layer).T
        gate_up = _normed(residual, a.mlp_norms[layer], a.eps) @ whole("gate_up", layer).T
        gate, up = gate_up.chunk(2, dim=-1)
        residual = residual + functional.silu(gate) * up @ whole("down", layer).T
        found.append(residual)
    return found


def _of_each_value(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Scales of rows, or of blocks of 128 x 128, as [rows, columns] or what broadcasts to it."""
    if scales.dim() == 1:
        return scales.unsqueeze(1)
    row, column = (torch.arange(size, device=scales.device) // 128 for size in (rows, columns))
    return scales[row[:, None], column]
