"""The LM head in plain torch: what both slots' references are made of."""

from __future__ import annotations

import torch
from torch import Tensor


def head_logits(hidden: Tensor, lm_head_weight: Tensor, divisor: float, vocab_size: int) -> Tensor:
    """Logits [..., V] of ``hidden`` [..., H] in the weights' dtype: products accumulated in fp32, rounded once.

    SGLang divides by a tensor operator, which multiplies by fp32(1 / divisor) on a GPU and divides on a CPU: the GPU's
    way is the definition.
    """
    if divisor != 1.0:
        scale = (1.0 / torch.tensor(divisor, dtype=torch.float32)).item()
        hidden = (hidden.float() * scale).to(hidden.dtype)
    rows = _aligned(hidden.to(lm_head_weight.dtype).float())
    weight = _aligned(lm_head_weight[:vocab_size].float())
    return (rows @ weight.T).to(lm_head_weight.dtype)


def _aligned(values: Tensor) -> Tensor:
    """The same values where a matmul sums them in its usual order: that may depend on an address."""
    return (
        values
        if values.data_ptr() % 64 == 0 and values.is_contiguous()
        else values.clone(memory_format=torch.contiguous_format)
    )
