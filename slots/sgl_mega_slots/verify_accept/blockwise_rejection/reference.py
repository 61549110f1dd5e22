"""`sampled_accept` in plain torch and fp64: the definition that the kernel is compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sgl_mega_slots.common.murmur import murmur3_32
from sgl_mega_slots.common.philox import LARGEST_UNIFORM, philox_4x32_10
from sgl_mega_slots.common.pick import lowest_argmax
from sgl_mega_slots.verify_accept.books import keep_books, simulated_lengths

_SEED_STEP = 0x632BE59BD9B4E019
#: A coin is an integer below 2**31 times this, the fp32 before 2**-31; integer 0 counts as 1.
_COIN_UNIT = 2.0**-31 * (1 - 2.0**-24)
_LARGEST = 1e30
_NO_MASS = -126 * math.log(2)


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
    """See :class:`sgl_mega_plugin.contract.SampledAccept`.

    Raises:
        ValueError: ``simulated_correct`` without ``simulated_seed``, or the other way round.
    """
    if (simulated_correct is None) != (simulated_seed is None):
        raise ValueError("simulated_correct, simulated_seed: both or neither must be given")
    batch, rows = candidates.shape
    vocab = target_logits.shape[-1]
    logits = kept_logits(target_logits.view(batch, rows, vocab), target_temperatures, target_cutoffs)
    if simulated_correct is not None and simulated_seed is not None:
        correct = simulated_lengths(simulated_correct, verify_lens)
        bonus = simulated_bonus(logits, target_temperatures, correct, simulated_seed)
    else:
        correct, bonus = decide(
            candidates=candidates,
            target_logits=logits,
            draft_logits=draft_logits,
            target_temperatures=target_temperatures,
            draft_temperatures=draft_temperatures,
            verify_lens=verify_lens,
            coins=accept_coins(batch, rows, noise_key, noise_offset),
            noise=gumbel_noise(batch, vocab, noise_key, noise_offset),
        )
    keep_books(
        correct,
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


def kept_logits(logits: Tensor, temperatures: Tensor, cutoffs: Tensor | None) -> Tensor:
    """Target logits [B, T, V] with those of sampled rows below the cutoff of their row, [B * T], at -inf."""
    if cutoffs is None:
        return logits
    kept = logits.float().clamp(max=_LARGEST) >= cutoffs.view(*logits.shape[:-1], 1)
    return torch.where(kept | (temperatures <= 0)[:, None, None], logits, -torch.inf)


def simulated_bonus(logits: Tensor, temperatures: Tensor, correct: Tensor, seed: Tensor) -> Tensor:
    """Ids [B] of the row behind ``correct`` accepted drafts: its argmax, or a draw by the step's seed."""
    law = logits[torch.arange(len(logits), device=logits.device), correct]
    drawn = lowest_argmax(simulated_scores(law, temperatures, seed))
    return torch.where(temperatures > 0, drawn, lowest_argmax(law))


def simulated_scores(law: Tensor, temperatures: Tensor, seed: Tensor) -> Tensor:
    """What the simulated bonus is the argmax of, fp64 [B, V], for logits [B, V] of the rows behind the drafts."""
    index = torch.arange(law.numel(), device=law.device).view_as(law)
    zero = torch.zeros_like(index)
    word = philox_4x32_10(seed.long()[:, None], (index, zero, zero, zero))[0]
    uniform = (torch.where(word >= 1 << 31, 0xFFFFFFFF - word, word).to(torch.float32) * _COIN_UNIT).double()
    values = law.double().clamp(max=_LARGEST).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    return values / temperatures.clamp(min=1e-5).double()[:, None] - torch.log(-torch.log(uniform))


