"""The embedded engine's own verify-accept stage."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_plugin.embedded import sampling
from sgl_mega_plugin.embedded.sampling import greedy, one_hot, probabilities


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
    """Argmax, compare, count, gather."""
    batch, width = candidates.shape
    vocab_size = 1 << 31
    if target_logits is not None:
        chosen, vocab_size = greedy(target_logits).view(batch, width), target_logits.shape[1]
    elif target_tokens is not None:
        chosen = target_tokens.masked_fill((target_tokens < 0) | (target_tokens >= vocab_size), 0)
    else:
        raise ValueError("greedy_accept: neither target_logits nor target_tokens")
    columns = torch.arange(width, device=candidates.device)
    matches = candidates[:, 1:] == chosen[:, :-1]
    matches &= columns[1:] < verify_lens.unsqueeze(1)
    correct = matches.int().cumprod(dim=1).sum(dim=1)
    bonus = chosen.gather(1, correct.unsqueeze(1)).squeeze(1)
    if simulated_correct is not None:
        correct = sampling.simulated_lengths(simulated_correct, verify_lens)
    tokens = _committed(candidates, correct, bonus, vocab_size)
    _write(
        correct,
        bonus,
        tokens,
        seq_lens=seq_lens,
        verify_lens=verify_lens,
        out_correct_lens=out_correct_lens,
        out_bonus_tokens=out_bonus_tokens,
        out_commit_lens=out_commit_lens,
        out_new_seq_lens=out_new_seq_lens,
        out_tokens=out_tokens,
    )


def sampled_accept(
    *,
    candidates: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    target_temperatures: Tensor,
    draft_temperatures: Tensor,
    target_cutoffs: Tensor | None,
    seq_lens: Tensor,
    verify_lens: Tensor,
    noise_key: int,
    noise_offset: Tensor,
    simulated_correct: Tensor | None,
    simulated_seed: Tensor | None,
    out_correct_lens: Tensor,
    out_bonus_tokens: Tensor,
    out_commit_lens: Tensor,
    out_new_seq_lens: Tensor,
    out_tokens: Tensor,
) -> None:
    """Both softmaxes, then rejection sampling. A greedy row's p is one-hot, and its drafts count as certain."""
    batch, width = candidates.shape
    vocab_size = target_logits.shape[1]
    logits = target_logits.view(batch, width, vocab_size)
    if target_cutoffs is not None:
        dropped = ~(logits.float().clamp_max(1e30) >= target_cutoffs.view(batch, width, 1))
        logits = logits.masked_fill(dropped & (target_temperatures > 0).view(-1, 1, 1), -torch.inf)
    if simulated_correct is not None and simulated_seed is not None:
        correct = sampling.simulated_lengths(simulated_correct, verify_lens)
        behind = logits[torch.arange(batch, device=logits.device), correct]
        bonus = sampling.simulated_bonus(behind, target_temperatures, simulated_seed)
        tokens = _committed(candidates, correct, bonus, vocab_size)
    else:
        drafts = candidates[:, 1:]
        certain = one_hot(drafts.clamp(0, vocab_size - 1), vocab_size)
        q = certain
        if draft_logits is not None:
            missing = vocab_size - draft_logits.shape[-1]
            known = torch.nn.functional.pad(draft_logits, (0, missing), value=-torch.inf)
            spread = ((target_temperatures > 0) & (draft_temperatures > 0)).view(-1, 1, 1)
            q = torch.where(spread, probabilities(known, draft_temperatures), certain)
        coins, noise = sampling.accept_noise(noise_key, noise_offset, batch, width - 1, vocab_size)
        correct, bonus, tokens = sampling.sampled_accept(
            drafts=drafts,
            target_probs=probabilities(logits, target_temperatures),
            draft_probs=q,
            verify_lens=verify_lens,
            coins=coins,
            noise=noise,
        )
    _write(
        correct,
        bonus,
        tokens,
        seq_lens=seq_lens,
        verify_lens=verify_lens,
        out_correct_lens=out_correct_lens,
        out_bonus_tokens=out_bonus_tokens,
        out_commit_lens=out_commit_lens,
        out_new_seq_lens=out_new_seq_lens,
        out_tokens=out_tokens,
    )


def sampling_cutoffs(
    *,
    target_logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    verify_lens: Tensor,
    out_cutoffs: Tensor,
) -> None:
    """Sort each row, then cut the sorted masses."""
    batch, vocab_size = len(verify_lens), target_logits.shape[1]
    width = len(target_logits) // batch
    rows = torch.arange(batch * width, device=target_logits.device)
    live = (rows % width < verify_lens[rows // width]) & (temperatures[rows // width] > 0)
    k, p, m = (value[rows // width].unsqueeze(1) for value in (top_ks, top_ps, min_ps))
    by_k, by_p, by_m = (k > 0) & (k < vocab_size), p < 1, m > 0
    logits = target_logits.float().nan_to_num(nan=-torch.inf, posinf=1e30, neginf=-torch.inf).clamp_max(1e30)
    ordered = logits.sort(-1, descending=True).values + 0.0
    kth = ordered.gather(1, (k.long() - 1).clamp(0, vocab_size - 1))
    kept = ~by_k | (ordered >= kth)
    heat = torch.where(temperatures > 0, temperatures, 1.0)[rows // width].double()
    mass = ((ordered - ordered[:, :1]).double() / heat.unsqueeze(1)).exp().nan_to_num(0.0)
    mass = mass.masked_fill(~kept, 0.0)
    before = mass.cumsum(-1) - mass
    # Equal logits stay or go together: all have what lies before the first of them.
    first = torch.searchsorted(-ordered, -ordered)
    before = before.gather(1, first)
    kept &= ~by_p | (before < p.double() * mass.sum(-1, keepdim=True)) | (first == 0)
    kept &= ~by_m | (mass >= m.double()) | (first == 0)
    cutoffs = ordered.masked_fill(~kept, torch.inf).amin(-1)
    asked = (by_k | by_p | by_m).squeeze(1)
    out_cutoffs.copy_(torch.where(live & asked, cutoffs, -torch.inf))


def _committed(candidates: Tensor, correct: Tensor, bonus: Tensor, vocab_size: int) -> Tensor:
    """[B, T]: as many drafts as are correct, the bonus, zeros; a draft that is no id is 0."""
    drafts = torch.nn.functional.pad(candidates[:, 1:], (0, 1))
    drafts = drafts.masked_fill((drafts < 0) | (drafts >= vocab_size), 0)
    columns = torch.arange(candidates.shape[1], device=candidates.device)
    tokens = torch.where(columns < correct.unsqueeze(1), drafts, 0)
    return tokens.scatter(1, correct.long().unsqueeze(1), bonus.unsqueeze(1))


def _write(
    correct: Tensor,
    bonus: Tensor,
    tokens: Tensor,
    *,
    seq_lens: Tensor,
    verify_lens: Tensor,
    out_correct_lens: Tensor,
    out_bonus_tokens: Tensor,
    out_commit_lens: Tensor,
    out_new_seq_lens: Tensor,
    out_tokens: Tensor,
) -> None:
    """Outputs of the live rows; zeros in the others."""
    live = verify_lens > 0
    commit = torch.where(live, correct + 1, 0)
    out_correct_lens.copy_(torch.where(live, correct, 0))
    out_bonus_tokens.copy_(torch.where(live, bonus, 0))
    out_commit_lens.copy_(commit)
    out_new_seq_lens.copy_(seq_lens + commit)
    out_tokens.copy_(torch.where(live.unsqueeze(1), tokens, 0))
