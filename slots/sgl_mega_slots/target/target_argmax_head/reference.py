"""`target_argmax` in plain torch: the definition that the kernel is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_slots.common.lm_head.reference import head_logits
from sgl_mega_slots.common.pick import lowest_argmax


def target_argmax(
    *,
    hidden: Tensor,
    lm_head_weight: Tensor,
    divisor: float,
    vocab_size: int,
    verify_lens: Tensor,
    out_tokens: Tensor,
) -> None:
    """See :class:`sgl_mega_plugin.contract.TargetArgmax`."""
    winners = lowest_argmax(head_logits(hidden, lm_head_weight, divisor, vocab_size)).view(out_tokens.shape)
    wanted = torch.arange(out_tokens.shape[1], device=hidden.device) < verify_lens[:, None]
    out_tokens.copy_(torch.where(wanted, winners, 0))
