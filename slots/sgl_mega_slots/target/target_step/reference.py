"""`target_forward` in plain torch: a dense decoder's forward in fp32, rounded once where it is written.

RMS norm: Zhang and Sennrich, arXiv:1910.07467. Rotary embedding, halves rotated: Su et al., arXiv:2104.09864, in the
layout of GPT-NeoX. Gated MLP with SiLU: Shazeer, arXiv:2002.05202.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_mega_slots.target.target_step.shape import DenseShape
from sgl_mega_slots.target.target_step.weights import Cache, Call, StepInputs, Weights, call_of


@dataclass(frozen=True)
class DecoderStep:
    """fp32 results of a step; ``keys`` and ``values`` are what each layer writes, ``[rows, KV heads, head dim]``."""

    logits: Tensor  # [rows, vocab]; [rows, 0] without an LM head
    last_hidden: Tensor  # [rows, hidden], normalised
    residuals: Tensor  # [layers + 1, rows, hidden]: before each layer, and after the last
    keys: Tensor  # [layers, rows, KV heads, head dim]
    values: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` scaled to unit root mean square over its last axis, times the weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Heads ``[rows, heads, head dim]`` rotated by each row's angles ``[rows, head dim]``."""
    cosine, sine = rotary[:, None].chunk(2, dim=-1)
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)


def slots_of(inputs: StepInputs, request: int) -> Tensor:
    """Slots in the cache of a request's committed positions."""
    row = inputs.req_to_token[int(inputs.req_pool_indices[request])]
    return row[: int(inputs.seq_lens[request])].long()


def attend(query: Tensor, keys: Tensor, values: Tensor, *, causal: bool = True) -> Tensor:
    """Attention of the last T of ``length`` positions, to those up to their own or to all.

    Args:
        query: ``[T, q heads, head dim]`` fp32.
        keys, values: ``[length, KV heads, head dim]`` fp32.

    Returns:
        ``[T, q heads, head dim]`` fp32.
    """
    tokens, heads, head_dim = query.shape
    length = keys.shape[0]
    repeated = heads // keys.shape[1]
    keys, values = (x.repeat_interleave(repeated, dim=1) for x in (keys, values))
    scores = torch.einsum("thd,shd->hts", query, keys) * head_dim**-0.5
    position = torch.arange(length, device=query.device)
    last = length - tokens + torch.arange(tokens, device=query.device)
    if causal:
        scores = scores.masked_fill(position[None, None] > last[None, :, None], float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), values)


def in_cache(cache: Tensor, x: Tensor) -> Tensor:
    """Values as a cache has them: rounded to bf16, then to e4m3 within its range where the cache is."""
    x = x.bfloat16()
    return x.clamp(-448, 448).to(cache.dtype) if cache.dtype == torch.float8_e4m3fn else x


def read(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows of a cache. As bytes: not every operator knows fp8."""
    rows: Tensor = cache.view(torch.uint8)[slots].view(cache.dtype)
    return rows


def store(cache: Tensor, slots: Tensor, x: Tensor) -> None:
    """Rows of a cache get these values, rounded as it has them."""
    cache.view(torch.uint8)[slots] = in_cache(cache, x).view(torch.uint8)


def decoder_step(
    shape: DenseShape, weights: Weights, cache: Cache, inputs: StepInputs, *, causal: bool = True
) -> DecoderStep:
    """One forward of ``requests`` times T rows over the cached context; without ``causal`` rows of a request see each
    other. The cache is read, not written. Where it is fp8, attention reads the step's own keys and values so too.
    """
    rows, requests, tokens = inputs.input_ids.numel(), inputs.requests, inputs.tokens
    rotary = weights.rotary[inputs.positions]
    x = weights.embedding[inputs.input_ids].float()
    residuals, kept_keys, kept_values = [x], [], []
    for index, layer in enumerate(layer.dequantised() for layer in weights.layers):
        projected = rms_norm(x, layer.input_norm, shape.eps) @ layer.qkv.float().T
        if layer.qkv_bias is not None:
            projected = projected + layer.qkv_bias.float()
        query, key, value = (
            part.view(rows, -1, shape.head_dim)
            for part in projected.split([shape.q_size, shape.kv_size, shape.kv_size], dim=-1)
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = rms_norm(query, layer.q_norm, shape.eps), rms_norm(key, layer.k_norm, shape.eps)
        query, key = rotate(query, rotary), rotate(key, rotary)
        if shape.kv_fp8:
            key, value = (in_cache(cache.keys[index], x).float() for x in (key, value))
        kept_keys.append(key)
        kept_values.append(value)
        attended = []
        for request in range(requests):
            here = slice(request * tokens, (request + 1) * tokens)
            at = slots_of(inputs, request)
            keys = torch.cat([read(cache.keys[index], at).float(), key[here]])
            values = torch.cat([read(cache.values[index], at).float(), value[here]])
            attended.append(attend(query[here], keys, values, causal=causal))
        x = x + torch.cat(attended).flatten(1) @ layer.o.float().T
        gate, up = (rms_norm(x, layer.middle_norm, shape.eps) @ layer.gate_up.float().T).chunk(2, dim=-1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer.down.float().T
        residuals.append(x)
    last = rms_norm(x, weights.final_norm, shape.eps)
    head = weights.embedding[:0] if weights.head is None else weights.head
    return DecoderStep(
        logits=last @ head.float().T,
        last_hidden=last,
        residuals=torch.stack(residuals),
        keys=torch.stack(kept_keys),
        values=torch.stack(kept_values),
    )


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
    """See :class:`sgl_mega_plugin.contract.TargetForward`."""
    call = call_of(dict(locals()))
    write(call, decoder_step(call.shape, call.weights, call.cache, call.inputs))


def write(call: Call, step: DecoderStep) -> None:
    """A step's results to where its call wants them."""
    stored = call.inputs.cache_locs > 0
    at = call.inputs.cache_locs[stored]
    for index in range(call.shape.layers):
        store(call.cache.keys[index], at, step.keys[index][stored])
        store(call.cache.values[index], at, step.values[index][stored])
    for out, found in ((call.outputs.hidden, step.last_hidden), (call.outputs.logits, step.logits)):
        if out is not None:
            out.copy_(found)
    if call.outputs.tapped is not None:
        call.outputs.tapped.copy_(step.residuals[list(call.taps)].transpose(0, 1).flatten(1))
