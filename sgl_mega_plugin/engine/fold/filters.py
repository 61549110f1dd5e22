"""The sampling filters of a step where the verify graph reads them: top-k, top-p and min-p of each request.

Values are copied each step that has any, so an edit in place is seen; a step that has none finds none. Used by
``epilogue`` and ``worker``.
"""

from __future__ import annotations

from typing import Any

import torch

_EVERY_TOKEN = 1 << 30  # a top_k that keeps them all, as SGLang writes it


class Filters:
    """Fixed rows of filters, and the room for the cutoffs that follow from them."""

    def __init__(self, *, max_batch: int, rows: int, device: str) -> None:
        self.top_ks = torch.full((max_batch,), _EVERY_TOKEN, dtype=torch.int32, device=device)
        self.top_ps = torch.ones(max_batch, dtype=torch.float32, device=device)
        self.min_ps = torch.zeros(max_batch, dtype=torch.float32, device=device)
        self.cutoffs = torch.zeros(max_batch * rows, dtype=torch.float32, device=device)
        self._staged = False

    def stage(self, sampling_info: Any, batch: int) -> None:
        """Before a step of ``batch`` requests, on its stream. ``sampling_info`` None: every row is greedy."""
        wanted = _filters(sampling_info)
        if wanted:
            torch._foreach_copy_(
                [self.top_ks[:batch], self.top_ps[:batch], self.min_ps[:batch]],
                [
                    sampling_info.top_ks.view(-1)[:batch],
                    sampling_info.top_ps.view(-1)[:batch],
                    sampling_info.min_ps.view(-1)[:batch],
                ],
            )
        elif self._staged:
            self.top_ks.fill_(_EVERY_TOKEN)
            self.top_ps.fill_(1.0)
            self.min_ps.zero_()
        self._staged = wanted


def _filters(info: Any) -> bool:
    """Whether a row that draws has a filter; a greedy row's top_k of 1 is none."""
    if info is None or info.is_all_greedy:
        return False
    return bool(info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling)
