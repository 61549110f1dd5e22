"""Random numbers and sampling of the embedded engine.

Every random number is a function of (key, counter): nothing depends on how requests share a
batch or on what ran before. The deciding functions take their numbers as arguments, so that a
test can check each decision exactly. Called by ``decode`` and ``stages``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
# Constants of Philox4x32-10 (Salmon et al., SC 2011): two multipliers, two key increments.
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def mix(*values: int) -> int:
    """A 64-bit key from any integers, order included (SplitMix64's finaliser over a running sum)."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK64)) + 0x9E3779B97F4A7C15 & _MASK64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK64
        state ^= state >> 31
    return state


def philox(key: int | Tensor, counter: tuple[int | Tensor, int | Tensor, int | Tensor, int | Tensor]) -> Tensor:
    """Philox4x32-10: four 32-bit words for every counter.

    ``key`` is 64-bit (a tensor holds it as int64); each word of ``counter`` is an int or an int64
    tensor, at least one a tensor; all are broadcast. Returns int64 [..., 4], values in [0, 2**32).
    """
    device = next(word.device for word in counter if isinstance(word, Tensor))
    c0, c1, c2, c3 = (torch.as_tensor(word, dtype=torch.int64, device=device) & _MASK32 for word in counter)
    k0, k1 = key & _MASK32, (key >> 32) & _MASK32
    for _ in range(_ROUNDS):
        low0, high0 = _multiply(c0, _MULTIPLIERS[0])
        low1, high1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _INCREMENTS[0]) & _MASK32, (k1 + _INCREMENTS[1]) & _MASK32
    return torch.stack([c0, c1, c2, c3], dim=-1)  # three rounds bring all four to the full shape


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    product = word * factor  # wraps modulo 2**64; the shift's sign bits are masked away
    return product & _MASK32, (product >> 32) & _MASK32


def uniforms(keys: Tensor, steps: Tensor) -> Tensor:
    """A uniform number in (0, 1), fp64 [B], from ``keys`` and ``steps`` [B] int64 of the requests."""
    words = philox(keys, (0, 0, steps, 0))
    return (words[..., 0].double() + 0.5) / 2.0**32


