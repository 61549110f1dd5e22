"""The embedded engine's own glue stage."""

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
    """Add, clamp, gather, fill."""
    width, columns = out_positions.shape[1], req_to_token.shape[1]
    live = (verify_lens > 0).unsqueeze(1)
    wanted = seq_lens.long().unsqueeze(1) + torch.arange(width, device=seq_lens.device)
    last = min(max_positions, columns) - 1
    positions = wanted.clamp(0, last)
    # A padding row's index and length may be stale; clamped, they read some row of the table, and are dropped.
    table_rows = req_pool_indices.long().unsqueeze(1)
    locations = req_to_token[table_rows.clamp(0, len(req_to_token) - 1), positions].long()
    inside = live & (wanted == positions) & (table_rows >= 0) & (table_rows < len(req_to_token))
    out_positions.copy_(torch.where(live, positions, 0))
    out_cache_locs.copy_(torch.where(inside, locations, PADDING_SLOT))
    out_draft_ids.fill_(mask_token)
    out_draft_ids[:, 0] = torch.where(live.squeeze(1), anchor_tokens, mask_token)
