"""The inputs of each seam at a size, and the bytes that a call on them cannot avoid.

Seam-driven: any distribution's slot is timed on the workload of its seam. Random data, never zeros, and the
same on every run; what is as large as a model's weights or its KV pool is shared by the input sets of a size.
Used by ``runner``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.bench.records import Cost, Settings, Size

Arguments = Mapping[str, Any]

GAMMA = 7
MARKOV_RANK = 256
#: A dense five-layer draft with the KV of Qwen3-8B.
LAYERS, HEADS, HEAD_SIZE = 5, 8, 128
ROPE_POSITIONS = 40_960
KV_SLOTS = 32_768
POOL_ROWS, POOL_COLUMNS = 64, 8_192
NOISE_KEY = 0x5DEECE66D
_SEED = 20_260


@dataclass(frozen=True)
class Source:
    """Random numbers on a device, and whether they repeat: a set has its own seed."""

    device: str
    generator: torch.Generator

    @classmethod
    def seeded(cls, device: str, seed: int) -> Source:
        return cls(device, torch.Generator(device).manual_seed(seed))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device, dtype=dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def distinct(self, count: int, limit: int) -> Tensor:
        """``count`` different int64 in [0, limit)."""
        return torch.randperm(limit, generator=self.generator, device=self.device)[:count]

    def empty(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Workload:
    """How a seam's arguments are made and counted.

    ``shared(size, source)`` makes what every input set of a size has in common, ``make(size, source, shared)``
    the seam's arguments. ``cost(arguments)`` counts bytes.
    """

    seam: str
    shared: Callable[[Size, Source], dict[str, Any]]
    make: Callable[[Size, Source, dict[str, Any]], dict[str, Any]]
    cost: Callable[[Arguments], Cost]
    variants: tuple[str, ...] = ("",)
    shows_vocab: bool = True  # and the dtype of the logits

    def sizes(self, settings: Settings) -> list[Size]:
        """Every size of a run, the batch sizes of one curve together."""
        if self.shows_vocab:
            curves = product(self.variants, settings.vocabs, settings.dtypes)
            return [
                Size(seam=self.seam, variant=variant, batch=batch, vocab=vocab, dtype=dtype)
                for variant, vocab, dtype in curves
                for batch in settings.batches
            ]
        return [Size(seam=self.seam, variant=v, batch=b) for v in self.variants for b in settings.batches]

    def sets(self, size: Size, device: str, count: int) -> list[dict[str, Any]]:
        """``count`` sets of arguments with different contents."""
        shared = self.shared(size, Source.seeded(device, _SEED))
        return [self.make(size, Source.seeded(device, _SEED + 1 + index), shared) for index in range(count)]


def slot_vocab(size: Size) -> int:
    """V that a slot is set up with; a seam without a vocabulary has any."""
    return size.vocab or 1


def _dtype(size: Size) -> torch.dtype:
    found = getattr(torch, size.dtype or "")
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{size.dtype!r} is no dtype of torch")
    return found


def _nothing_shared(size: Size, source: Source) -> dict[str, Any]:
    return {}


def _nbytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _draft_shared(size: Size, source: Source) -> dict[str, Any]:
    """Weights [V, R] bf16 whose bias has unit variance."""
    scale = MARKOV_RANK**-0.25
    weights = (source.normal(slot_vocab(size), MARKOV_RANK).mul_(scale).bfloat16() for _ in range(2))
    return dict(zip(("markov_w1", "markov_w2"), weights, strict=True))


def _draft_block(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    batch, vocab, dtype = size.batch, slot_vocab(size), _dtype(size)
    sampled = size.variant == "sampled"
    logits = (batch, GAMMA, vocab)
    step_dtype = torch.promote_types(dtype, shared["markov_w1"].dtype)
    return {
        "base_logits": source.normal(*logits, dtype=dtype),
        "anchor_tokens": source.integers(0, vocab, batch),
        **shared,
        "temperatures": torch.full((batch,), float(sampled), device=source.device),
        "noise_key": NOISE_KEY,
        "noise_offset": source.integers(0, 1 << 30, 1),
        "out_draft_tokens": source.empty(batch, GAMMA),
        "out_step_logits": source.empty(*logits, dtype=step_dtype) if sampled else None,
    }


def _draft_cost(a: Arguments) -> Cost:
    batch, gamma = a["out_draft_tokens"].shape
    rows = batch * gamma * _nbytes(a["markov_w1"][0])
    read = _nbytes(a["base_logits"], a["anchor_tokens"], a["markov_w2"], a["temperatures"], a["noise_offset"]) + rows
    step_logits = a["out_step_logits"]
    written = _nbytes(a["out_draft_tokens"]) + (0 if step_logits is None else _nbytes(step_logits))
    note = f"markov_w2 once; steps that depend on each other read it {gamma} times unless it stays on the chip"
    return Cost(bytes_read=read, bytes_written=written, note=note)


def _lengths(size: Size, source: Source) -> dict[str, Any]:
    """Lengths before the step, every row of the window verified, and the accept's outputs."""
    batch, rows = size.batch, GAMMA + 1
    return {
        "seq_lens": source.integers(1, POOL_COLUMNS - rows, batch),
        "verify_lens": torch.full((batch,), rows, dtype=torch.int32, device=source.device),
        "out_correct_lens": source.empty(batch, dtype=torch.int32),
        "out_bonus_tokens": source.empty(batch),
        "out_commit_lens": source.empty(batch, dtype=torch.int32),
        "out_new_seq_lens": source.empty(batch),
        "out_tokens": source.empty(batch, rows),
    }


