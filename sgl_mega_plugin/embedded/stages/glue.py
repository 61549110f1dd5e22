"""The embedded engine's own glue stage."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_plugin.contract import PADDING_SLOT

_SMALLEST_TEMPERATURE = 1e-5


def step_inputs(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    verify_lens: Tensor,
    anchor_tokens: Tensor,
    relay_lens: Tensor | None,
    relay_tokens: Tensor | None,
    mask_token: int,
    max_positions: int,
    out_positions: Tensor,
    out_cache_locs: Tensor,
    out_draft_ids: Tensor,
    out_seq_lens: Tensor | None,
    out_anchor_tokens: Tensor | None,
) -> None:
    """Add, clamp, gather, fill."""
    width, columns = out_positions.shape[1], req_to_token.shape[1]
    table_rows = req_pool_indices.long().unsqueeze(1)
    # A padding row's index and length may be stale; clamped, they read some row of the table, and are dropped.
    readable = table_rows.clamp(0, len(req_to_token) - 1)
    live = (verify_lens > 0).unsqueeze(1)
    starts, anchors = seq_lens.long(), anchor_tokens
    if relay_lens is not None and relay_tokens is not None:
        live = live & (table_rows == readable)
        starts, anchors = relay_lens[readable.squeeze(1)], relay_tokens[readable.squeeze(1)]
    wanted = starts.unsqueeze(1) + torch.arange(width, device=seq_lens.device)
    last = min(max_positions, columns) - 1
    positions = wanted.clamp(0, last)
    locations = req_to_token[readable, positions].long()
    inside = live & (wanted == positions) & (table_rows == readable)
    out_positions.copy_(torch.where(live, positions, 0))
    out_cache_locs.copy_(torch.where(inside, locations, PADDING_SLOT))
    out_draft_ids.fill_(mask_token)
    out_draft_ids[:, 0] = torch.where(live.squeeze(1), anchors, mask_token)
    if out_seq_lens is not None:
        out_seq_lens.copy_(torch.where(live.squeeze(1), starts, 0))
    if out_anchor_tokens is not None:
        out_anchor_tokens.copy_(torch.where(live.squeeze(1), anchors, 0))


def _sums(lengths: Tensor, room: int) -> Tensor:
    """[B + 1] running sum from 0, at most ``room``."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).clamp_max(room)


def _room(indices: Tensor | None) -> int:
    return 2**31 - 1 if indices is None else min(len(indices), 2**31 - 1)


def _window_slots(slots: Tensor, location_map: Tensor | None) -> Tensor:
    if location_map is None:
        return slots.clamp_min(PADDING_SLOT)
    known = (slots >= 0) & (slots < len(location_map))
    mapped = location_map[torch.where(known, slots, 0)].long().clamp_min(PADDING_SLOT)
    return torch.where(known, mapped, PADDING_SLOT)


def _fill_pages(table: Tensor, slots: Tensor, page_size: int, pages: Tensor) -> None:
    """Of each row's ``pages`` the page that its first slot [B, C] lies in."""
    firsts = slots[:, ::page_size][:, : table.shape[1]] // page_size
    columns = firsts.shape[1]
    written = torch.arange(columns, device=table.device) < pages.unsqueeze(1)
    table[:, :columns] = torch.where(written, firsts, table[:, :columns].long()).to(table.dtype)


