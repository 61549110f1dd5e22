"""The embedded engine's own LM head, of the draft and of the target."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_plugin.embedded.sampling import greedy


def draft_logits(
    *,
    hidden: Tensor,
    lm_head_weight: Tensor,
    divisor: float,
    vocab_size: int,
    out_logits: Tensor | None,
    out_tokens: Tensor | None,
) -> None:
    """Select the rows, multiply; argmax where tokens are wanted."""
    gamma = next(output.shape[1] for output in (out_tokens, out_logits) if output is not None)
    rows = _scaled(hidden[:, hidden.shape[1] - gamma :], lm_head_weight, divisor)
    logits = torch.matmul(rows, lm_head_weight[:vocab_size].T, out=out_logits)
    if out_tokens is not None:
        out_tokens.copy_(greedy(logits))


def target_argmax(
    *,
    hidden: Tensor,
    lm_head_weight: Tensor,
    divisor: float,
    vocab_size: int,
    verify_lens: Tensor,
    out_tokens: Tensor,
) -> None:
    """Multiply, argmax, mask."""
    logits = _scaled(hidden, lm_head_weight, divisor) @ lm_head_weight[:vocab_size].T
    chosen = greedy(logits).view_as(out_tokens)
    columns = torch.arange(out_tokens.shape[1], device=hidden.device)
    out_tokens.copy_(chosen.masked_fill(columns >= verify_lens.unsqueeze(1), 0))


def _scaled(hidden: Tensor, weight: Tensor, divisor: float) -> Tensor:
    """Rows in the weight's dtype, divided as a GPU does: by a product with the fp32 reciprocal."""
    if divisor != 1.0:
        one = torch.ones((), dtype=torch.float32, device=hidden.device)
        hidden = (hidden.float() * (one / divisor)).to(hidden.dtype)
    return hidden.to(weight.dtype)
