"""`greedy_accept` in plain torch: the definition that the kernel is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_slots.common.pick import lowest_argmax


def greedy_accept(
    *,
    candidates: Tensor,
    target_logits: Tensor,
    seq_lens: Tensor,
    verify_lens: Tensor,
    out_correct_lens: Tensor,
    out_bonus_tokens: Tensor,
    out_commit_lens: Tensor,
    out_new_seq_lens: Tensor,
    out_tokens: Tensor,
) -> None:
    """See :class:`sgl_mega_plugin.contract.GreedyAccept`."""
    batch, rows = candidates.shape
    winners = lowest_argmax(target_logits).view(batch, rows)
    column = torch.arange(rows, device=candidates.device)
    live = verify_lens > 0

    # A winner is in [0, V), so a draft outside that range equals none and is a rejection.
    matches = (candidates[:, 1:] == winners[:, :-1]) & (column[1:] < verify_lens[:, None])
    correct = matches.long().cumprod(dim=1).sum(dim=1)
    bonus = torch.where(live, winners.gather(1, correct[:, None]).squeeze(1), 0)
    commit = torch.where(live, correct + 1, 0)

    shifted = torch.cat([candidates[:, 1:], candidates.new_zeros(batch, 1)], dim=1)
    tokens = torch.where(column < correct[:, None], shifted, 0)
    tokens = torch.where((column == correct[:, None]) & live[:, None], bonus[:, None], tokens)

    out_correct_lens.copy_(correct)
    out_bonus_tokens.copy_(bonus)
    out_commit_lens.copy_(commit)
    out_new_seq_lens.copy_(seq_lens + commit)
    out_tokens.copy_(tokens)
