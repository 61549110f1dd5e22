"""`greedy_accept` in plain torch: the definition that the kernel is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_slots.common.pick import lowest_argmax
from sgl_mega_slots.verify_accept.books import keep_books, simulated_lengths

#: V where only the argmax is known: no id is larger than an int32.
UNKNOWN_VOCAB = 1 << 31


def greedy_accept(
    *,
    candidates: Tensor,
    target_logits: Tensor | None,
    target_tokens: Tensor | None,
    seq_lens: Tensor,
    verify_lens: Tensor,
    simulated_correct: Tensor | None,
    out_correct_lens: Tensor,
    out_bonus_tokens: Tensor,
    out_commit_lens: Tensor,
    out_new_seq_lens: Tensor,
    out_tokens: Tensor,
) -> None:
    """See :class:`sgl_mega_plugin.contract.GreedyAccept`.

    Raises:
        ValueError: both or neither of ``target_logits`` and ``target_tokens`` are given.
    """
    winners, vocab = _winners(candidates, target_logits, target_tokens)
    # A winner is in [0, V), so a draft outside that range equals none and is a rejection.
    column = torch.arange(1, candidates.shape[1], device=candidates.device)
    matches = (candidates[:, 1:] == winners[:, :-1]) & (column < verify_lens[:, None])
    correct = matches.long().cumprod(dim=1).sum(dim=1)
    bonus = winners.gather(1, correct[:, None]).squeeze(1)
    keep_books(
        correct if simulated_correct is None else simulated_lengths(simulated_correct, verify_lens),
        bonus,
        candidates=candidates,
        vocab=vocab,
        seq_lens=seq_lens,
        verify_lens=verify_lens,
        out_correct_lens=out_correct_lens,
        out_bonus_tokens=out_bonus_tokens,
        out_commit_lens=out_commit_lens,
        out_new_seq_lens=out_new_seq_lens,
        out_tokens=out_tokens,
    )


def _winners(candidates: Tensor, logits: Tensor | None, tokens: Tensor | None) -> tuple[Tensor, int]:
    """The target's ids [B, T], and V."""
    if (logits is None) == (tokens is None):
        raise ValueError("target_logits, target_tokens: exactly one of them must be given")
    if logits is not None:
        return lowest_argmax(logits).view(candidates.shape), logits.shape[-1]
    assert tokens is not None
    return torch.where((tokens >= 0) & (tokens < UNKNOWN_VOCAB), tokens, 0), UNKNOWN_VOCAB
