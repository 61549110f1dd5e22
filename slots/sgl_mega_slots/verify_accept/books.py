"""What every accept's reference writes once it knows how many drafts stand and which token follows them."""

from __future__ import annotations

import torch
from torch import Tensor


def simulated_lengths(simulated_correct: Tensor, verify_lens: Tensor) -> Tensor:
    """Accepted drafts [B] int64 under simulation: the same in every row, capped by its verify length."""
    return torch.minimum(simulated_correct.long(), (verify_lens - 1).long()).clamp(min=0)


def keep_books(
    correct: Tensor,
    bonus: Tensor,
    *,
    candidates: Tensor,
    vocab: int,
    seq_lens: Tensor,
    verify_lens: Tensor,
    out_correct_lens: Tensor,
    out_bonus_tokens: Tensor,
    out_commit_lens: Tensor,
    out_new_seq_lens: Tensor,
    out_tokens: Tensor,
) -> None:
    """Write an accept's outputs; ``correct`` and ``bonus`` [B] are of the live rows, whatever the others hold."""
    batch, rows = candidates.shape
    column = torch.arange(rows, device=candidates.device)
    live = verify_lens > 0
    correct, bonus = torch.where(live, correct, 0), torch.where(live, bonus, 0)
    commit = torch.where(live, correct + 1, 0)
    shifted = torch.cat([candidates[:, 1:], candidates.new_zeros(batch, 1)], dim=1)
    drafts = torch.where((shifted >= 0) & (shifted < vocab), shifted, 0)
    tokens = torch.where(column < correct[:, None], drafts, 0)
    tokens = torch.where((column == correct[:, None]) & live[:, None], bonus[:, None], tokens)

    out_correct_lens.copy_(correct)
    out_bonus_tokens.copy_(bonus)
    out_commit_lens.copy_(commit)
    out_new_seq_lens.copy_(seq_lens + commit)
    out_tokens.copy_(tokens)