def _fill_indices(indices: Tensor, slots: Tensor, indptr: Tensor, first: Tensor) -> None:
    """From ``indptr[b]`` to ``indptr[b + 1]`` request b's slots [C] from token ``first[b]`` on."""
    at = torch.arange(len(indices), device=indices.device)
    owner = torch.searchsorted(indptr[1:].contiguous(), at, right=True)
    owned = owner < len(slots)
    owner = owner.clamp_max(len(slots) - 1)
    token = (at - indptr[owner] + first[owner]).clamp(0, slots.shape[1] - 1)
    indices.copy_(torch.where(owned, slots[owner, token], indices.long()))


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
    """Running sums, and gathers of whole table rows."""
    table_rows = req_pool_indices.long()
    known = table_rows.clamp(0, len(req_to_token) - 1)
    live = (verify_lens > 0) & (table_rows == known)
    limit = req_to_token.shape[1]
    for table in (out_page_table, out_window_page_table):
        limit = limit if table is None else min(limit, table.shape[1] * page_size)
    prefix = torch.where(live, seq_lens.long().clamp(0, limit), 0)
    whole = torch.where(live, (prefix + kv_rows).clamp_max(limit), 0)
    sums = _sums(whole, _room(out_kv_indices))
    lens = whole if out_kv_indices is None else sums.diff()
    out_kv_lens.copy_(lens)
    out_kv_indptr.copy_(sums)
    if out_qo_indptr is not None:
        out_qo_indptr.copy_(torch.arange(len(sums), device=sums.device) * query_rows)
    if out_mask_indptr is not None:
        out_mask_indptr.copy_(_sums(query_rows * (prefix + query_rows), 2**63 - 1))

    slots = torch.where(live.unsqueeze(1), req_to_token[known].long(), PADDING_SLOT)
    in_window = _window_slots(slots, location_map)
    slots = slots.clamp_min(PADDING_SLOT)
    pages = torch.where(live, (lens + page_size - 1) // page_size, 1)
    if out_page_table is not None:
        _fill_pages(out_page_table, slots, page_size, pages)
    if out_window_page_table is not None:
        _fill_pages(out_window_page_table, in_window, page_size, pages)
    if out_kv_indices is not None:
        _fill_indices(out_kv_indices, slots, sums, torch.zeros_like(lens))
    start = (prefix - window).clamp_min(0)
    window_sums = _sums(whole - start, _room(out_window_kv_indices))
    if out_window_kv_indptr is not None:
        out_window_kv_indptr.copy_(window_sums)
    if out_window_kv_indices is not None:
        _fill_indices(out_window_kv_indices, in_window, window_sums, start)
    if out_window_kv_offsets is not None:
        out_window_kv_offsets.copy_(start)


def relay(
    *,
    req_pool_indices: Tensor,
    verify_lens: Tensor,
    new_seq_lens: Tensor,
    bonus_tokens: Tensor,
    out_relay_lens: Tensor,
    out_relay_tokens: Tensor,
    out_next_seq_lens: Tensor | None,
    out_next_anchors: Tensor | None,
) -> None:
    """Two scatters, two copies."""
    live = verify_lens > 0
    known = live & (req_pool_indices >= 0) & (req_pool_indices < len(out_relay_lens))
    # A row that is not known writes to a row past the table, which is dropped: no shape depends on the data.
    spare = torch.where(known, req_pool_indices.long(), len(out_relay_lens))
    for table, values in ((out_relay_lens, new_seq_lens.long()), (out_relay_tokens, bonus_tokens)):
        longer = torch.cat([table, table[:1]])
        longer[spare] = values
        table.copy_(longer[:-1])
    if out_next_seq_lens is not None:
        out_next_seq_lens.copy_(torch.where(live, new_seq_lens, 0))
    if out_next_anchors is not None:
        out_next_anchors.copy_(torch.where(live, bonus_tokens, 0))


def step_params(
    *,
    temperatures: Tensor,
    top_ks: Tensor,
    verify_lens: Tensor | None,
    out_temperatures: Tensor,
    out_greedy: Tensor,
    out_step_temperatures: Tensor,
) -> None:
    """Defaults for every row, then the live ones."""
    live = len(top_ks)
    given = temperatures.reshape(-1).float()
    out_temperatures.fill_(1.0)
    out_greedy.fill_(True)
    out_temperatures[:live] = given.nan_to_num(0.0, posinf=torch.inf, neginf=0.0).clamp_min(_SMALLEST_TEMPERATURE)
    out_greedy[:live] = (top_ks <= 1) | ~(given > 0)
    if verify_lens is not None:
        out_temperatures.masked_fill_(verify_lens <= 0, 1.0)
        out_greedy.masked_fill_(verify_lens <= 0, True)
    out_step_temperatures.copy_(out_temperatures.masked_fill(out_greedy, 0.0))
