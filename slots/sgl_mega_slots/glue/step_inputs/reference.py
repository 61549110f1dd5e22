"""`step_inputs` in plain torch: the definition that the kernel is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_plugin.contract import PADDING_SLOT


def step_inputs(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    verify_lens: Tensor,
    anchor_tokens: Tensor,
    mask_token: int,
    max_positions: int,
    out_positions: Tensor,
    out_cache_locs: Tensor,
    out_draft_ids: Tensor,
) -> None:
    """See :class:`sgl_mega_plugin.contract.StepInputs`."""
    pool_rows, columns = req_to_token.shape
    column = torch.arange(out_positions.shape[1], device=seq_lens.device)
    live = (verify_lens > 0)[:, None]
    limit = min(max_positions, columns)

    wanted = seq_lens.long()[:, None] + column
    pool_row = req_pool_indices.long()[:, None]
    inside = live & (wanted >= 0) & (wanted < limit) & (pool_row >= 0) & (pool_row < pool_rows)
    positions = torch.where(live, wanted.clamp(0, limit - 1), 0)
    locations = req_to_token[pool_row.clamp(0, pool_rows - 1), positions].long()

    out_positions.copy_(positions)
    out_cache_locs.copy_(torch.where(inside, locations, PADDING_SLOT))
    out_draft_ids.fill_(mask_token)
    out_draft_ids[:, 0] = torch.where(live[:, 0], anchor_tokens, mask_token)
