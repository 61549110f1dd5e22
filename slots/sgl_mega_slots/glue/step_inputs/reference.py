"""`step_inputs` in plain torch: the definition that the kernel is compared with.

SGLang 0.5.23 (``assign_extend_cache_locs_uniform``) knows no padding row, no last position and no end of a table row:
its table has 4 + T columns beyond the context, and its positions run past the context. Where a context ends, positions
here stop at the last one, so that a RoPE table of the context's length is enough, and nothing is written past it.
"""

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
    relay_lens: Tensor | None,
    relay_tokens: Tensor | None,
    mask_token: int,
    max_positions: int,
    out_positions: Tensor,
    out_cache_locs: Tensor,
    out_draft_ids: Tensor,
    out_seq_lens: Tensor | None,
    out_anchor_tokens: Tensor | None,
) -> None:
    """See :class:`sgl_mega_plugin.contract.StepInputs`."""
    pool_rows, columns = req_to_token.shape
    pool_row = req_pool_indices.long()
    known = (pool_row >= 0) & (pool_row < pool_rows)
    pool_row = pool_row.clamp(0, pool_rows - 1)
    live = verify_lens > 0
    start, anchor = seq_lens.long(), anchor_tokens
    if relay_lens is not None and relay_tokens is not None:
        live = live & known
        start, anchor = relay_lens[pool_row], relay_tokens[pool_row]

    limit = min(max_positions, columns)
    wanted = start[:, None] + torch.arange(out_positions.shape[1], device=start.device)
    inside = (live & known)[:, None] & (wanted >= 0) & (wanted < limit)
    positions = torch.where(live[:, None], wanted.clamp(0, limit - 1), 0)
    locations = req_to_token[pool_row[:, None], positions].long()

    out_positions.copy_(positions)
    out_cache_locs.copy_(torch.where(inside, locations, PADDING_SLOT))
    out_draft_ids.fill_(mask_token)
    out_draft_ids[:, 0] = torch.where(live, anchor, mask_token)
    if out_seq_lens is not None:
        out_seq_lens.copy_(torch.where(live, start, 0))
    if out_anchor_tokens is not None:
        out_anchor_tokens.copy_(torch.where(live, anchor, 0))
