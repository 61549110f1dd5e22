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
    relay: bool = False,
    used: bool = False,
    stride: bool = False,
) -> dict[str, Any]:
    """The seam's arguments for requests of these lengths; every table entry names its row and column.

    With ``relay`` the lengths stand in the relay's rows of the requests, and every batch row holds a stale one.
    """
    batch, rows = len(seq_lens), gamma + 1
    pool = list(range(batch, 0, -1)) if pool is None else pool
    lens = [rows] * batch if verify_lens is None else verify_lens
    pool_rows = batch + 2
    spread = strided if stride else torch.clone
    table = torch.arange(pool_rows)[:, None] * 1000 + torch.arange(columns) + 1
    stale = torch.tensor(seq_lens, dtype=index_dtype, device=device)
    relay_lens, relay_tokens = torch.full((pool_rows,), -(1 << 40)), torch.full((pool_rows,), -9)
    for row, length in zip(pool, seq_lens, strict=True):
        if 0 <= row < pool_rows:
            relay_lens[row], relay_tokens[row] = length, 500 + row
    return {
        "req_pool_indices": torch.tensor(pool, dtype=index_dtype, device=device),
        "req_to_token": spread(table.to(torch.int32).to(device)),
        "seq_lens": stale + 3 if relay else stale,
        "verify_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "anchor_tokens": torch.arange(batch, device=device) * 11 + 3,
        "relay_lens": relay_lens.to(device) if relay else None,
        "relay_tokens": relay_tokens.to(device) if relay else None,
        "mask_token": MASK_TOKEN,
        "max_positions": max_positions,
        "out_positions": spread(torch.zeros(batch, rows, dtype=torch.int64, device=device)),
        "out_cache_locs": spread(torch.zeros(batch, rows, dtype=torch.int64, device=device)),
        "out_draft_ids": spread(torch.zeros(batch, gamma, dtype=torch.int64, device=device)),
        "out_seq_lens": torch.zeros(batch, dtype=torch.int64, device=device) if used else None,
        "out_anchor_tokens": torch.zeros(batch, dtype=torch.int64, device=device) if used else None,
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
    yield _case("context_end_with_spare_columns", seq_lens=[60, 61, 63, 64], gamma=7, columns=76)
    yield _case("context_end_page_256", seq_lens=[252, 255, 256], gamma=7, columns=512, max_positions=256)
    yield _case("relay", seq_lens=[5, 0, 61], gamma=3, relay=True, used=True)
    yield _case("relay_b65_int32", seq_lens=[(7 * i) % 66 for i in range(65)], gamma=7, relay=True, used=True,
                index_dtype=torch.int32)  # fmt: skip
    yield _case("relay_padding_and_unknown_rows", seq_lens=[3, 4, 5, 6], gamma=2, pool=[-1, 1, 9_999_999, 2],
                verify_lens=[3, 0, 3, 1], relay=True, used=True)  # fmt: skip
    yield _case("relay_row_never_written", seq_lens=[-(1 << 40), 7], gamma=2, relay=True, used=True)
    yield _case("used_without_a_relay", seq_lens=[3, -1], gamma=2, verify_lens=[3, 0], used=True, stride=True)
    yield _case("two_requests_of_one_row", seq_lens=[3, 9], gamma=2, pool=[1, 1])