def _greedy_accept(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    """Drafts that agree with the target's argmax three times in four."""
    batch, vocab, rows = size.batch, slot_vocab(size), GAMMA + 1
    logits = source.normal(batch * rows, vocab, dtype=_dtype(size))
    candidates = source.integers(0, vocab, batch, rows)
    agrees = source.uniform(batch, GAMMA) < 0.75
    winners = logits.argmax(-1).view(batch, rows)[:, :-1]
    candidates[:, 1:] = torch.where(agrees, winners, candidates[:, 1:])
    return {"candidates": candidates, "target_logits": logits} | _lengths(size, source)


def _sampled_accept(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    """Drafts drawn from the draft's own law, which is near the target's, or its argmax; temperature 1."""
    batch, vocab, rows = size.batch, slot_vocab(size), GAMMA + 1
    sampled = size.variant == "sampled"
    target = source.normal(batch, rows, vocab).mul_(3.0)  # a few hundred likely tokens, not all of V
    draft = target[:, :-1] + source.normal(batch, GAMMA, vocab).mul_(0.5)
    uniform = source.uniform(batch, GAMMA, vocab).clamp_(1e-20, 1 - 2.0**-24)
    candidates = source.integers(0, vocab, batch, rows)
    candidates[:, 1:] = (draft - torch.log(-torch.log(uniform)) if sampled else draft).argmax(-1)
    ones = torch.ones(batch, device=source.device)
    return {
        "candidates": candidates,
        "target_logits": target.view(batch * rows, vocab).to(_dtype(size)),
        "draft_logits": draft.to(_dtype(size)) if sampled else None,
        "target_temperatures": ones,
        "draft_temperatures": ones.clone(),
        "noise_key": NOISE_KEY,
        "noise_offset": source.integers(0, 1 << 30, 1),
    } | _lengths(size, source)


def _all_tensors(a: Arguments) -> Cost:
    """Every input once and every output once."""
    tensors = {name: value for name, value in a.items() if isinstance(value, Tensor)}
    written = _nbytes(*(value for name, value in tensors.items() if name.startswith("out_")))
    return Cost(bytes_read=_nbytes(*tensors.values()) - written, bytes_written=written)


def _step_inputs_shared(size: Size, source: Source) -> dict[str, Any]:
    rows = max(POOL_ROWS, size.batch)
    return {"req_to_token": source.integers(1, KV_SLOTS, rows, POOL_COLUMNS).int()}


def _step_inputs(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    batch, rows = size.batch, GAMMA + 1
    table = shared["req_to_token"]
    return {
        "req_pool_indices": source.distinct(batch, len(table)),
        "req_to_token": table,
        "seq_lens": source.integers(1, POOL_COLUMNS - rows, batch),
        "verify_lens": torch.full((batch,), rows, dtype=torch.int32, device=source.device),
        "anchor_tokens": source.integers(0, 49_152, batch),
        "mask_token": 49_151,
        "max_positions": POOL_COLUMNS,
        "out_positions": source.empty(batch, rows),
        "out_cache_locs": source.empty(batch, rows),
        "out_draft_ids": source.empty(batch, GAMMA),
    }


def _step_inputs_cost(a: Arguments) -> Cost:
    everything = _all_tensors(a)
    table, entries = a["req_to_token"], a["out_cache_locs"].numel()
    read = everything.bytes_read - _nbytes(table) + entries * table.element_size()
    note = "of the request table only the window's entries"
    return Cost(bytes_read=read, bytes_written=everything.bytes_written, note=note)


def _context_kv_shared(size: Size, source: Source) -> dict[str, Any]:
    frequencies = 1e6 ** (-torch.arange(0, HEAD_SIZE, 2, device=source.device) / HEAD_SIZE)
    angles = torch.arange(ROPE_POSITIONS, device=source.device)[:, None] * frequencies
    buffer = (KV_SLOTS, HEADS, HEAD_SIZE)
    return {
        "k_norm_weights": source.normal(LAYERS, HEAD_SIZE, dtype=torch.bfloat16),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=-1).float(),
        "eps": 1e-6,
        "out_keys": [source.normal(*buffer, dtype=torch.bfloat16) for _ in range(LAYERS)],
        "out_values": [source.normal(*buffer, dtype=torch.bfloat16) for _ in range(LAYERS)],
    }


def _context_kv(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    """Windows at random places of sequence and pool; commit lengths from 1 to T, each as likely."""
    batch, rows = size.batch, GAMMA + 1
    start = source.integers(0, ROPE_POSITIONS - rows, batch, 1)
    return shared | {
        "projected_kv": source.normal(batch * rows, LAYERS, 2, HEADS, HEAD_SIZE, dtype=torch.bfloat16),
        "positions": start + torch.arange(rows, device=source.device),
        "cache_locs": source.distinct(batch * rows, KV_SLOTS - 1).view(batch, rows) + 1,
        "commit_lens": source.integers(1, rows + 1, batch).int(),
    }


def _context_kv_cost(a: Arguments) -> Cost:
    """Committed rows only: their K and V in and out, their places, their row of the RoPE table, the weights."""
    committed = int(a["commit_lens"].sum())
    row = _nbytes(a["projected_kv"][0])
    places = 2 * a["positions"].element_size() + _nbytes(a["cos_sin"][0])
    read = committed * (row + places) + _nbytes(a["commit_lens"], a["k_norm_weights"])
    return Cost(bytes_read=read, bytes_written=committed * row, note="rows up to each commit length")


#: The workload of every seam, in the order of a step.
WORKLOADS: dict[str, Workload] = {
    workload.seam: workload
    for workload in (
        Workload("step_inputs", _step_inputs_shared, _step_inputs, _step_inputs_cost, shows_vocab=False),
        Workload("draft_block", _draft_shared, _draft_block, _draft_cost, variants=("greedy", "sampled")),
        Workload("greedy_accept", _nothing_shared, _greedy_accept, _all_tensors),
        Workload("sampled_accept", _nothing_shared, _sampled_accept, _all_tensors, variants=("sampled", "one_hot")),
        Workload("context_kv", _context_kv_shared, _context_kv, _context_kv_cost, shows_vocab=False),
    )
}
