"""Conformance cases of `attn_metadata`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import Case
from sgl_mega_slots.common.case_tools import generator, strided

#: What every output holds before a call: no slot, page or length of these cases.
OLD = 77_777
#: Outputs that are written in part.
KEPT = frozenset({"out_page_table", "out_window_page_table", "out_kv_indices", "out_window_kv_indices"})
LENGTHS = ("out_qo_indptr", "out_mask_indptr")
PAGES = ("out_page_table", "out_window_page_table")
INDICES = ("out_kv_indices",)
WINDOW_INDICES = ("out_window_kv_indptr", "out_window_kv_indices", "out_window_kv_offsets")
OPTIONAL = (*LENGTHS, *PAGES, *INDICES, *WINDOW_INDICES)


def arguments(
    device: str,
    *,
    seq_lens: list[int],
    outputs: tuple[str, ...],
    query_rows: int = 8,
    kv_rows: int | None = None,
    page_size: int = 1,
    window: int = 0,
    verify_lens: list[int] | None = None,
    pool: list[int] | None = None,
    columns: int = 96,
    pages: int | None = None,
    room: int | None = None,
    window_room: int | None = None,
    map_slots: int = 0,
    map_dtype: torch.dtype = torch.int64,
    index_dtype: torch.dtype = torch.int64,
    indices_dtype: torch.dtype = torch.int32,
    table: Tensor | None = None,
    stride: bool = False,
) -> dict[str, Any]:
    """The seam's arguments for requests of these lengths; of a table every page holds tokens that follow each other.

    ``outputs`` are the optional ones that are wanted. ``map_slots`` is S of a map that has places for most slots.
    """
    batch = len(seq_lens)
    pool = list(range(batch, 0, -1)) if pool is None else pool
    lens = [query_rows] * batch if verify_lens is None else verify_lens
    spread = strided if stride else torch.clone
    if table is None:
        table = _table(batch + 2, columns, page_size)
    columns = table.shape[1]
    pages = -(-columns // page_size) if pages is None else pages
    shapes = {
        "out_qo_indptr": ((batch + 1,), torch.int32),
        "out_mask_indptr": ((batch + 1,), torch.int64),
        "out_page_table": ((batch, pages), torch.int32),
        "out_window_page_table": ((batch, pages), torch.int32),
        "out_kv_indices": ((batch * columns if room is None else room,), indices_dtype),
        "out_window_kv_indptr": ((batch + 1,), torch.int32),
        "out_window_kv_indices": ((batch * columns if window_room is None else window_room,), indices_dtype),
        "out_window_kv_offsets": ((batch,), torch.int32),
    }

    def output(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return spread(torch.full(shape, OLD, dtype=dtype, device=device))

    return {
        "req_pool_indices": torch.tensor(pool, dtype=index_dtype, device=device),
        "req_to_token": spread(table.to(device)),
        "seq_lens": torch.tensor(seq_lens, dtype=index_dtype, device=device),
        "verify_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "query_rows": query_rows,
        "kv_rows": query_rows if kv_rows is None else kv_rows,
        "page_size": page_size,
        "window": window,
        "location_map": _map(map_slots).to(map_dtype).to(device) if map_slots else None,
        "out_kv_lens": output((batch,), torch.int32),
        "out_kv_indptr": output((batch + 1,), torch.int32),
    } | {name: output(*shapes[name]) if name in outputs else None for name in OPTIONAL}


def _table(rows: int, columns: int, page_size: int) -> Tensor:
    """[Q, C]: pages in an order of their own."""
    pages = -(-columns // page_size)
    order = torch.randperm(rows * pages, generator=generator(columns)).view(rows, pages, 1) + 1
    return (order * page_size + torch.arange(page_size)).view(rows, -1)[:, :columns].int()


def _map(slots: int) -> Tensor:
    """Places of slots in a window's pool: one slot in five has none."""
    places = torch.randperm(slots, generator=generator(slots))
    return torch.where(torch.arange(slots) % 5 == 3, -1, places)


def _case(id_: str, *, kernel_only: bool = False, **kwargs: Any) -> Case:
    return Case(id_, lambda device: arguments(device, **kwargs), keep=KEPT, kernel_only=kernel_only)


