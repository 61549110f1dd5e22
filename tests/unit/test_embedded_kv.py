"""Pages, rows and their accounts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_mega_plugin.contract import PADDING_SLOT
from sgl_mega_plugin.embedded.kv import PAGE_SIZES, Cache, PageAllocator, PagedKv, PoolFullError


def memory(*, rows: int = 3, columns: int = 64, slots: int = 192, page_size: int = 1) -> PagedKv:
    cache = Cache(1, slots + page_size, 1, 2, torch.float32, "cpu")
    return PagedKv(rows=rows, columns=columns, slots=slots, page_size=page_size, target=cache, draft=None, device="cpu")


@given(data=st.data(), page_size=st.sampled_from(PAGE_SIZES))
@settings(max_examples=60, deadline=None)
def test_rows_never_share_a_slot_and_all_pages_return(data: st.DataObject, page_size: int) -> None:
    kv = memory(page_size=page_size)
    open_rows = []
    for _ in range(data.draw(st.integers(1, 20))):
        tokens = data.draw(st.integers(1, 64))
        if kv.free_rows and kv.allocator.fits(tokens) and data.draw(st.booleans()):
            open_rows.append((kv.open(tokens), tokens))
        elif open_rows:
            kv.close(open_rows.pop(data.draw(st.integers(0, len(open_rows) - 1)))[0])
        held = [kv.req_to_token[row.index, :count].tolist() for row, count in open_rows]
        slots = [slot for row in held for slot in row]
        assert len(set(slots)) == len(slots)
        assert all(page_size <= slot < kv.allocator.slots for slot in slots)  # page 0 holds the padding slot
        used = {row.index for row, _ in open_rows}
        idle = [index for index in range(3) if index not in used]
        assert (kv.req_to_token[idle] == PADDING_SLOT).all()
    for row, _ in open_rows:
        kv.close(row)
    assert kv.allocator.allocated == kv.allocator.freed
    assert (kv.req_to_token == PADDING_SLOT).all()


def test_columns_past_a_row_point_at_the_padding_slot() -> None:
    kv = memory(page_size=16)
    row = kv.open(17)
    found = kv.req_to_token[row.index].tolist()
    assert found[17:] == [PADDING_SLOT] * 47
    assert found[:17] == [*range(16, 33)]  # the first two pages, one after the other


def test_full_pool_says_what_to_do() -> None:
    kv = memory(slots=32, page_size=16)
    kv.open(17)
    with pytest.raises(PoolFullError, match=r"1 tokens need 1 pages of 16, 0 are free of 2; lower max_new_tokens"):
        kv.open(1)


def test_full_table_says_what_to_do() -> None:
    kv = memory(rows=1)
    kv.open(1)
    with pytest.raises(PoolFullError, match="all 1 rows are in use; raise max_batch"):
        kv.open(1)


def test_double_free_is_an_error() -> None:
    kv = memory()
    row = kv.open(2)
    kv.close(row)
    with pytest.raises(ValueError, match="freed twice or never allocated"):
        kv.close(row)


@pytest.mark.parametrize(
    ("slots", "page_size", "message"),
    [
        pytest.param(32, 8, r"page size 8 is none of \(1, 16, 64\)", id="page-size"),
        pytest.param(17, 16, "17 KV slots are no positive multiple of page size 16", id="ragged"),
        pytest.param(0, 1, "0 KV slots are no positive multiple", id="empty"),
    ],
)
def test_bad_sizes(slots: int, page_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PageAllocator(slots, page_size)


def test_row_longer_than_the_table() -> None:
    with pytest.raises(ValueError, match="a row of 65 tokens is longer than the table's 64 columns"):
        memory().open(65)
