"""Conformance cases of `step_inputs`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sgl_mega_plugin.contract import Case
from sgl_mega_slots.common.case_tools import strided

MASK_TOKEN = 49_151


def arguments(
    device: str,
    *,
    seq_lens: list[int],
    gamma: int,
    verify_lens: list[int] | None = None,
    pool: list[int] | None = None,
    columns: int = 64,
    max_positions: int = 64,
    index_dtype: torch.dtype = torch.int64,
    stride: bool = False,
) -> dict[str, Any]:
    """The seam's arguments for requests of these lengths; every table entry names its row and column."""
    batch, rows = len(seq_lens), gamma + 1
    pool = list(range(batch, 0, -1)) if pool is None else pool
    lens = [rows] * batch if verify_lens is None else verify_lens
    pool_rows = batch + 2
    spread = strided if stride else torch.clone
    table = torch.arange(pool_rows)[:, None] * 1000 + torch.arange(columns) + 1
    return {
        "req_pool_indices": torch.tensor(pool, dtype=index_dtype, device=device),
        "req_to_token": spread(table.to(torch.int32).to(device)),
        "seq_lens": torch.tensor(seq_lens, dtype=index_dtype, device=device),
        "verify_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "anchor_tokens": torch.arange(batch, device=device) * 11 + 3,
        "mask_token": MASK_TOKEN,
        "max_positions": max_positions,
        "out_positions": spread(torch.zeros(batch, rows, dtype=torch.int64, device=device)),
        "out_cache_locs": spread(torch.zeros(batch, rows, dtype=torch.int64, device=device)),
        "out_draft_ids": spread(torch.zeros(batch, gamma, dtype=torch.int64, device=device)),
    }


def _case(id_: str, **kwargs: Any) -> Case:
    return Case(id_, lambda device: arguments(device, **kwargs))


def cases() -> Iterator[Case]:
    """Every case; the ids say what is odd about them."""
    yield _case("b1", seq_lens=[5], gamma=3)
    yield _case("b1_g1_empty_request", seq_lens=[0], gamma=1)
    yield _case("b3_int32_strided", seq_lens=[1, 17, 40], gamma=6, index_dtype=torch.int32, stride=True)
    yield _case("b65_more_than_a_tile", seq_lens=[(7 * i) % 50 for i in range(65)], gamma=7)
    yield _case("context_end", seq_lens=[60, 61, 63, 64], gamma=7)
    yield _case("context_end_by_positions", seq_lens=[60, 61, 63, 64, 70], gamma=7, columns=80)
    yield _case("context_end_by_columns", seq_lens=[60, 61, 63, 64, 70], gamma=7, max_positions=1 << 40)
    yield _case("row_and_padding", seq_lens=[8, 60, 9_999_999, -1], gamma=3, verify_lens=[4, 1, 0, 0])
    yield _case("all_padding", seq_lens=[3, 4], gamma=2, verify_lens=[0, 0])
    yield _case("pool_row_out_of_range", seq_lens=[3, 4, 5], gamma=2, pool=[-1, 1, 9_999_999])
    yield _case("padding_pool_row_out_of_range", seq_lens=[3, 4], gamma=2, pool=[1, -7], verify_lens=[3, 0])
    yield _case("negative_length", seq_lens=[-2, 3], gamma=4)
    yield _case("two_requests_of_one_row", seq_lens=[3, 9], gamma=2, pool=[1, 1])
