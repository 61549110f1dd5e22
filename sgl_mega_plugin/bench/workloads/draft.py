"""Workloads of the draft stage's seams."""

from __future__ import annotations

from typing import Any

import torch

from sgl_mega_plugin.bench.records import Cost, Size
from sgl_mega_plugin.bench.workloads import sizes
from sgl_mega_plugin.bench.workloads.workload import Arguments, Source, Workload, dtype_of, nbytes, slot_vocab


def _draft_shared(size: Size, source: Source) -> dict[str, Any]:
    """Weights [V, R] bf16 whose bias has unit variance."""
    scale = sizes.MARKOV_RANK**-0.25
    weights = (source.normal(slot_vocab(size), sizes.MARKOV_RANK).mul_(scale).bfloat16() for _ in range(2))
    return dict(zip(("markov_w1", "markov_w2"), weights, strict=True))


def _draft_block(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    batch, vocab, dtype = size.batch, slot_vocab(size), dtype_of(size)
    sampled = size.variant == "sampled"
    logits = (batch, sizes.GAMMA, vocab)
    step_dtype = torch.promote_types(dtype, shared["markov_w1"].dtype)
    return {
        "base_logits": source.normal(*logits, dtype=dtype),
        "anchor_tokens": source.integers(0, vocab, batch, sizes.GAMMA)[:, 0],  # a column, as in SGLang
        **shared,
        **dict.fromkeys(("draft_hidden", "mixer_weight", "mixer_bias", "out_features")),
        "temperatures": torch.full((batch,), float(sampled), device=source.device),
        "noise_key": sizes.NOISE_KEY,
        "noise_offset": source.integers(0, 1 << 30, 1),
        "out_draft_tokens": source.empty(batch, sizes.GAMMA),
        "out_step_logits": source.empty(*logits, dtype=step_dtype) if sampled else None,
    }


def _draft_cost(a: Arguments) -> Cost:
    batch, gamma = a["out_draft_tokens"].shape
    rows = batch * gamma * nbytes(a["markov_w1"][0])
    read = nbytes(a["base_logits"], a["anchor_tokens"], a["markov_w2"], a["temperatures"], a["noise_offset"]) + rows
    step_logits = a["out_step_logits"]
    written = nbytes(a["out_draft_tokens"]) + (0 if step_logits is None else nbytes(step_logits))
    note = f"markov_w2 once; steps that depend on each other read it {gamma} times unless it stays on the chip"
    return Cost(bytes_read=read, bytes_written=written, note=note)


WORKLOADS = (Workload("draft_block", _draft_shared, _draft_block, _draft_cost, variants=("greedy", "sampled")),)
