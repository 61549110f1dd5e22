"""Workloads of the commit stage's seams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgl_mega_plugin.bench.records import Cost, Size
from sgl_mega_plugin.bench.workloads import sizes
from sgl_mega_plugin.bench.workloads.workload import (
    Arguments,
    Source,
    Workload,
    all_tensors,
    nbytes,
    nothing_shared,
)

_ROWS = sizes.GAMMA + 1
#: Token ids of a request that an n-gram layer of order 4 looks back on.
_HISTORY = 3


def _context_kv_shared(size: Size, source: Source) -> dict[str, Any]:
    frequencies = 1e6 ** (-torch.arange(0, sizes.HEAD_SIZE, 2, device=source.device) / sizes.HEAD_SIZE)
    angles = torch.arange(sizes.ROPE_POSITIONS, device=source.device)[:, None] * frequencies
    buffer = (sizes.KV_SLOTS, sizes.HEADS, sizes.HEAD_SIZE)
    fp8 = size.variant == "fp8"
    cache = torch.float8_e4m3fn if fp8 else torch.bfloat16

    def layers() -> list[torch.Tensor]:
        return [source.normal(*buffer, dtype=torch.bfloat16).to(cache) for _ in range(sizes.LAYERS)]

    return {
        "k_norm_weights": source.normal(sizes.LAYERS, sizes.HEAD_SIZE, dtype=torch.bfloat16),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=-1).float(),
        "neox": True,
        "location_map": None,
        "ring_rows": None,
        "ring_size": 0,
        "eps": 1e-6,
        "kv_scales": torch.full((sizes.LAYERS, 2), 0.75, device=source.device) if fp8 else None,
        "out_keys": layers(),
        "out_values": layers(),
    }


def _context_kv(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    """Windows at random places of sequence and pool; commit lengths from 1 to T, each as likely."""
    batch = size.batch
    start = source.integers(0, sizes.ROPE_POSITIONS - _ROWS, batch, 1)
    return shared | {
        "projected_kv": source.normal(
            batch * _ROWS, sizes.LAYERS, 2, sizes.HEADS, sizes.HEAD_SIZE, dtype=torch.bfloat16
        ),
        "positions": start + torch.arange(_ROWS, device=source.device),
        "cache_locs": source.distinct(batch * _ROWS, sizes.KV_SLOTS - 1).view(batch, _ROWS) + 1,
        "commit_lens": source.integers(1, _ROWS + 1, batch).int(),
    }


def _write_cost(a: Arguments, lens: str) -> Cost:
    """Committed rows only: their K and V in and out, their places, their row of the RoPE table, the weights."""
    committed = int(a[lens].sum())
    row = nbytes(a["projected_kv"][0])
    places = 2 * a["positions"].element_size() + nbytes(a["cos_sin"][0])
    scales = () if a["kv_scales"] is None else (a["kv_scales"],)
    read = committed * (row + places) + nbytes(a[lens], a["k_norm_weights"], *scales)
    written = committed * row // a["projected_kv"].element_size() * a["out_keys"][0].element_size()
    return Cost(bytes_read=read, bytes_written=written, note="rows up to each commit length")


def _staged_kv(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    values = _context_kv(size, source, shared)
    del values["commit_lens"]
    return values | {"out_commit_lens": _lengths(values["cache_locs"])}


def _staged_kv_cost(a: Arguments) -> Cost:
    cost = _write_cost(a, "out_commit_lens")
    note = f"{cost.note}; each timed call is preceded by a copy that arms the staging again"
    return cost.model_copy(update={"bytes_written": cost.bytes_written + nbytes(a["out_commit_lens"]), "note": note})


def _lengths(cache_locs: torch.Tensor) -> torch.Tensor:
    """Commit lengths [B] from 1 to T that can be made again after a call has cleared them."""
    return (cache_locs[:, 0] % _ROWS + 1).int()


def _armed(a: Arguments) -> Callable[[], object]:
    """A call disarms, so the next one needs its commit lengths back."""
    lengths = _lengths(a["cache_locs"])
    return lambda: a["out_commit_lens"].copy_(lengths)


def _kv_staging_shared(size: Size, source: Source) -> dict[str, Any]:
    staged = max(sizes.POOL_ROWS, size.batch)
    return {
        "out_cache_locs": source.empty(staged, _ROWS),
        "out_positions": source.empty(staged, _ROWS),
        "out_commit_lens": source.empty(staged, dtype=torch.int32),
    }


def _kv_staging(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    batch = size.batch
    start = source.integers(0, sizes.ROPE_POSITIONS - _ROWS, batch, 1)
    return shared | {
        "cache_locs": source.distinct(batch * _ROWS, sizes.KV_SLOTS - 1).view(batch, _ROWS) + 1,
        "positions": start + torch.arange(_ROWS, device=source.device),
        "commit_lens": source.integers(1, _ROWS + 1, batch).int(),
    }


def _history_commit(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    batch, rows = size.batch, max(sizes.POOL_ROWS, size.batch)
    return {
        "tokens": source.integers(0, 49_152, batch, _ROWS),
        "req_pool_indices": source.distinct(batch, rows),
        "commit_lens": source.integers(1, _ROWS + 1, batch).int(),
        "out_histories": source.integers(0, 49_152, rows, _HISTORY).int(),
    }


def _history_cost(a: Arguments) -> Cost:
    """Of the tokens and the table what the commit lengths reach."""
    commits, ids = a["commit_lens"].long(), a["out_histories"].shape[1]
    tokens = int(commits.clamp(max=ids).sum())
    kept = int((ids - commits).clamp(min=0).sum())
    size = a["out_histories"].element_size()
    read = tokens * a["tokens"].element_size() + kept * size + nbytes(a["req_pool_indices"], a["commit_lens"])
    return Cost(bytes_read=read, bytes_written=len(commits) * ids * size, note="rows of the batch")


WORKLOADS = (
    Workload(
        "context_kv",
        _context_kv_shared,
        _context_kv,
        lambda a: _write_cost(a, "commit_lens"),
        variants=("", "fp8"),
        shows_vocab=False,
    ),
    Workload("kv_staging", _kv_staging_shared, _kv_staging, all_tensors, shows_vocab=False),
    Workload("staged_kv", _context_kv_shared, _staged_kv, _staged_kv_cost, shows_vocab=False, before=_armed),
    Workload("history_commit", nothing_shared, _history_commit, _history_cost, shows_vocab=False),
)