def cases() -> Iterator[Case]:
    """Every case; the ids say what is odd about them."""
    yield _case("b1_pages", seq_lens=[5], outputs=("out_page_table",))
    yield _case("b1_lengths_only", seq_lens=[5], outputs=())
    yield _case("b1_empty_request", seq_lens=[0], query_rows=1, kv_rows=0, outputs=OPTIONAL, window=3, map_slots=400)
    yield _case("b3_flash_attention", seq_lens=[1, 17, 40], outputs=("out_qo_indptr", *PAGES), map_slots=900)
    yield _case("b3_triton", seq_lens=[1, 17, 40], kv_rows=0, window=16, map_slots=900,
                outputs=(*LENGTHS, *INDICES, *WINDOW_INDICES), indices_dtype=torch.int64)  # fmt: skip
    yield _case("b3_triton_window_of_the_same_pool", seq_lens=[1, 17, 40], kv_rows=0, window=16,
                outputs=WINDOW_INDICES)  # fmt: skip
    yield _case("b3_flashinfer", seq_lens=[1, 17, 40], outputs=("out_qo_indptr", *INDICES))
    yield _case("b3_flashinfer_window", seq_lens=[1, 17, 40], window=8, map_slots=900, map_dtype=torch.int32,
                outputs=("out_qo_indptr", *INDICES, *WINDOW_INDICES))  # fmt: skip
    yield _case("draft_block_of_g_rows", seq_lens=[9, 30], query_rows=7, outputs=("out_page_table", *LENGTHS))
    yield _case("everything_strided_int32", seq_lens=[3, 50, 0, 21], page_size=4, window=9, map_slots=900, stride=True,
                index_dtype=torch.int32, outputs=OPTIONAL)  # fmt: skip
    yield _case("b65_more_than_a_warp", seq_lens=[(7 * i) % 60 for i in range(65)], page_size=16, window=32,
                map_slots=8000, outputs=OPTIONAL)  # fmt: skip
    # Context 64 of T 8: with the columns that an engine adds, and without.
    for columns in (64, 76):
        yield _case(f"context_end_{columns}_columns", seq_lens=[60, 61, 63, 64], columns=columns, outputs=OPTIONAL,
                    window=16, map_slots=700)  # fmt: skip
    yield _case("context_end_page_256", seq_lens=[252, 255, 256, 250], columns=512, page_size=256, outputs=OPTIONAL,
                window=16, map_slots=3100)  # fmt: skip
    yield _case("context_end_by_pages", seq_lens=[60, 61, 63, 64], columns=76, pages=16, page_size=4,
                outputs=("out_page_table", *INDICES))  # fmt: skip
    yield _case("length_beyond_the_row", seq_lens=[1 << 40, -3, 97], outputs=OPTIONAL, window=5, map_slots=600)
    yield _case("room_ends_in_a_request", seq_lens=[20, 20, 20, 20], room=70, window=10, window_room=40, pages=96,
                outputs=OPTIONAL)  # fmt: skip
    yield _case("no_room", seq_lens=[20, 20], room=0, window=10, window_room=0, outputs=(*INDICES, *WINDOW_INDICES))
    yield _case("padding", seq_lens=[8, 60, 9_999_999, -1], verify_lens=[8, 1, 0, 0], outputs=OPTIONAL, window=7)
    yield _case("all_padding", seq_lens=[3, 4], verify_lens=[0, 0], outputs=OPTIONAL, window=7, page_size=2)
    yield _case("table_row_out_of_range", seq_lens=[3, 4, 5], pool=[-1, 1, 9_999_999], outputs=OPTIONAL, window=7)
    yield _case("slots_that_are_none", seq_lens=[12], table=torch.tensor([[0] * 20, [-1, 5, 900] * 6 + [7, -9]]).int(),
                pool=[1], window=6, map_slots=20, outputs=OPTIONAL)  # fmt: skip
    yield _case("more_than_a_program", seq_lens=[3000, 2047], columns=3100, window=2500, outputs=OPTIONAL,
                map_slots=4000)  # fmt: skip
    yield _case("a_program_goes_round", seq_lens=[2600] * 300, columns=2700, outputs=OPTIONAL, window=1500,
                map_slots=9000, kernel_only=True)  # fmt: skip
    yield _case("b4_context_40960", seq_lens=[40_000, 39_999, 1, 20_000], columns=40_972, outputs=OPTIONAL,
                window=4096, map_slots=9000, kernel_only=True)  # fmt: skip
