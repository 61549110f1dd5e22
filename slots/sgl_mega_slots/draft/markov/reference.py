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
    draft_hidden: Tensor | None,
    mixer_weight: Tensor | None,
    mixer_bias: Tensor | None,
    temperatures: Tensor,
    noise_key: int,
    noise_offset: Tensor,
    out_draft_tokens: Tensor,
    out_step_logits: Tensor | None,
    out_features: Tensor | None,
) -> None:
    """See :class:`sgl_mega_plugin.contract.DraftBlock`.

    SGLang's own block differs where a row is NaN: there the lowest NaN wins, an id that no logit chose. For one
    greedy row it rounds neither the bias nor the sum, in larger batches both, so a request drafts differently by
    the requests beside it; here a row is the same in every batch. It reads ``markov_w1`` out of bounds at an anchor
    that is none.
    """
    batch, gamma, vocab = base_logits.shape
    step_dtype = step_dtype_of(base_logits, markov_w1, out_step_logits)
    sampled = temperatures > 0
    previous, state = anchor_tokens, markov_w1.new_zeros(batch, markov_w1.shape[1])
    for step in range(gamma):
        factors = features = token_features(previous, markov_w1)
        if draft_hidden is not None and mixer_weight is not None:
            factors, state = mixed(features, state, draft_hidden[:, step], mixer_weight, mixer_bias)
        bias = (factors.float() @ markov_w2.float().T).to(markov_w1.dtype)
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
        if out_features is not None:
            out_features[:, step] = features


def step_dtype_of(base_logits: Tensor, markov_w1: Tensor, out_step_logits: Tensor | None) -> torch.dtype:
    """What a step's logits are rounded to."""
    if out_step_logits is not None:
        return out_step_logits.dtype
    return torch.promote_types(base_logits.dtype, markov_w1.dtype)


def token_features(previous: Tensor, markov_w1: Tensor) -> Tensor:
    """``w1[previous]`` [B, R]; zeros for a token outside [0, V), which only a stale anchor can be."""
    vocab = markov_w1.shape[0]
    known = (previous >= 0) & (previous < vocab)
    return torch.where(known[:, None], markov_w1[previous.clamp(0, vocab - 1)], 0)


def mixed(
    features: Tensor, state: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Factors and next state [B, R] of a gated head or an RNN, which the shape of its weight [.., ..] tells."""
    dtype, rank = features.dtype, features.shape[1]
    recurrent = weight.shape[0] == 3 * rank
    inputs = [state, features, hidden] if recurrent else [hidden, features]
    total = torch.cat(inputs, dim=1).float() @ weight.float().T
    if bias is not None:
        total = total + bias.float()
    total = total.to(dtype)
    gate = torch.sigmoid(total[:, :rank].float()).to(dtype)
    if not recurrent:
        return gate * features, state
    candidate, output = (torch.tanh(part.float()).to(dtype) for part in total[:, rank:].chunk(2, dim=1))
    return output, gate * state + (1 - gate) * candidate


def gumbel_noise(batch: int, vocab: int, step: int, noise_key: int, noise_offset: Tensor) -> Tensor:
    """``-log(-log1p(-u))`` [B, V] fp32 of one step; a function of the key and the counter alone."""
    device = noise_offset.device
    quads = torch.arange((vocab + 3) // 4, device=device)[None, :]
    row = torch.arange(batch, device=device)[:, None]
    words = philox_4x32_10(noise_key, (quads, row, torch.full_like(row, step), noise_offset.view(1, 1)))
    uniform = uniforms(torch.stack(words, dim=-1).view(batch, -1)[:, :vocab])
    return -torch.log(-torch.log1p(-uniform))
