"""Workloads of the glue stage's seams."""

from __future__ import annotations

from typing import Any

import torch

from sgl_mega_plugin.bench.records import Cost, Size
from sgl_mega_plugin.bench.workloads import sizes
from sgl_mega_plugin.bench.workloads.workload import Arguments, Source, Workload, all_tensors, nbytes


def _step_inputs_shared(size: Size, source: Source) -> dict[str, Any]:
    rows = max(sizes.POOL_ROWS, size.batch)
    return {"req_to_token": source.integers(1, sizes.KV_SLOTS, rows, sizes.POOL_COLUMNS).int()}


def _step_inputs(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    batch, rows = size.batch, sizes.GAMMA + 1
    table = shared["req_to_token"]
    return {
        "req_pool_indices": source.distinct(batch, len(table)),
        "req_to_token": table,
        "seq_lens": source.integers(1, sizes.POOL_COLUMNS - rows, batch),
        "verify_lens": torch.full((batch,), rows, dtype=torch.int32, device=source.device),
        "anchor_tokens": source.integers(0, 49_152, batch),
        "mask_token": 49_151,
        "max_positions": sizes.POOL_COLUMNS,
        "out_positions": source.empty(batch, rows),
        "out_cache_locs": source.empty(batch, rows),
        "out_draft_ids": source.empty(batch, sizes.GAMMA),
    }


def _step_inputs_cost(a: Arguments) -> Cost:
    everything = all_tensors(a)
    table, entries = a["req_to_token"], a["out_cache_locs"].numel()
    read = everything.bytes_read - nbytes(table) + entries * table.element_size()
    note = "of the request table only the window's entries"
    return Cost(bytes_read=read, bytes_written=everything.bytes_written, note=note)


WORKLOADS = (Workload("step_inputs", _step_inputs_shared, _step_inputs, _step_inputs_cost, shows_vocab=False),)
