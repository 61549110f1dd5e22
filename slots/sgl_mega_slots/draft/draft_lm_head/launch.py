"""Launch of `draft_lm_head`: checks the arguments and says which rows of a block are wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_plugin.contract import SlotSetup
from sgl_mega_slots.common.checks import require_batch, require_tensor, require_triton
from sgl_mega_slots.common.lm_head.launch import LmHead


class DraftLmHead:
    """`draft_logits` as one launch, or two where tokens are wanted; built once, then capturable."""

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "draft_lm_head")
        self._setup = setup
        self._device = torch.device(setup.device).type
        self._head = LmHead(setup, rows=setup.gamma)

    def __call__(
        self,
        *,
        hidden: Tensor,
        lm_head_weight: Tensor,
        divisor: float,
        vocab_size: int,
        out_logits: Tensor | None,
        out_tokens: Tensor | None,
    ) -> None:
        """See :class:`sgl_mega_plugin.contract.DraftLogits`.

        Raises:
            ValueError: an argument's shape, dtype, device, stride or range is not the seam's, or no output is given.
        """
        gamma, vocab = self._setup.gamma, self._setup.vocab_size
        if hidden.dim() != 3 or hidden.shape[1] not in (gamma, gamma + 1):
            raise ValueError(
                f"hidden: shape {tuple(hidden.shape)}; must be [B, Q, H], Q the G {gamma} that the slot was built with "
                "or one more"
            )
        batch, rows = hidden.shape[:2]
        require_batch("hidden", batch, self._setup.max_batch)
        self._head.check(hidden, lm_head_weight, divisor, vocab_size)
        if out_logits is None and out_tokens is None:
            raise ValueError("out_logits, out_tokens: both None; at least one must be a tensor")
        if out_logits is not None:
            dtypes = (lm_head_weight.dtype,)
            require_tensor("out_logits", out_logits, shape=(batch, gamma, vocab), dtypes=dtypes, device=self._device)
        if out_tokens is not None:
            require_tensor("out_tokens", out_tokens, shape=(batch, gamma), dtypes=(torch.int64,), device=self._device)
        self._head.run(
            hidden=hidden,
            strides=(hidden.stride(0), hidden.stride(1)),
            first=rows - gamma,
            batch=batch,
            lm_head_weight=lm_head_weight,
            divisor=divisor,
            verify_lens=None,
            out_logits=out_logits,
            out_tokens=out_tokens,
        )