def decide(
    *,
    candidates: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    target_temperatures: Tensor,
    draft_temperatures: Tensor,
    verify_lens: Tensor,
    coins: Tensor,
    noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accepted drafts and bonus, int64 [B] each, 0 on padding rows, for numbers of the caller's choice.

    Args:
        target_logits: [B, T, V].
        coins: [B, G] in (0, 1).
        noise: [B, V], Gumbel.
    """
    batch, rows = candidates.shape
    device = candidates.device
    each = torch.arange(batch, device=device)
    log_p = log_law(target_logits, target_temperatures)
    log_q, drafts = draft_law(candidates, draft_logits, draft_temperatures, log_p.shape[-1]), candidates[:, 1:]
    inside = (drafts >= 0) & (drafts < log_p.shape[-1])
    ids = torch.where(inside, drafts, 0)[..., None]
    of_p, of_q = log_p[:, :-1].gather(-1, ids).squeeze(-1), log_q.gather(-1, ids).squeeze(-1)
    possible = inside & (of_q > _NO_MASS)
    ratio = torch.where(possible, of_p - torch.where(possible, of_q, 0), -torch.inf).exp()

    sampled = (target_temperatures > 0)[:, None]
    winners = lowest_argmax(target_logits)
    tested = torch.arange(rows - 1, device=device) < verify_lens[:, None]
    stands = tested & torch.where(sampled, coins.double() < ratio, drafts == winners[:, :-1])
    stood = stands.long().cumprod(dim=1).sum(dim=1)

    # At the first draft that fell: max(p - q, 0) if the draft can come from q, else p; past the last one p.
    at = stood.clamp(max=rows - 2)
    refused = (stood < rows - 1) & possible[each, at]
    law, q = log_p[each, stood], torch.where(refused[:, None], log_q[each, at], -torch.inf)
    residual = torch.where(law > q, law + torch.log1p(-(q - torch.where(law > q, law, 0)).exp()), -torch.inf)
    # Nothing left means equal laws, of which rounding refused a draft: p is right.
    law = torch.where((residual > -torch.inf).any(-1, keepdim=True), residual, law)
    drawn = torch.where(sampled.squeeze(1), lowest_argmax(law + noise), winners[each, stood])

    # The verify length may cut the block behind a draft that stands: that draft is the last token.
    correct = torch.minimum(stood, (verify_lens - 1).clamp(min=0).long())
    last = candidates[each, stood]
    bonus = torch.where(correct < stood, last, drawn)
    return correct, torch.where(verify_lens > 0, bonus, 0)


def log_law(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Log-probabilities fp64 [B, N, V] of logits [B, N, V]; a row of temperature 0 counts as temperature 1.

    NaN has no mass, what is above 1e30 counts as 1e30, and a row with nothing above -inf is certain of id 0.
    """
    values = logits.double().clamp(max=_LARGEST).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    top = values.amax(-1, keepdim=True)
    dead = top == -torch.inf
    scale = torch.where(temperatures > 0, temperatures, 1.0).double()[:, None, None]
    laws = torch.log_softmax((values - torch.where(dead, 0, top)) / scale, dim=-1)
    certain = torch.full_like(laws[:1, :1], -torch.inf)
    certain[..., 0] = 0
    return torch.where(dead, certain, laws)


def draft_law(candidates: Tensor, draft_logits: Tensor | None, temperatures: Tensor, vocab: int) -> Tensor:
    """Log-probabilities fp64 [B, G, V] that drafts came from; ids outside the draft's vocabulary have none.

    Without logits, and on rows of draft temperature 0, a draft is certain of itself.
    """
    drafts = candidates[:, 1:, None]
    ids = torch.arange(vocab, device=candidates.device)
    law = torch.where(ids == drafts, 0.0, -torch.inf).double()
    if draft_logits is None:
        return law
    soft = torch.full_like(law, -torch.inf)
    soft[..., : draft_logits.shape[-1]] = log_law(draft_logits, temperatures)
    return torch.where((temperatures > 0)[:, None, None], soft, law)


def step_seed(noise_key: int, noise_offset: Tensor) -> Tensor:
    """The step's 64-bit seed in an int64 [1], which wraps."""
    key = noise_key & 0xFFFFFFFFFFFFFFFF
    return noise_offset * _SEED_STEP + (key - (1 << 64) if key >= 1 << 63 else key)


def accept_coins(batch: int, rows: int, noise_key: int, noise_offset: Tensor) -> Tensor:
    """Coins [B, G] fp32 in (0, 1) of a step."""
    device = noise_offset.device
    index = torch.arange(batch, device=device)[:, None] * rows + torch.arange(rows - 1, device=device)
    zero = torch.zeros_like(index)
    word = philox_4x32_10(step_seed(noise_key, noise_offset), (index, zero, zero, zero))[0]
    folded = torch.where(word >= 1 << 31, 0xFFFFFFFF - word, word)
    return folded.clamp(min=1).to(torch.float32) * _COIN_UNIT


def gumbel_noise(batch: int, vocab: int, noise_key: int, noise_offset: Tensor) -> Tensor:
    """``-log(-log1p(-u))`` [B, V] fp64 of a step, ``u`` in fp32."""
    device = noise_offset.device
    seed = step_seed(noise_key, noise_offset)[:, None]
    row, ids = torch.arange(batch, device=device)[:, None], torch.arange(vocab, device=device)[None, :]
    word = murmur3_32(seed, seed >> 32, row, ids)
    uniform = ((word.double() + 0.5) * 2.0**-32).to(torch.float32).clamp(max=LARGEST_UNIFORM).double()
    return -torch.log(-torch.log1p(-uniform))
