"""`draft_logits` in plain torch: the definition that the kernel is compared with."""

from __future__ import annotations

from torch import Tensor

from sgl_mega_slots.common.lm_head.reference import head_logits
from sgl_mega_slots.common.pick import lowest_argmax


def draft_logits(
    *,
    hidden: Tensor,
    lm_head_weight: Tensor,
    divisor: float,
    vocab_size: int,
    out_logits: Tensor | None,
    out_tokens: Tensor | None,
) -> None:
    """See :class:`sgl_mega_plugin.contract.DraftLogits`."""
    wanted = next(output.shape[1] for output in (out_logits, out_tokens) if output is not None)
    logits = head_logits(hidden[:, -wanted:], lm_head_weight, divisor, vocab_size)
    if out_logits is not None:
        out_logits.copy_(logits)
    if out_tokens is not None:
        out_tokens.copy_(lowest_argmax(logits))
