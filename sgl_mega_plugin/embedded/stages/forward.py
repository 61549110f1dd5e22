"""The embedded engine's own target forward, an operator at a time; its models run a layer at a time instead."""

from __future__ import annotations

from collections.abc import Sequence

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
    qkv_biases: Sequence[Tensor] | None,
    q_norms: Sequence[Tensor] | None,
    k_norms: Sequence[Tensor] | None,
    output_weights: Sequence[Tensor],
    mlp_norms: Sequence[Tensor],
    gate_up_weights: Sequence[Tensor],
    down_weights: Sequence[Tensor],
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
    """Read all of a request's committed rows at once, a mask on what comes later, and store the step's own after."""
    heads, size = out_keys[0].shape[1:]
    batch, rows, columns = seq_lens.numel(), input_ids.numel() // seq_lens.numel(), req_to_token.shape[1]
    queries = output_weights[0].shape[1] // size
    kept = torch.nonzero(cache_locs > 0).flatten()
    cosine, sine = (part.repeat(1, 2)[:, None] for part in cos_sin[positions].chunk(2, dim=-1))
    tokens = req_to_token[req_pool_indices].long()
    column = torch.arange(columns, device=tokens.device)
    committed = (column < seq_lens[:, None]).unsqueeze(1).expand(-1, rows, -1)
    own = torch.ones(rows, rows, dtype=torch.bool, device=tokens.device).tril().expand(batch, -1, -1)
    mask = torch.cat([committed, own], dim=-1).unsqueeze(1)

    def normed(values: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(values, values.shape[-1:], weight.float(), eps)

    def turned(values: Tensor, weights: Sequence[Tensor] | None, layer: int) -> Tensor:
        values = values if weights is None else normed(values, weights[layer])
        low, high = values.chunk(2, dim=-1)
        return values * cosine + torch.cat([-high, low], dim=-1) * sine

    def seen(cached: Tensor, new: Tensor) -> Tensor:
        """[B, A, C + T, D]: a request's committed rows, then its own; no number where there is none."""
        old = cached[tokens].float().masked_fill(column.ge(seq_lens[:, None])[..., None, None], 0.0)
        together = torch.cat([old, new.view(batch, rows, heads, size)], dim=1)
        return together.repeat_interleave(queries // heads, dim=2).transpose(1, 2)

    residual = embedding[input_ids].float()
    tapped = {0: residual}
    for layer, qkv in enumerate(qkv_weights):
        bias = None if qkv_biases is None else qkv_biases[layer].float()
        mixed = functional.linear(normed(residual, input_norms[layer]), qkv.float(), bias).view(len(residual), -1, size)
        query = turned(mixed[:, :queries], q_norms, layer)
        key, value = turned(mixed[:, queries : queries + heads], k_norms, layer), mixed[:, queries + heads :]
        attended = functional.scaled_dot_product_attention(
            query.view(batch, rows, queries, size).transpose(1, 2),
            seen(out_keys[layer], key),
            seen(out_values[layer], value),
            attn_mask=mask,
        )
        for cache, new in ((out_keys[layer], key), (out_values[layer], value)):
            cache[cache_locs[kept]] = new[kept].to(cache.dtype)
        residual = residual + attended.transpose(1, 2).reshape(len(residual), -1) @ output_weights[layer].float().T
        gate, up = (normed(residual, mlp_norms[layer]) @ gate_up_weights[layer].float().T).chunk(2, dim=-1)
        residual = residual + functional.silu(gate) * up @ down_weights[layer].float().T
        tapped[layer + 1] = residual
    last = normed(residual, final_norm)
    if out_tapped is not None:
        out_tapped.copy_(torch.cat([tapped[tap] for tap in taps], dim=-1))
    if out_hidden is not None:
        out_hidden.copy_(last)
    if out_logits is not None:
        out_logits.copy_(last @ lm_head_weight.float().T)
