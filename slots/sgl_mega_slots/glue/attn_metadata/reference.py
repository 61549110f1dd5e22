"""`attn_metadata` in plain torch: the definition that the kernel is compared with.

Where it departs from SGLang 0.5.23:

- Rows that pad a graph have a length of 0; SGLang's have 1 committed token, of table row 0.
- Lengths stop at the end of the request's row and of the page table. SGLang's page table for FlashAttention 3 has
  the context's columns while its length runs on by T, so that near the end attention reads on into the next row.
- A slot without a place in the window's pool is the padding slot; SGLang keeps -1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_plugin.contract import PADDING_SLOT


def room(indices: Tensor | None) -> int:
    """Entries that a list has, and int32 sums can reach."""
    return 2**31 - 1 if indices is None else min(len(indices), 2**31 - 1)


def running_sum(lengths: Tensor, most: int) -> Tensor:
    """[B + 1]: where each request starts and the last one ends, within ``most`` entries."""
    zero = torch.zeros(1, dtype=torch.int64, device=lengths.device)
    return torch.cat([zero, lengths.cumsum(0)]).clamp(max=most)


def mapped(slots: Tensor, location_map: Tensor | None) -> Tensor:
    """A full pool's slots in the window's pool."""
    if location_map is None:
        return slots.clamp(min=PADDING_SLOT)
    known = (slots >= 0) & (slots < len(location_map))
    places = location_map[slots.clamp(0, len(location_map) - 1)].long()
    return torch.where(known, places.clamp(min=PADDING_SLOT), PADDING_SLOT)


def attention_metadata(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    verify_lens: Tensor,
    query_rows: int,
    kv_rows: int,
    page_size: int,
    window: int,
    location_map: Tensor | None,
    out_kv_lens: Tensor,
    out_kv_indptr: Tensor,
    out_qo_indptr: Tensor | None,
    out_mask_indptr: Tensor | None,
    out_page_table: Tensor | None,
    out_window_page_table: Tensor | None,
    out_kv_indices: Tensor | None,
    out_window_kv_indptr: Tensor | None,
    out_window_kv_indices: Tensor | None,
    out_window_kv_offsets: Tensor | None,
) -> None:
    """See :class:`sgl_mega_plugin.contract.AttentionMetadata`."""
    pool_rows, columns = req_to_token.shape
    row = req_pool_indices.long()
    live = (verify_lens > 0) & (row >= 0) & (row < pool_rows)
    tables = [table for table in (out_page_table, out_window_page_table) if table is not None]
    limit = min([columns, *(table.shape[1] * page_size for table in tables)])
    prefix = torch.where(live, seq_lens.long().clamp(0, limit), 0)
    whole = torch.where(live, (prefix + kv_rows).clamp(max=limit), 0)

    starts = running_sum(whole, room(out_kv_indices))
    lengths = whole if out_kv_indices is None else starts.diff()
    out_kv_lens.copy_(lengths)
    out_kv_indptr.copy_(starts)
    if out_qo_indptr is not None:
        out_qo_indptr.copy_(query_rows * torch.arange(len(starts), device=starts.device))
    if out_mask_indptr is not None:
        out_mask_indptr.copy_(running_sum(query_rows * (prefix + query_rows), 2**63 - 1))

    first = (prefix - window).clamp(min=0)
    window_starts = running_sum(whole - first, room(out_window_kv_indices))
    if out_window_kv_indptr is not None:
        out_window_kv_indptr.copy_(window_starts)
    if out_window_kv_offsets is not None:
        out_window_kv_offsets.copy_(first)

    for b in range(len(row)):
        if not live[b]:
            for table in tables:
                table[b, 0] = PADDING_SLOT // page_size
            continue
        slots = req_to_token[row[b]].long()
        places = mapped(slots, location_map)
        slots = slots.clamp(min=PADDING_SLOT)
        for paged, found in ((out_page_table, slots), (out_window_page_table, places)):
            if paged is not None:
                pages = found[: int(lengths[b]) : page_size] // page_size
                paged[b, : len(pages)] = pages.to(paged.dtype)
        for indices, found, begin, indptr in (
            (out_kv_indices, slots, 0, starts),
            (out_window_kv_indices, places, int(first[b]), window_starts),
        ):
            if indices is not None:
                low, high = int(indptr[b]), int(indptr[b + 1])
                indices[low:high] = found[begin : begin + high - low].to(indices.dtype)
