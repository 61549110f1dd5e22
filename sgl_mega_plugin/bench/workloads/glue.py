"""Workloads of the glue stage's seams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.bench.records import Cost, Size
from sgl_mega_plugin.bench.workloads import sizes
from sgl_mega_plugin.bench.workloads.workload import Arguments, Source, Workload, all_tensors, nbytes, nothing_shared

_ROWS = sizes.GAMMA + 1
_WINDOW = 4_096
#: A request's top_k where it asks for none, as SGLang writes it.
_NO_TOP_K = 1 << 30


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
        "relay_lens": None,
        "relay_tokens": None,
        "mask_token": 49_151,
        "max_positions": sizes.POOL_COLUMNS,
        "out_positions": source.empty(batch, rows),
        "out_cache_locs": source.empty(batch, rows),
        "out_draft_ids": source.empty(batch, sizes.GAMMA),
        "out_seq_lens": None,
        "out_anchor_tokens": None,
    }


def _step_inputs_cost(a: Arguments) -> Cost:
    everything = all_tensors(a)
    table, entries = a["req_to_token"], a["out_cache_locs"].numel()
    read = everything.bytes_read - nbytes(table) + entries * table.element_size()
    note = "of the request table only the window's entries"
    return Cost(bytes_read=read, bytes_written=everything.bytes_written, note=note)


def _metadata_shared(size: Size, source: Source) -> dict[str, Any]:
    """A request table whose pages of 64 tokens each follow one another, and a map of its slots."""
    rows, columns, page = max(sizes.POOL_ROWS, size.batch), sizes.LONG_COLUMNS, 64
    pages = source.integers(1, sizes.KV_SLOTS // page, rows, -(-columns // page))
    slots = pages.unsqueeze(-1) * page + torch.arange(page, device=source.device)
    return {
        "req_to_token": slots.flatten(1)[:, :columns].int(),
        "location_map": source.integers(1, sizes.KV_SLOTS, sizes.KV_SLOTS),
    }


def _metadata(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    """Requests of up to the whole context: page tables as FlashAttention 3 reads them, or slot lists as Triton does."""
    batch, table = size.batch, shared["req_to_token"]
    columns, listed = table.shape[1], size.variant.startswith("slots")
    page_size, window = (64 if size.variant == "pages_of_64" else 1), (_WINDOW if size.variant == "slots_window" else 0)

    def sums(dtype: torch.dtype = torch.int32) -> Tensor:
        return source.empty(batch + 1, dtype=dtype)

    return {
        "req_pool_indices": source.distinct(batch, len(table)),
        "req_to_token": table,
        "seq_lens": source.integers(1, columns - 4 - _ROWS, batch),
        "verify_lens": torch.full((batch,), _ROWS, dtype=torch.int32, device=source.device),
        "query_rows": _ROWS,
        "kv_rows": 0 if listed else _ROWS,
        "page_size": page_size,
        "window": window,
        "location_map": shared["location_map"] if window else None,
        "out_kv_lens": source.empty(batch, dtype=torch.int32),
        "out_kv_indptr": sums(),
        "out_qo_indptr": sums() if listed else None,
        "out_mask_indptr": sums(torch.int64) if listed else None,
        "out_page_table": None if listed else source.empty(batch, -(-columns // page_size), dtype=torch.int32),
        "out_window_page_table": None,
        "out_kv_indices": source.empty(batch * columns) if listed else None,
        "out_window_kv_indptr": sums() if window else None,
        "out_window_kv_indices": source.empty(batch * window) if window else None,
        "out_window_kv_offsets": source.empty(batch, dtype=torch.int32) if window else None,
    }


def _metadata_cost(a: Arguments) -> Cost:
    """Lengths and sums whole; of tables, lists and map what the lengths reach."""
    partly = ("req_to_token", "location_map", "out_page_table", "out_kv_indices", "out_window_kv_indices")
    rest = all_tensors({name: value for name, value in a.items() if name not in partly})
    tokens = a["seq_lens"].long() + a["kv_rows"]
    seen = int(tokens.clamp(max=a["window"]).sum())
    if a["out_page_table"] is not None:
        entries = int(((tokens + a["page_size"] - 1) // a["page_size"]).sum())
        written = entries * a["out_page_table"].element_size()
    else:
        entries = int(tokens.sum())
        written = entries * a["out_kv_indices"].element_size()
    read = entries * a["req_to_token"].element_size()
    if a["out_window_kv_indices"] is not None:
        read += seen * a["location_map"].element_size()
        written += seen * a["out_window_kv_indices"].element_size()
    note = "of the tables and lists only what the lengths reach"
    return Cost(bytes_read=rest.bytes_read + read, bytes_written=rest.bytes_written + written, note=note)


def _relay(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    batch, rows = size.batch, max(sizes.POOL_ROWS, size.batch)
    return {
        "req_pool_indices": source.distinct(batch, rows),
        "verify_lens": torch.full((batch,), _ROWS, dtype=torch.int32, device=source.device),
        "new_seq_lens": source.integers(1, sizes.POOL_COLUMNS, batch),
        "bonus_tokens": source.integers(0, 49_152, batch),
        "out_relay_lens": source.empty(rows),
        "out_relay_tokens": source.empty(rows),
        "out_next_seq_lens": source.empty(batch),
        "out_next_anchors": source.empty(batch),
    }


def _relay_cost(a: Arguments) -> Cost:
    everything, batch = all_tensors(a), a["req_pool_indices"].numel()
    tables = (a["out_relay_lens"], a["out_relay_tokens"])
    written = everything.bytes_written - nbytes(*tables) + 2 * batch * a["out_relay_lens"].element_size()
    return Cost(bytes_read=everything.bytes_read, bytes_written=written, note="of the tables only the batch's rows")


def _step_params(size: Size, source: Source, shared: dict[str, Any]) -> dict[str, Any]:
    """Every fourth row greedy."""
    batch = size.batch
    greedy = torch.arange(batch, device=source.device) % 4 == 3
    return {
        "temperatures": source.uniform(batch, 1) + 0.5,
        "top_ks": torch.where(greedy, 1, _NO_TOP_K).int(),
        "verify_lens": None,
        "out_temperatures": source.empty(batch, dtype=torch.float32),
        "out_greedy": source.empty(batch, dtype=torch.bool),
        "out_step_temperatures": source.empty(batch, dtype=torch.float32),
    }


WORKLOADS = (
    Workload("step_inputs", _step_inputs_shared, _step_inputs, _step_inputs_cost, shows_vocab=False),
    Workload(
        "attention_metadata",
        _metadata_shared,
        _metadata,
        _metadata_cost,
        variants=("pages", "pages_of_64", "slots", "slots_window"),
        shows_vocab=False,
    ),
    Workload("relay", nothing_shared, _relay, _relay_cost, shows_vocab=False),
    Workload("step_params", nothing_shared, _step_params, all_tensors, shows_vocab=False),
)
