"""`draft_block` in plain torch: the definition that the kernel is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_slots.common.philox import philox_4x32_10, uniforms
from sgl_mega_slots.common.pick import lowest_argmax


def draft_block(
    *,
    base_logits: Tensor,
    anchor_tokens: Tensor,
    markov_w1: Tensor,
    markov_w2: Tensor,
    temperatures: Tensor,
    noise_key: int,
    noise_offset: Tensor,
    out_draft_tokens: Tensor,
    out_step_logits: Tensor | None,
) -> None:
    """See :class:`sgl_mega_plugin.contract.DraftBlock`."""
    batch, gamma, vocab = base_logits.shape
    step_dtype = torch.promote_types(base_logits.dtype, markov_w1.dtype)
    sampled = temperatures > 0
    previous = anchor_tokens
    for step in range(gamma):
        bias = markov_bias(previous, markov_w1, markov_w2)
        logits = (base_logits[:, step].float() + bias.float()).to(step_dtype)
        scores = logits.float()
        if bool(sampled.any()):
            noise = gumbel_noise(batch, vocab, step, noise_key, noise_offset)
            safe = torch.where(sampled, temperatures, 1.0)[:, None]
            scores = torch.where(sampled[:, None], scores / safe + noise, scores)
        previous = lowest_argmax(scores)
        out_draft_tokens[:, step] = previous
        if out_step_logits is not None:
            out_step_logits[:, step] = torch.where(sampled[:, None], logits, out_step_logits[:, step])


def markov_bias(previous: Tensor, markov_w1: Tensor, markov_w2: Tensor) -> Tensor:
    """``w1[previous] @ w2.T`` [B, V], accumulated in fp32 and rounded to the weights' dtype.

    A previous token outside [0, V), which only a stale anchor can be, has no bias.
    """
    vocab = markov_w1.shape[0]
    known = (previous >= 0) & (previous < vocab)
    rows = torch.where(known[:, None], markov_w1[previous.clamp(0, vocab - 1)], 0).float()
    return (rows @ markov_w2.float().T).to(markov_w1.dtype)


def gumbel_noise(batch: int, vocab: int, step: int, noise_key: int, noise_offset: Tensor) -> Tensor:
    """``-log(-log1p(-u))`` [B, V] fp32 of one step; a function of the key and the counter alone."""
    device = noise_offset.device
    quads = torch.arange((vocab + 3) // 4, device=device)[None, :]
    row = torch.arange(batch, device=device)[:, None]
    words = philox_4x32_10(noise_key, (quads, row, torch.full_like(row, step), noise_offset.view(1, 1)))
    uniform = uniforms(torch.stack(words, dim=-1).view(batch, -1)[:, :vocab])
    return -torch.log(-torch.log1p(-uniform))
