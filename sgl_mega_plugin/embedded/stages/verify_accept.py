"""The embedded engine's own verify-accept stage."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_plugin.embedded import sampling
from sgl_mega_plugin.embedded.sampling import greedy, one_hot, probabilities


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
    """Argmax, compare, count, gather."""
    batch, width = candidates.shape
    live = verify_lens > 0
    chosen = greedy(target_logits).view(batch, width)
    columns = torch.arange(width, device=candidates.device)
    matches = candidates[:, 1:] == chosen[:, :-1]
    matches &= columns[1:] < verify_lens.unsqueeze(1)
    correct = matches.int().cumprod(dim=1).sum(dim=1)
    bonus = chosen.gather(1, correct.unsqueeze(1)).squeeze(1)
    tokens = torch.where(columns <= correct.unsqueeze(1), chosen, 0)  # an accepted draft is the choice before it
    commit = torch.where(live, correct + 1, 0)
    out_correct_lens.copy_(torch.where(live, correct, 0))
    out_bonus_tokens.copy_(torch.where(live, bonus, 0))
    out_commit_lens.copy_(commit)
    out_new_seq_lens.copy_(seq_lens + commit)
    out_tokens.copy_(torch.where(live.unsqueeze(1), tokens, 0))


def sampled_accept(
    *,
    candidates: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    target_temperatures: Tensor,
    draft_temperatures: Tensor,
    seq_lens: Tensor,
    verify_lens: Tensor,
    noise_key: int,
    noise_offset: Tensor,
    out_correct_lens: Tensor,
    out_bonus_tokens: Tensor,
    out_commit_lens: Tensor,
    out_new_seq_lens: Tensor,
    out_tokens: Tensor,
) -> None:
    """Both softmaxes, then rejection sampling. A greedy row's p is one-hot, and its drafts count as certain."""
    batch, width = candidates.shape
    vocab_size = target_logits.shape[1]
    drafts = candidates[:, 1:]
    certain = one_hot(drafts.clamp(0, vocab_size - 1), vocab_size)
    q = certain
    if draft_logits is not None:
        missing = vocab_size - draft_logits.shape[-1]
        logits = torch.nn.functional.pad(draft_logits, (0, missing), value=-torch.inf)
        spread = ((target_temperatures > 0) & (draft_temperatures > 0)).view(-1, 1, 1)
        q = torch.where(spread, probabilities(logits, draft_temperatures), certain)
    coins, noise = sampling.accept_noise(noise_key, noise_offset, batch, width - 1, vocab_size)
    live = verify_lens > 0
    correct, bonus, tokens = sampling.sampled_accept(
        drafts=drafts,
        target_probs=probabilities(target_logits.view(batch, width, -1), target_temperatures),
        draft_probs=q,
        verify_lens=verify_lens,
        coins=coins,
        noise=noise,
    )
    commit = torch.where(live, correct + 1, 0)
    out_correct_lens.copy_(torch.where(live, correct, 0))
    out_bonus_tokens.copy_(torch.where(live, bonus, 0))
    out_commit_lens.copy_(commit)
    out_new_seq_lens.copy_(seq_lens + commit)
    out_tokens.copy_(torch.where(live.unsqueeze(1), tokens, 0))
