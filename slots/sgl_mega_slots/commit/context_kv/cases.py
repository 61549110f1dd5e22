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
    rotated: int | None = None,
    neox: bool = True,
    location_map: Tensor | None = None,
    ring_rows: list[int] | None = None,
    ring_size: int = 0,
    kv_dtype: torch.dtype | None = None,
    kv_scales: list[list[float]] | None = None,
) -> dict[str, Any]:
    """The seam's arguments; buffers hold random numbers that must survive where nothing is written."""
    batch, rows = len(locations), len(locations[0])
    source = generator(batch * 100 + rows + heads)
    spread = strided if stride else torch.clone
    where = torch.arange(rows).repeat(batch, 1) + 3 if positions is None else torch.tensor(positions)

    def random(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return spread(torch.randn(*shape, generator=source).to(device, of))

    def buffer() -> Tensor:
        return random(slots, heads, size, of=kv_dtype or dtype)

    return {
        "projected_kv": random(batch * rows, layers, 2, heads, size),
        "k_norm_weights": random(layers, size),
        "cos_sin": spread(cos_sin_table(table_rows, rotated or size).to(device)),
        "neox": neox,
        "positions": spread(where.to(device)),
        "cache_locs": spread(torch.tensor(locations, device=device)),
        "location_map": None if location_map is None else location_map.to(device),
        "ring_rows": None if ring_rows is None else torch.tensor(ring_rows, device=device),
        "ring_size": ring_size,
        "commit_lens": torch.tensor(commit_lens, dtype=torch.int32, device=device),
        "eps": eps,
        "kv_scales": None if kv_scales is None else spread(torch.tensor(kv_scales, device=device)),
        "out_keys": [buffer() for _ in range(layers)],
        "out_values": [buffer() for _ in range(layers)],
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


def _large(values: dict[str, Any]) -> None:
    """V at, around and past the limits of fp8, its steps' midpoints and its smallest numbers, and NaN."""
    odd = torch.tensor(
        [448, 464, 464.5, 480, 1e4, 57344, 61440, 6.5e4, torch.inf, torch.nan, 17, 19, 0.5, 2**-6, 2**-10, 2**-17, 0]
    )
    signed = torch.stack([odd, -odd], dim=-1).flatten()
    kv = values["projected_kv"]
    kv[:, :, 1, :, : len(signed)] = signed.to(kv.device, kv.dtype)


def _one_pool(values: dict[str, Any]) -> None:
    """Every layer's buffer is a view of one pool [L, S, 2, H, D]."""
    keys = values["out_keys"]
    slots, heads, size = keys[0].shape
    pool = torch.zeros(len(keys), slots, 2, heads, size, dtype=keys[0].dtype, device=keys[0].device)
    values["out_keys"] = [pool[layer, :, 0] for layer in range(len(keys))]
    values["out_values"] = [pool[layer, :, 1] for layer in range(len(keys))]


def _swa_map() -> Tensor:
    """Of 60 locations: some unmapped (the padding slot), negative or outside a pool of 40 slots."""
    entries = torch.arange(60) % 37 + 1
    entries[[12, 14, 15, 59]] = torch.tensor([0, -1, 40, 9_999_999])
    return entries


def _fp8_cases() -> Iterator[Case]:
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    scales = [[0.5, 0.75], [3.0, 0.0078125]]
    window: dict[str, Any] = {"locations": [[9, 8], [30, 2]], "commit_lens": [2, 1]}
    yield _case("e4m3", **window, kv_dtype=e4m3)
    yield _case("e4m3_scaled_strided", **window, kv_dtype=e4m3, kv_scales=scales, stride=True, heads=3)
    yield _case("e4m3_from_fp16_scaled", **window, kv_dtype=e4m3, kv_scales=scales, dtype=torch.float16)
    yield _case("e4m3_from_fp32", **window, kv_dtype=e4m3, dtype=torch.float32)
    yield _case("e5m2_scaled", **window, kv_dtype=e5m2, kv_scales=scales)
    for name, kv_dtype in (("e4m3", e4m3), ("e5m2", e5m2)):
        for dtype in (torch.bfloat16, torch.float32):
            yield _case(f"{name}_limits_from_{str(dtype)[6:]}", _large, **window, kv_dtype=kv_dtype, dtype=dtype)
    yield _case("e4m3_of_one_pool", _one_pool, **window, kv_dtype=e4m3, kv_scales=scales)


def _place_cases() -> Iterator[Case]:
    by_map = _swa_map()
    yield _case("location_map", locations=[[9, 8], [30, 2]], commit_lens=[2, 1], location_map=by_map)
    yield _case("location_map_int32", locations=[[50, 51]], commit_lens=[2], location_map=by_map.int())
    yield _case("map_to_none", locations=[[12, 14, 15, 59, 11]], commit_lens=[5], location_map=by_map)
    yield _case("not_in_the_map", locations=[[60, -1, 0, 1 << 45, 11]], commit_lens=[5], location_map=by_map)
    ring: dict[str, Any] = {"ring_size": 8, "ring_rows": [4, 2]}
    window: dict[str, Any] = {"locations": [[90, 91, 92, 93], [50, 51, 52, 53]], "commit_lens": [3, 4]}
    yield _case("ring_wraps", **window, **ring, positions=[[5, 6, 7, 8], [15, 16, 17, 18]])
    yield _case("ring_of_one", **window, ring_size=1, ring_rows=[39, 2])
    yield _case("commit_longer_than_the_ring", **window, ring_size=3, ring_rows=[12, 1])
    yield _case("rings_of_nobody", locations=[[9, 8]] * 4, commit_lens=[2] * 4, ring_size=8,
                ring_rows=[0, -1, 1 << 62, 5])  # fmt: skip
    yield _case("ring_padding_locations", _poison_uncommitted, locations=[[5, 0], [-1, 6]], commit_lens=[2, 2], **ring)


def _rope_cases() -> Iterator[Case]:
    window: dict[str, Any] = {"locations": [[9, 8], [30, 2]], "commit_lens": [2, 1]}
    yield _case("half_rotated", **window, rotated=32)
    yield _case("one_pair_rotated_strided", **window, rotated=2, stride=True)
    yield _case("three_eighths_rotated_d96_fp32", **window, rotated=36, size=96, dtype=torch.float32)
    yield _case("neighbours", **window, neox=False)
    yield _case("neighbours_half_rotated_d96", **window, neox=False, rotated=48, size=96)
    yield _case("infinite_tail_is_not_rotated", _infinite_tail, **window, rotated=32)


def _infinite_tail(values: dict[str, Any]) -> None:
    """Weights of -inf, 0 and inf behind the rotated elements: a rotation by no angle would make NaN of them."""
    values["k_norm_weights"][:, 32:35] = torch.tensor([-torch.inf, -0.0, torch.inf])


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
    yield from _fp8_cases()
    yield from _place_cases()
    yield from _rope_cases()
    qwen3: dict[str, Any] = {
        "locations": [[1 + 8 * b + t for t in range(8)] for b in range(65)],
        "commit_lens": [b % 9 for b in range(65)],
        "layers": 5,
        "heads": 8,
        "size": 128,
        "slots": 600,
    }
    yield _case("b65_t8_qwen3", _poison_uncommitted, large=True, **qwen3)
    yield _case("b65_t8_qwen3_e4m3", _poison_uncommitted, large=True, **qwen3, kv_dtype=torch.float8_e4m3fn)
