"""Workloads of the commit stage's seams."""

from __future__ import annotations

from typing import Any

import torch

from sgl_mega_plugin.bench.records import Cost, Size
from sgl_mega_plugin.bench.workloads import sizes
from sgl_mega_plugin.bench.workloads.workload import Arguments, Source, Workload, nbytes


def _context_kv_shared(size: Size, source: Source) -> dict[str, Any]:
    frequencies = 1e6 ** (-torch.arange(0, sizes.HEAD_SIZE, 2, device=source.device) / sizes.HEAD_SIZE)
    angles = torch.arange(sizes.ROPE_POSITIONS, device=source.device)[:, None] * frequencies
    buffer = (sizes.KV_SLOTS, sizes.HEADS, sizes.HEAD_SIZE)
    return {
        "k_norm_weights": source.normal(sizes.LAYERS, sizes.HEAD_SIZE, dtype=torch.bfloat16),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=-1).float(),
        "eps": 1e-6,
        "out_keys": [source.normal(*buffer, dtype=torch.bfloat16) for _ in range(sizes.LAYERS)],
        "out_values": [source.normal(*buffer, dtype=torch.bfloat16) for _ in range(sizes.LAYERS)],
    }


def _context_kv(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    """Windows at random places of sequence and pool; commit lengths from 1 to T, each as likely."""
    batch, rows = size.batch, sizes.GAMMA + 1
    start = source.integers(0, sizes.ROPE_POSITIONS - rows, batch, 1)
    return shared | {
        "projected_kv": source.normal(
            batch * rows, sizes.LAYERS, 2, sizes.HEADS, sizes.HEAD_SIZE, dtype=torch.bfloat16
        ),
        "positions": start + torch.arange(rows, device=source.device),
        "cache_locs": source.distinct(batch * rows, sizes.KV_SLOTS - 1).view(batch, rows) + 1,
        "commit_lens": source.integers(1, rows + 1, batch).int(),
    }


def _context_kv_cost(a: Arguments) -> Cost:
    """Committed rows only: their K and V in and out, their places, their row of the RoPE table, the weights."""
    committed = int(a["commit_lens"].sum())
    row = nbytes(a["projected_kv"][0])
    places = 2 * a["positions"].element_size() + nbytes(a["cos_sin"][0])
    read = committed * (row + places) + nbytes(a["commit_lens"], a["k_norm_weights"])
    return Cost(bytes_read=read, bytes_written=committed * row, note="rows up to each commit length")


WORKLOADS = (Workload("context_kv", _context_kv_shared, _context_kv, _context_kv_cost, shows_vocab=False),)
