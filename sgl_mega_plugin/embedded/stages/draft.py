"""The embedded engine's own draft stage."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_plugin.embedded.sampling import greedy, philox


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
    """Markov steps one after the other; a sampled row adds Gumbel noise before its argmax."""
    gamma, vocab_size = base_logits.shape[1:]
    sampled = temperatures > 0
    divisor = torch.where(sampled, temperatures, 1.0).unsqueeze(1)
    noisy = bool(sampled.any())
    transposed = markov_w2.float().T
    joint_dtype = torch.promote_types(base_logits.dtype, markov_w2.dtype)
    step_dtype = joint_dtype if out_step_logits is None else out_step_logits.dtype
    previous = anchor_tokens
    state = markov_w1.new_zeros(len(previous), markov_w1.shape[1])
    for step in range(gamma):
        known = ((previous >= 0) & (previous < vocab_size)).unsqueeze(1)
        features = torch.where(known, markov_w1[previous.clamp(0, vocab_size - 1)], 0)
        if out_features is not None:
            out_features[:, step] = features
        factors = features
        if mixer_weight is not None and draft_hidden is not None:
            hidden = draft_hidden[:, step]
            if len(mixer_weight) == features.shape[1]:
                factors = features * torch.sigmoid(_linear([hidden, features], mixer_weight, mixer_bias))
            else:
                gate, candidate, output = _linear([state, features, hidden], mixer_weight, mixer_bias).chunk(3, dim=1)
                gate = torch.sigmoid(gate)
                state = gate * state + (1 - gate) * torch.tanh(candidate)
                factors = torch.tanh(output)
        bias = (factors.float() @ transposed).to(markov_w2.dtype)
        exact = base_logits[:, step].float() + bias.float()
        logits = exact.to(step_dtype)
        scores = logits.float()
        if noisy:
            noise = _gumbel(noise_key, noise_offset, step, base_logits.shape[0], vocab_size)
            scores = torch.where(sampled.unsqueeze(1), scores / divisor + noise, scores)
        previous = greedy(scores)
        out_draft_tokens[:, step] = previous
        if out_step_logits is not None:
            out_step_logits[:, step] = torch.where(sampled.unsqueeze(1), logits, out_step_logits[:, step])


def _linear(inputs: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer on joined inputs, with sums in fp32 and one rounding."""
    total = torch.nn.functional.linear(
        torch.cat(inputs, dim=1).float(), weight.float(), None if bias is None else bias.float()
    )
    return total.to(weight.dtype)


def _gumbel(key: int, offset: Tensor, step: int, rows: int, vocab_size: int) -> Tensor:
    """Gumbel noise [rows, V] fp32 of one draft step; the counter is the seam's."""
    groups = torch.arange(-(-vocab_size // 4), device=offset.device)
    row = torch.arange(rows, device=offset.device).unsqueeze(1)
    words = philox(key, (groups, row, step, offset)).flatten(1)[:, :vocab_size]
    uniform = ((words.float() + 0.5) / 2.0**32).clamp_max(1 - 2.0**-24)  # 1 would make infinite noise
    return -torch.log(-torch.log1p(-uniform))
