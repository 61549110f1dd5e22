"""Conformance cases of `histories`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sgl_mega_plugin.contract import Case
from sgl_mega_slots.common.case_tools import strided

#: The table is compared whole: rows of other requests must survive.
_KEEP = frozenset({"out_histories"})
_STALE = -77  # a token that may not be read


def arguments(
    device: str,
    *,
    commit_lens: list[int],
    rows: int,
    ids: int,
    pool: list[int] | None = None,
    dtype: torch.dtype = torch.int32,
    index_dtype: torch.dtype = torch.int64,
    stride: bool = False,
) -> dict[str, Any]:
    """The seam's arguments; every token and every old id says where it was, tokens past the commit are stale."""
    batch = len(commit_lens)
    pool = list(range(batch, 0, -1)) if pool is None else pool
    spread = strided if stride else torch.clone
    tokens = 1000 * torch.arange(1, batch + 1)[:, None] + torch.arange(rows)
    tokens[torch.arange(rows) >= torch.tensor(commit_lens)[:, None]] = _STALE
    old = -1000 * torch.arange(1, batch + 3)[:, None] - torch.arange(ids)
    return {
        "tokens": spread(tokens.to(device)),
        "req_pool_indices": torch.tensor(pool, dtype=index_dtype, device=device),
        "commit_lens": torch.tensor(commit_lens, dtype=torch.int32, device=device),
        "out_histories": spread(old.to(device, dtype)),
    }


def _case(id_: str, **kwargs: Any) -> Case:
    return Case(id_, lambda device: arguments(device, **kwargs), keep=_KEEP)


def cases() -> Iterator[Case]:
    """Every case; the ids say what is odd about them."""
    yield _case("b1_bigrams", commit_lens=[1], rows=2, ids=1)
    yield _case("b3_every_length", commit_lens=[0, 1, 2], rows=2, ids=3)
    yield _case("longer_than_the_history", commit_lens=[8, 5, 3], rows=8, ids=3)
    yield _case("shorter_than_the_history", commit_lens=[1, 2, 4], rows=4, ids=9)
    yield _case("int64_strided_int32_rows", commit_lens=[2, 4], rows=4, ids=3, dtype=torch.int64,
                index_dtype=torch.int32, stride=True)  # fmt: skip
    yield _case("padding_shares_a_row", commit_lens=[3, 0, 0], rows=4, ids=3, pool=[2, 0, 0])
    yield _case("all_padding", commit_lens=[0, 0], rows=3, ids=2)
    yield _case("table_row_out_of_range", commit_lens=[2, 2, 2, 2], rows=3, ids=3, pool=[-1, 6, 1, 9_999_999])
    yield _case("lengths_out_of_range", commit_lens=[-3, 0x7FFFFFFF], rows=3, ids=2)
    yield _case("b65_more_than_a_tile", commit_lens=[b % 9 for b in range(65)], rows=8, ids=3)
