"""Conformance cases of `context_kv`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import Case
from sgl_mega_slots.common.case_tools import generator, strided

#: Buffers are compared whole: what a slot may not write must survive.
_KEEP = frozenset({"out_keys", "out_values"})


def cos_sin_table(positions: int, size: int, base: float = 10_000.0) -> Tensor:
    """The RoPE table [P, D] fp32: cos of D/2 angles, then their sin."""
    frequencies = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def arguments(
    device: str,
    *,
    locations: list[list[int]],
    commit_lens: list[int],
    layers: int = 2,
    heads: int = 2,
    size: int = 64,
    slots: int = 40,
    dtype: torch.dtype = torch.bfloat16,
    positions: list[list[int]] | None = None,
    table_rows: int = 64,
    stride: bool = False,
    eps: float = 1e-6,
) -> dict[str, Any]:
    """The seam's arguments; buffers hold random numbers that must survive where nothing is written."""
    batch, rows = len(locations), len(locations[0])
    source = generator(batch * 100 + rows + heads)
    spread = strided if stride else torch.clone
    where = torch.arange(rows).repeat(batch, 1) + 3 if positions is None else torch.tensor(positions)

    def random(*shape: int) -> Tensor:
        return spread(torch.randn(*shape, generator=source).to(device, dtype))

    return {
        "projected_kv": random(batch * rows, layers, 2, heads, size),
        "k_norm_weights": random(layers, size),
        "cos_sin": spread(cos_sin_table(table_rows, size).to(device)),
        "positions": spread(where.to(device)),
        "cache_locs": spread(torch.tensor(locations, device=device)),
        "commit_lens": torch.tensor(commit_lens, dtype=torch.int32, device=device),
        "eps": eps,
        "out_keys": [random(slots, heads, size) for _ in range(layers)],
        "out_values": [random(slots, heads, size) for _ in range(layers)],
    }


def _case(
    id_: str, edit: Callable[[dict[str, Any]], None] | None = None, *, large: bool = False, **kwargs: Any
) -> Case:
    def make(device: str) -> dict[str, Any]:
        values = arguments(device, **kwargs)
        if edit is not None:
            edit(values)
        return values

    return Case(id_, make, keep=_KEEP, kernel_only=large)


def _poison_uncommitted(values: dict[str, Any]) -> None:
    """NaN in every row past its request's commit length."""
    rows = values["positions"].shape[1]
    for request, commit in enumerate(values["commit_lens"].tolist()):
        values["projected_kv"][request * rows + commit : (request + 1) * rows] = float("nan")


def _zero_keys(values: dict[str, Any]) -> None:
    values["projected_kv"][:, :, 0] = 0.0


def _one_pool(values: dict[str, Any]) -> None:
    """Every layer's buffer is a view of one pool [L, S, 2, H, D]."""
    keys = values["out_keys"]
    slots, heads, size = keys[0].shape
    pool = torch.zeros(len(keys), slots, 2, heads, size, dtype=keys[0].dtype, device=keys[0].device)
    values["out_keys"] = [pool[layer, :, 0] for layer in range(len(keys))]
    values["out_values"] = [pool[layer, :, 1] for layer in range(len(keys))]


def cases() -> Iterator[Case]:
    """Every case; the ids say what is odd about them."""
    f32, f16 = torch.float32, torch.float16
    yield _case("b1", locations=[[5, 6, 7]], commit_lens=[2])
    yield _case("b1_one_layer_fp32", locations=[[5, 6]], commit_lens=[2], layers=1, heads=3, dtype=f32)
    yield _case("b3_every_length", locations=[[1, 2], [3, 4], [5, 6]], commit_lens=[0, 1, 2], heads=1)
    yield _case("h8_d128", locations=[[9, 8, 7, 6]], commit_lens=[3], heads=8, size=128, layers=3)
    yield _case("h3_d64_fp16", locations=[[9, 8], [30, 2]], commit_lens=[2, 1], heads=3, dtype=f16)
    yield _case("d96", locations=[[9, 8]], commit_lens=[2], size=96)
    yield _case("strided", locations=[[9, 8], [30, 2]], commit_lens=[2, 2], stride=True, heads=5)
    yield _case("buffers_of_one_pool", _one_pool, locations=[[9, 8], [30, 2]], commit_lens=[2, 2], layers=3)
    yield _case("zero_keys", _zero_keys, locations=[[9, 8]], commit_lens=[2], eps=1e-5)
    yield _case("padded_hidden_nan", _poison_uncommitted, locations=[[5, 6], [0, 0]], commit_lens=[2, 0])
    yield _case("padded_locations_minus_one", _poison_uncommitted, locations=[[5, 6], [-1, -1]], commit_lens=[1, 0])
    yield _case("padded_locations_huge", _poison_uncommitted, locations=[[5, 6], [9_999_999] * 2], commit_lens=[2, 0])
    yield _case("live_locations_out_of_range", locations=[[5, -1, 9_999_999, 0, 40, 39]], commit_lens=[6])
    yield _case("all_padding", _poison_uncommitted, locations=[[5, 6], [7, 8]], commit_lens=[0, 0])
    yield _case("context_end", locations=[[5, 6, 0, 0]], commit_lens=[4], positions=[[62, 63, 63, 63]])
    yield _case("position_out_of_range", locations=[[5, 6, 7]], commit_lens=[3], positions=[[-1, 63, 64]])
    yield _case(
        "b65_t8_qwen3",
        _poison_uncommitted,
        large=True,
        locations=[[1 + 8 * b + t for t in range(8)] for b in range(65)],
        commit_lens=[b % 9 for b in range(65)],
        layers=5,
        heads=8,
        size=128,
        slots=600,
    )
