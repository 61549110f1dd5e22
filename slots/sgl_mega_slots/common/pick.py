"""The argmax that every slot's reference uses."""

from __future__ import annotations

import torch
from torch import Tensor


def lowest_argmax(values: Tensor) -> Tensor:
    """Argmax over the last axis: lowest id among equals, NaN never wins, 0 with nothing above -inf.

    Args:
        values: [..., V], any float dtype.

    Returns:
        [...] int64 in [0, V).
    """
    vocab = values.shape[-1]
    values = torch.where(values.isnan(), -torch.inf, values)
    best = values.amax(-1, keepdim=True)
    ids = torch.arange(vocab, device=values.device)
    held = torch.where(values == best, ids, vocab).amin(-1)
    return torch.where(best.squeeze(-1) > -torch.inf, held, 0)
