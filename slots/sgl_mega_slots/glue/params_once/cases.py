"""Conformance cases of `params_once`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sgl_mega_plugin.contract import Case
from sgl_mega_slots.common.case_tools import strided

ALL = 1 << 30  # what an engine writes for "no top_k"
_INF, _NAN = float("inf"), float("nan")


def arguments(
    device: str,
    *,
    temperatures: list[float],
    top_ks: list[int],
    batch: int | None = None,
    verify_lens: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    top_dtype: torch.dtype = torch.int32,
    column: bool = False,
    stride: bool = False,
) -> dict[str, Any]:
    """The seam's arguments; with ``column`` the temperatures are [n, 1], as an engine's batch has them."""
    rows = len(top_ks) if batch is None else batch
    spread = strided if stride else torch.clone
    given = torch.tensor(temperatures, dtype=torch.float64).to(dtype).to(device)
    return {
        "temperatures": spread(given[:, None] if column else given),
        "top_ks": torch.tensor(top_ks, dtype=top_dtype, device=device),
        "verify_lens": None if verify_lens is None else torch.tensor(verify_lens, dtype=torch.int32, device=device),
        "out_temperatures": spread(torch.zeros(rows, device=device)),
        "out_greedy": spread(torch.zeros(rows, dtype=torch.bool, device=device)),
        "out_step_temperatures": spread(torch.zeros(rows, device=device)),
    }


def _case(id_: str, **kwargs: Any) -> Case:
    return Case(id_, lambda device: arguments(device, **kwargs))


def cases() -> Iterator[Case]:
    """Every case; the ids say what is odd about them."""
    yield _case("b1", temperatures=[0.7], top_ks=[ALL])
    yield _case("which_rows_are_greedy", temperatures=[0.0, 0.7, 0.7], top_ks=[ALL, 1, ALL], column=True)
    yield _case("odd_temperatures", top_ks=[ALL] * 10,
                temperatures=[_NAN, -0.7, -0.0, _INF, -_INF, 1e-5, 9.999999e-6, 1.1e-5, 1e-38, 1e-42])  # fmt: skip
    yield _case("top_k_0_and_below", temperatures=[1.0] * 5, top_ks=[0, -1, 2, 1, 50], top_dtype=torch.int64)
    yield _case("fewer_rows_than_the_graph", temperatures=[0.3, 0.6], top_ks=[ALL, 1], batch=5, column=True)
    yield _case("no_rows", temperatures=[], top_ks=[], batch=3)
    yield _case("padding", temperatures=[0.3, 0.6, 0.9, 1.2], top_ks=[ALL, ALL, 1, ALL], verify_lens=[4, 0, 1, 0])
    yield _case("padding_beyond_n", temperatures=[0.3, 0.6], top_ks=[ALL, ALL], batch=4, verify_lens=[4, 0, 4, 0])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        yield _case(str(dtype).removeprefix("torch."), temperatures=[0.7, 1e-6, 0.0], top_ks=[ALL] * 3, dtype=dtype)
    yield _case("column_strided", temperatures=[0.3, 0.0, 1.5], top_ks=[ALL] * 3, column=True, stride=True)
    yield _case(
        "b300_more_than_a_program",
        temperatures=[0.1 * (i % 9) for i in range(300)],
        top_ks=[1 + i % 2 for i in range(300)],
    )
