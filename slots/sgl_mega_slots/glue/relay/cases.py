"""Conformance cases of `relay`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sgl_mega_plugin.contract import Case
from sgl_mega_slots.common.case_tools import strided

#: Outputs that are written in part.
KEPT = frozenset({"out_relay_lens", "out_relay_tokens"})


def arguments(
    device: str,
    *,
    pool: list[int],
    lens: list[int],
    verify_lens: list[int] | None = None,
    pool_rows: int = 9,
    index_dtype: torch.dtype = torch.int64,
    following: bool = True,
    stride: bool = False,
) -> dict[str, Any]:
    """The seam's arguments; every table row holds what an earlier step left."""
    batch = len(pool)
    spread = strided if stride else torch.clone
    verified = [4] * batch if verify_lens is None else verify_lens
    return {
        "req_pool_indices": torch.tensor(pool, dtype=index_dtype, device=device),
        "verify_lens": torch.tensor(verified, dtype=torch.int32, device=device),
        "new_seq_lens": torch.tensor(lens, dtype=index_dtype, device=device),
        "bonus_tokens": torch.arange(batch, device=device) * 13 + 5,
        "out_relay_lens": spread(torch.arange(pool_rows, device=device) + 1000),
        "out_relay_tokens": spread(torch.arange(pool_rows, device=device) + 2000),
        "out_next_seq_lens": torch.zeros(batch, dtype=index_dtype, device=device) if following else None,
        "out_next_anchors": torch.zeros(batch, dtype=torch.int64, device=device) if following else None,
    }


def _case(id_: str, **kwargs: Any) -> Case:
    return Case(id_, lambda device: arguments(device, **kwargs), keep=KEPT)


def cases() -> Iterator[Case]:
    """Every case; the ids say what is odd about them."""
    yield _case("b1", pool=[3], lens=[77])
    yield _case("b3_int32_strided", pool=[5, 1, 8], lens=[7, 0, 40], index_dtype=torch.int32, stride=True)
    yield _case("tables_only", pool=[5, 1], lens=[7, 9], following=False)
    yield _case("padding_names_a_live_row", pool=[2, 4, 2, 4], lens=[7, 9, 0, -1], verify_lens=[4, 1, 0, 0])
    yield _case("all_padding", pool=[2, 0], lens=[7, 9], verify_lens=[0, 0])
    yield _case("table_row_out_of_range", pool=[-1, 9, 9_999_999, 0], lens=[1, 2, 3, 4])
    yield _case("long_context", pool=[1, 2], lens=[(1 << 31) - 1, 1 << 33])
    yield _case("b300_more_than_a_program", pool=list(range(300, 0, -1)), lens=list(range(300)), pool_rows=301)
