"""Paged attention against a naive loop, with poison wherever nothing may be read, in page tables too."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sgl_mega_plugin.embedded.attention import PagedAttention
from sgl_mega_plugin.embedded.kv import Cache, PagedKv

HEADS, KV_HEADS, SIZE, COLUMNS = 6, 2, 8, 40
# fp32 dot products of 8 and sums of up to 40 terms of order 1, in another order: 40 x 2**-24, doubled.
TOLERANCE = 5e-6


def naive(q: Tensor, keys: Tensor, values: Tensor, reach: int) -> Tensor:
    """One row: ``q`` [heads, D] over the first ``reach`` of ``keys`` and ``values`` [K, kv_heads, D]."""
    out = []
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = keys[:reach, group].double() @ q[head].double() / math.sqrt(SIZE)
        out.append(scores.softmax(0) @ values[:reach, group].double())
    return torch.stack(out)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "block"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_equals_a_naive_loop(causal: bool, page_size: int) -> None:
    torch.manual_seed(0)
    lengths, width = [0, 5, 31, 38], 4  # the first has no context, the last meets the context's end
    cache = Cache(2, 256 + page_size, KV_HEADS, SIZE, torch.float32, "cpu")
    kv = PagedKv(
        rows=4, columns=COLUMNS, slots=256, page_size=page_size, target=cache, draft=None, device="cpu"
    )  # fmt: skip
    cache.fill(math.nan)
    rows = [kv.open(min(length + width, COLUMNS)) for length in lengths]
    seq_lens = torch.tensor([*lengths, 0])  # and one padding request
    positions = seq_lens.unsqueeze(1) + torch.arange(width)
    locations = torch.zeros(5, width, dtype=torch.int64)
    context = []
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        end = min(length + width, COLUMNS)
        locations[index, : end - length] = kv.req_to_token[row.index, length:end].long()
        old = torch.randn(2, 2, length, KV_HEADS, SIZE)
        where = kv.req_to_token[row.index, :length].long()
        for layer in range(2):
            cache.keys[layer][where], cache.values[layer][where] = old[0, layer], old[1, layer]
        context.append(old)
    q = torch.randn(5 * width, HEADS, SIZE)
    k, v = torch.randn(2, 5 * width, KV_HEADS, SIZE)
    kv_lens = [min(length + width, COLUMNS) for length in lengths]
    page_table = torch.full((5, -(-COLUMNS // page_size)), 2**31 - 1, dtype=torch.int32)
    for index, (row, reach) in enumerate(zip(rows, kv_lens, strict=True)):
        page_table[index, : -(-reach // page_size)] = kv.req_to_token[row.index, :reach:page_size] // page_size
    page_table[4, 0] = 0
    attend = PagedAttention(
        cache,
        page_table=page_table,
        page_size=page_size,
        kv_lens=torch.tensor([*kv_lens, 0], dtype=torch.int32),
        positions=positions.clamp_max(COLUMNS - 1),
        cache_locs=locations,
        longest=COLUMNS,
        causal=causal,
    )
    out = attend(1, q, k, v).view(5, width, HEADS, SIZE)
    for index, length in enumerate(lengths):
        new = slice(index * width, (index + 1) * width)
        keys, values = torch.cat([context[index][0, 1], k[new]]), torch.cat([context[index][1, 1], v[new]])
        for step in range(min(width, COLUMNS - length)):
            reach = length + step + 1 if causal else min(length + width, COLUMNS)
            wanted = naive(q[index * width + step], keys, values, reach)
            error = (out[index, step] - wanted).abs().max().item()
            assert error < TOLERANCE, f"request {index} row {step}: error {error}, bound {TOLERANCE}"


def test_rows_at_the_padding_slot_store_nothing() -> None:
    cache = Cache(1, 9, KV_HEADS, SIZE, torch.float32, "cpu")
    cache.fill(-5.0)
    attend = PagedAttention(
        cache,
        page_table=torch.tensor([[3, 4], [0, 9]], dtype=torch.int32),
        page_size=1,
        kv_lens=torch.tensor([2, 0], dtype=torch.int32),
        positions=torch.tensor([[0, 1, 2], [0, 0, 0]]),
        cache_locs=torch.tensor([[3, 4, 0], [0, 0, 0]]),
        longest=2,
        causal=True,
    )
    rows = torch.ones(6, KV_HEADS, SIZE)
    rows[2:] = math.nan
    attend(0, torch.ones(6, HEADS, SIZE), rows, rows)
    for tensor in (*cache.keys, *cache.values):
        assert [slot for slot in range(9) if (tensor[slot] != -5.0).any()] == [3, 4]