def accept_noise(key: int, offset: Tensor, batch: int, gamma: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Coins [B, G] and Gumbel noise [B, V], fp64, of one sampled accept; the numbers are the seam's."""
    signed = (key + 2**63) % 2**64 - 2**63
    seed = offset * 0x632BE59BD9B4E019 + signed  # int64 wraps
    rows = torch.arange(batch, device=offset.device).unsqueeze(1)
    drafts = rows * (gamma + 1) + torch.arange(gamma, device=offset.device)
    words = philox(seed, (drafts, 0, 0, 0))[..., 0]
    folded = torch.minimum(words, _MASK32 - words).clamp_min(1)
    coins = (folded.float() * (2.0**-31 - 2.0**-55)).double()
    hashed = murmur(seed, seed >> 32, rows, torch.arange(vocab_size, device=offset.device))
    uniform = ((hashed.double() + 0.5) / 2.0**32).float().clamp_max(1 - 2.0**-24).double()
    return coins, -torch.log(-torch.log1p(-uniform))


def simulated_lengths(simulated_correct: Tensor, verify_lens: Tensor) -> Tensor:
    """Accepted drafts [B] int64 where acceptance is simulated, as the seams cap it."""
    return torch.minimum(simulated_correct.long(), verify_lens.long() - 1).clamp_min(0)


def simulated_bonus(logits: Tensor, temperatures: Tensor, seed: Tensor) -> Tensor:
    """Ids [B] of ``logits`` [B, V] where acceptance is simulated; the numbers are the seam's, from ``seed`` [1]."""
    ids = torch.arange(logits.numel(), device=logits.device).view_as(logits)
    words = philox(seed.long(), (ids, 0, 0, 0))[..., 0]
    uniform = (torch.minimum(words, _MASK32 - words).float() * (2.0**-31 - 2.0**-55)).double()
    spread = logits.double().clamp_max(1e30) / temperatures.clamp_min(1e-5).double().unsqueeze(1)
    sampled = greedy(spread - (-uniform.log()).log())
    return torch.where(temperatures > 0, sampled, greedy(logits))


def murmur(*words: Tensor) -> Tensor:
    """MurmurHash3_x86_32, seed 0, of int64 tensors' low words, broadcast: int64 in [0, 2**32)."""

    def spin(value: Tensor, left: int) -> Tensor:
        return (value << left | value >> 32 - left) & _MASK32

    state = torch.zeros_like(words[-1])
    for word in words:
        state = state ^ spin(word * 0xCC9E2D51 & _MASK32, 15) * 0x1B873593 & _MASK32
        state = spin(state, 13) * 5 + 0xE6546B64 & _MASK32
    state = state ^ 4 * len(words)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & _MASK32
    return state ^ state >> 16


def greedy(logits: Tensor) -> Tensor:
    """Argmax [...] of ``logits`` [..., V]: the lowest id among equals, NaN never, id 0 if nothing is finite."""
    return logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argmax(-1)


def probabilities(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Softmax of ``logits`` [B, ..., V] at ``temperatures`` [B] in fp64.

    A NaN has probability 0. A row with no finite logit, and a row of temperature 0, is one-hot at its argmax.
    """
    scale = temperatures.double().view(-1, *[1] * (logits.dim() - 1))
    x = logits.double().nan_to_num(nan=-torch.inf, posinf=torch.finfo(torch.float64).max, neginf=-torch.inf)
    best = greedy(logits)
    dead = torch.isneginf(x).all(-1, keepdim=True) | (scale == 0)
    spread = (x - x.amax(-1, keepdim=True)) / scale
    return torch.where(dead, one_hot(best, logits.shape[-1]), spread.softmax(-1))


def one_hot(ids: Tensor, vocab_size: int) -> Tensor:
    """Probabilities fp64 [..., V] that are certain of ``ids`` [...]."""
    out = torch.zeros(*ids.shape, vocab_size, dtype=torch.float64, device=ids.device)
    return out.scatter_(-1, ids.unsqueeze(-1), 1.0)


def draw(probs: Tensor, numbers: Tensor) -> Tensor:
    """Ids [N] drawn from ``probs`` [N, V] (of any positive sum) by ``numbers`` [N] in [0, 1).

    Walks the cumulative sum, so an id of probability 0 is never drawn.
    """
    cumulative = probs.cumsum(-1)
    reached = (numbers * cumulative[:, -1]).unsqueeze(-1)
    return torch.searchsorted(cumulative, reached, right=True).squeeze(-1).clamp_max(probs.shape[-1] - 1)


class Accepted(NamedTuple):
    """What a step commits. ``tokens`` row: the accepted drafts, the bonus, then zeros."""

    correct: Tensor  # [B] int64, accepted drafts
    bonus: Tensor  # [B] int64
    tokens: Tensor  # [B, T] int64


def sampled_accept(
    *,
    drafts: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    verify_lens: Tensor,
    coins: Tensor,
    noise: Tensor,
) -> Accepted:
    """Rejection sampling of a drafted chain, exact in law (Leviathan et al. 2023, Chen et al. 2023).

    Draft d of step g stands iff ``coin * q(d) < p(d)``; the first that falls is replaced by a draw
    from ``max(p - q, 0)``; if all G stand, the bonus is drawn from p. The drafts of ``verify_lens`` rows are
    tested; if the last row's stands as well, no row is left for a bonus, and that draft is the last token.

    ``drafts`` [B, G] int64; ``target_probs`` [B, T, V] p; ``draft_probs`` [B, G, V] q, the law that the
    drafts were drawn from (one-hot for an argmax draft); ``verify_lens`` [B] in [1, T]; ``coins``
    [B, G] uniform in (0, 1); ``noise`` [B, V] Gumbel. A draft outside [0, V), or with no q(d) to speak of, falls.
    """
    batch, gamma = drafts.shape
    vocab_size = target_probs.shape[-1]
    inside = (drafts >= 0) & (drafts < vocab_size)
    ids = drafts.clamp(0, vocab_size - 1).unsqueeze(-1)
    p = target_probs[:, :gamma].gather(-1, ids).squeeze(-1)
    q = draft_probs.gather(-1, ids).squeeze(-1)
    possible = inside & (q > 2.0**-126)
    tested = torch.arange(gamma, device=drafts.device) < verify_lens.unsqueeze(1)
    stood = (possible & tested & (coins * q < p)).long().cumprod(1).sum(1)

    rows = torch.arange(batch, device=drafts.device)
    law, place = target_probs[rows, stood], stood.clamp_max(gamma - 1)
    residual = (law - draft_probs[rows, place]).clamp_min(0)
    # No residual means p <= q everywhere: rounding refused a draft of equal laws, and p is right.
    usable = (stood < gamma) & possible[rows, place] & (residual.sum(-1) > 0)
    drawn = greedy(torch.where(usable.unsqueeze(-1), residual, law).log() + noise)

    correct = torch.minimum(stood, verify_lens.long() - 1).clamp_min(0)
    bonus = torch.where(correct < stood, drafts[rows, (stood - 1).clamp_min(0)], drawn)
    columns = torch.arange(gamma + 1, device=drafts.device)
    tokens = torch.where(columns < correct.unsqueeze(1), torch.nn.functional.pad(drafts, (0, 1)), 0)
    tokens[rows, correct] = bonus
    return Accepted(correct, bonus, tokens)
