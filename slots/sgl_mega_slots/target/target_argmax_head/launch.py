"""Launch of `target_argmax_head`: checks the arguments, then the head with its argmax."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_plugin.contract import SlotSetup
from sgl_mega_slots.common.checks import require_batch, require_setup, require_tensor, require_triton
from sgl_mega_slots.common.lm_head.launch import LmHead


class TargetArgmaxHead:
    """`target_argmax` as two launches; built once, then capturable. No logits are written."""

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "target_argmax_head")
        self._setup = setup
        self._device = torch.device(setup.device).type
        self._head = LmHead(setup, rows=setup.gamma + 1)

    def __call__(
        self,
        *,
        hidden: Tensor,
        lm_head_weight: Tensor,
        divisor: float,
        vocab_size: int,
        verify_lens: Tensor,
        out_tokens: Tensor,
    ) -> None:
        """See :class:`sgl_mega_plugin.contract.TargetArgmax`.

        Raises:
            ValueError: an argument's shape, dtype, device, stride or range is not the seam's.
        """
        batch, rows = out_tokens.shape[0], self._setup.gamma + 1
        require_batch("out_tokens", batch, self._setup.max_batch)
        require_setup("out_tokens", out_tokens.shape[1], rows, "T")
        if hidden.dim() != 2 or hidden.shape[0] != batch * rows:
            raise ValueError(f"hidden: shape {tuple(hidden.shape)}; must be [B * T, H], B * T = {batch * rows}")
        self._head.check(hidden, lm_head_weight, divisor, vocab_size)
        for name, value, shape, dtype in (
            ("verify_lens", verify_lens, (batch,), torch.int32),
            ("out_tokens", out_tokens, (batch, rows), torch.int64),
        ):
            require_tensor(name, value, shape=shape, dtypes=(dtype,), device=self._device)
        self._head.run(
            hidden=hidden,
            strides=(rows * hidden.stride(0), hidden.stride(0)),
            first=0,
            batch=batch,
            lm_head_weight=lm_head_weight,
            divisor=divisor,
            verify_lens=verify_lens,
            out_logits=None,
            out_tokens=out_tokens,
        )
