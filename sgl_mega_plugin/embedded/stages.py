"""The embedded engine's own stages: what runs where no slot does.

Plain torch, an operator at a time, as an engine without fused kernels does it. This is the
baseline that slots are compared with, so it shares no code with any slot. Each function has
the signature and the meaning of its seam in ``contract.seams``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_mega_plugin.contract import PADDING_SLOT
from sgl_mega_plugin.embedded import sampling
from sgl_mega_plugin.embedded.sampling import greedy, one_hot, philox, probabilities


def draft_block(
    *,
    base_logits: Tensor,
    anchor_tokens: Tensor,
    markov_w1: Tensor,
    markov_w2: Tensor,
    temperatures: Tensor,
    noise_key: int,
    noise_offset: Tensor,
    out_draft_tokens: Tensor,
    out_step_logits: Tensor | None,
) -> None:
    """Markov steps one after the other; a sampled row adds Gumbel noise before its argmax."""
    gamma, vocab_size = base_logits.shape[1:]
    sampled = temperatures > 0
    divisor = torch.where(sampled, temperatures, 1.0).unsqueeze(1)
    noisy = bool(sampled.any())
    transposed = markov_w2.float().T
    previous = anchor_tokens
    for step in range(gamma):
        known = ((previous >= 0) & (previous < vocab_size)).unsqueeze(1)
        features = torch.where(known, markov_w1[previous.clamp(0, vocab_size - 1)], 0)
        bias = (features.float() @ transposed).to(markov_w2.dtype)
        exact = base_logits[:, step].float() + bias.float()
        logits = exact.to(torch.promote_types(base_logits.dtype, markov_w2.dtype))
        scores = logits.float()
        if noisy:
            noise = _gumbel(noise_key, noise_offset, step, base_logits.shape[0], vocab_size)
            scores = torch.where(sampled.unsqueeze(1), scores / divisor + noise, scores)
        previous = greedy(scores)
        out_draft_tokens[:, step] = previous
        if out_step_logits is not None:
            out_step_logits[:, step] = torch.where(sampled.unsqueeze(1), logits, out_step_logits[:, step])


def _gumbel(key: int, offset: Tensor, step: int, rows: int, vocab_size: int) -> Tensor:
    """Gumbel noise [rows, V] fp32 of one draft step; the counter is the seam's."""
    groups = torch.arange(-(-vocab_size // 4), device=offset.device)
    row = torch.arange(rows, device=offset.device).unsqueeze(1)
    words = philox(key, (groups, row, step, offset)).flatten(1)[:, :vocab_size]
    uniform = ((words.float() + 0.5) / 2.0**32).clamp_max(1 - 2.0**-24)  # 1 would make infinite noise
    return -torch.log(-torch.log1p(-uniform))


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


def context_kv(
    *,
    projected_kv: Tensor,
    k_norm_weights: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    cache_locs: Tensor,
    commit_lens: Tensor,
    eps: float,
    out_keys: Sequence[Tensor],
    out_values: Sequence[Tensor],
) -> None:
    """Select the committed rows; then norm, rotate and store each layer's."""
    columns = torch.arange(positions.shape[1], device=positions.device)
    slots = out_keys[0].shape[0]
    kept = columns < commit_lens.unsqueeze(1)
    kept &= (cache_locs != PADDING_SLOT) & (cache_locs >= 0) & (cache_locs < slots)
    kept &= (positions >= 0) & (positions < len(cos_sin))
    rows = kept.flatten().nonzero().squeeze(1)
    where = cache_locs.flatten()[rows]
    cos, sin = cos_sin[positions.flatten()[rows]].unsqueeze(1).chunk(2, dim=-1)
    for layer, (keys, values) in enumerate(zip(out_keys, out_values, strict=True)):
        key, value = projected_kv[rows, layer, 0], projected_kv[rows, layer, 1]
        exact = key.float()
        scale = torch.rsqrt(exact.pow(2).mean(dim=-1, keepdim=True) + eps)
        normed = (exact * scale * k_norm_weights[layer].float()).to(key.dtype)
        first, second = normed.float().chunk(2, dim=-1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        keys.index_copy_(0, where, rotated.to(keys.dtype))
        values.index_copy_(0, where, value.to(values.dtype))
