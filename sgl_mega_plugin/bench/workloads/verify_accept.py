"""Workloads of the verify-accept stage's seams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.bench.records import Size
from sgl_mega_plugin.bench.workloads import sizes
from sgl_mega_plugin.bench.workloads.workload import Source, Workload, all_tensors, dtype_of, nothing_shared, slot_vocab

#: What each variant of ``sampling_cutoffs`` asks for: top_k, top_p, min_p. The first is Qwen3's own generation config.
_CUTS = {"top_k_top_p": (20, 0.95, 0.0), "top_p": (1 << 30, 0.9, 0.0), "min_p": (1 << 30, 1.0, 0.05)}
_SPREAD = 3.0  # of the target's logits: a few hundred likely tokens, not all of V


def _lengths(size: Size, source: Source) -> dict[str, Any]:
    """Lengths before the step, every row of the window verified, and the accept's outputs."""
    batch, rows = size.batch, sizes.GAMMA + 1
    return {
        "seq_lens": source.integers(1, sizes.POOL_COLUMNS - rows, batch),
        "verify_lens": torch.full((batch,), rows, dtype=torch.int32, device=source.device),
        "simulated_correct": None,
        "out_correct_lens": source.empty(batch, dtype=torch.int32),
        "out_bonus_tokens": source.empty(batch),
        "out_commit_lens": source.empty(batch, dtype=torch.int32),
        "out_new_seq_lens": source.empty(batch),
        "out_tokens": source.empty(batch, rows),
    }


def _greedy_accept(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    """Drafts that agree with the target's argmax three times in four; the argmax is found here, or given."""
    batch, vocab, rows = size.batch, slot_vocab(size), sizes.GAMMA + 1
    logits = source.normal(batch * rows, vocab, dtype=dtype_of(size))
    candidates = source.integers(0, vocab, batch, rows)
    agrees = source.uniform(batch, sizes.GAMMA) < 0.75
    winners = logits.argmax(-1).view(batch, rows)
    candidates[:, 1:] = torch.where(agrees, winners[:, :-1], candidates[:, 1:])
    target = (None, winners) if size.variant == "argmax" else (logits, None)
    return dict(zip(("target_logits", "target_tokens"), target, strict=True)) | {
        "candidates": candidates,
        **_lengths(size, source),
    }


def _sampled_accept(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    """Drafts drawn from the draft's own law, which is near the target's, or its argmax; temperature 1."""
    batch, vocab, rows = size.batch, slot_vocab(size), sizes.GAMMA + 1
    sampled = size.variant == "sampled"
    target = source.normal(batch, rows, vocab).mul_(_SPREAD)
    draft = target[:, :-1] + source.normal(batch, sizes.GAMMA, vocab).mul_(0.5)
    uniform = source.uniform(batch, sizes.GAMMA, vocab).clamp_(1e-20, 1 - 2.0**-24)
    candidates = source.integers(0, vocab, batch, rows)
    candidates[:, 1:] = (draft - torch.log(-torch.log(uniform)) if sampled else draft).argmax(-1)
    ones = torch.ones(batch, device=source.device)
    return {
        "candidates": candidates,
        "target_logits": target.view(batch * rows, vocab).to(dtype_of(size)),
        "draft_logits": draft.to(dtype_of(size)) if sampled else None,
        "target_temperatures": ones,
        "draft_temperatures": ones.clone(),
        "target_cutoffs": None,
        "noise_key": sizes.NOISE_KEY,
        "noise_offset": source.integers(0, 1 << 30, 1),
        "simulated_seed": None,
    } | _lengths(size, source)


def _sampling_cutoffs(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    """Logits of the same spread at temperature 0.6, all requests with the variant's parameters."""
    batch, vocab, rows = size.batch, slot_vocab(size), sizes.GAMMA + 1
    top_k, top_p, min_p = _CUTS[size.variant]

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((batch,), value, dtype=dtype, device=source.device)

    return {
        "target_logits": source.normal(batch * rows, vocab).mul_(_SPREAD).to(dtype_of(size)),
        "temperatures": column(0.6),
        "top_ks": column(top_k, torch.int32),
        "top_ps": column(top_p),
        "min_ps": column(min_p),
        "verify_lens": column(rows, torch.int32),
        "out_cutoffs": source.empty(batch * rows, dtype=torch.float32),
    }


WORKLOADS = (
    Workload("greedy_accept", nothing_shared, _greedy_accept, all_tensors, variants=("", "argmax")),
    Workload("sampled_accept", nothing_shared, _sampled_accept, all_tensors, variants=("sampled", "one_hot")),
    Workload("sampling_cutoffs", nothing_shared, _sampling_cutoffs, all_tensors, variants=tuple(_CUTS)),
)
