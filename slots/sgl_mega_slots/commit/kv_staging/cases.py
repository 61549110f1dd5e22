"""Conformance cases of `kv_staging`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sgl_mega_plugin.contract import Case
from sgl_mega_slots.common.case_tools import strided


def arguments(
    device: str,
    *,
    locations: list[list[int]],
    commit_lens: list[int],
    staged: int,
    positions: list[list[int]] | None = None,
    stride: bool = False,
) -> dict[str, Any]:
    """The seam's arguments; ``staged`` is M."""
    batch, rows = len(locations), len(locations[0])
    spread = strided if stride else torch.clone
    where = torch.arange(batch * rows).view(batch, rows) * 3 + 1 if positions is None else torch.tensor(positions)
    return {
        "cache_locs": spread(torch.tensor(locations, device=device)),
        "positions": spread(where.to(device)),
        "commit_lens": torch.tensor(commit_lens, dtype=torch.int32, device=device),
        "out_cache_locs": spread(torch.zeros(staged, rows, dtype=torch.int64, device=device)),
        "out_positions": spread(torch.zeros(staged, rows, dtype=torch.int64, device=device)),
        "out_commit_lens": torch.zeros(staged, dtype=torch.int32, device=device),
    }


def _case(id_: str, **kwargs: Any) -> Case:
    return Case(id_, lambda device: arguments(device, **kwargs))


def cases() -> Iterator[Case]:
    """Every case; the ids say what is odd about them."""
    yield _case("b1_m1", locations=[[5, 6]], commit_lens=[2], staged=1)
    yield _case("two_requests_of_four", locations=[[10, 11, 12], [20, 21, 22]], commit_lens=[2, 1], staged=4)
    yield _case("b3_m5_strided", locations=[[1, 2], [3, 4], [5, 6]], commit_lens=[0, 1, 2], staged=5, stride=True)
    yield _case("padding_in_the_batch", locations=[[5, 6], [0, 0]], commit_lens=[2, 0], staged=3)
    yield _case(
        "far_locations_are_kept", locations=[[-1, 9_999_999], [1 << 45, 3]], commit_lens=[2, 1], staged=2,
        positions=[[-1, 1 << 40], [0, 63]],
    )  # fmt: skip
    yield _case("lengths_out_of_range", locations=[[1, 2], [3, 4]], commit_lens=[-5, 0x7FFFFFFF], staged=3)
    yield _case(
        "b33_m65_more_than_a_tile",
        locations=[[1 + 8 * b + t for t in range(8)] for b in range(33)],
        commit_lens=[b % 9 for b in range(33)],
        staged=65,
    )
