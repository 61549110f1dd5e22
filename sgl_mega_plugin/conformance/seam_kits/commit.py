"""Kits of the commit stage's seams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.conformance.seam_kits.draw import FAR, NAN, Draw, Drawn, or_none
from sgl_mega_plugin.conformance.seam_kits.kit import Arguments, Range, SeamKit

_KV = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
_BUFFERS = frozenset({"out_keys", "out_values"})


def context_kv(draw: Draw) -> Drawn:
    batch, rows, layers = draw.batch(), draw.size("T", 2, 5), draw.size("L", 1, 3)
    heads, size = draw.size("H", 1, 4), draw.fact("D", draw.random.choice([32, 64, 96, 128]))
    slots, table_rows, dtype = batch * rows + 10, 32, draw.dtype("dtype")
    cache = _KV.get(draw.fact("cache", draw.random.choice(["", "", *_KV])), dtype)
    rotated = draw.fact("R", size if draw.chance(0.6) else draw.random.choice([2, size // 2]))

    def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return draw.lay(torch.randn(*shape, generator=draw.numbers).to(of))

    commit_lens = draw.fact("commit_lens", draw.ints(batch, 0, rows))
    projected = normal(batch * rows, layers, 2, heads, size)
    for request, commit in enumerate(commit_lens):
        projected[request * rows + commit : (request + 1) * rows] = NAN
    angles = torch.rand(table_rows, rotated // 2, generator=draw.numbers) * 6.3
    scaled = cache is not dtype and draw.chance(0.6)
    scales = torch.tensor([[draw.random.choice([0.125, 0.75, 3.0]) for _ in range(2)] for _ in range(layers)])
    return {
        "projected_kv": projected,
        "k_norm_weights": normal(layers, size),
        "cos_sin": draw.lay(torch.cat([angles.cos(), angles.sin()], dim=-1)),
        "neox": draw.fact("neox", draw.chance(0.7)),
        "commit_lens": draw.lay(torch.tensor(commit_lens, dtype=torch.int32)),
        "eps": draw.random.choice([1e-6, 1e-5]),
        "kv_scales": draw.lay(scales) if scaled else None,
        "out_keys": [normal(slots, heads, size, of=cache) for _ in range(layers)],
        "out_values": [normal(slots, heads, size, of=cache) for _ in range(layers)],
    } | _places(draw, batch, rows, slots, table_rows), _BUFFERS


def _places(draw: Draw, batch: int, rows: int, slots: int, table_rows: int) -> dict[str, Any]:
    """No two rows of a step share a slot, but for those that have none."""
    kind = draw.fact("places", draw.random.choice(["slots", "slots", "map", "ring"]))
    locations = draw.random.sample(range(1, slots), batch * rows)
    positions = or_none(draw, draw.ints(batch * rows, 0, table_rows - 1))
    mapped = ring_rows = None
    size = 0
    if kind == "map":
        entries = or_none(draw, draw.random.sample(range(1, slots), slots - 1))
        mapped = torch.tensor([0, *(entry for entry in entries if abs(entry) < 1 << 31)]).to(draw.index_dtype("map"))
    elif kind == "ring":
        size = draw.size("ring_size", 1, rows + 1)
        rings = range(1, max(2, slots // size))
        owners = draw.random.sample(rings, min(batch, len(rings)))
        ring_rows = torch.tensor([*owners, *[draw.random.choice([0, *FAR]) for _ in range(batch - len(owners))]])
        starts = draw.ints(batch, 0, table_rows - rows)
        positions = [start + column for start in starts for column in range(rows)]
    return {
        "positions": draw.lay(torch.tensor(positions).view(batch, rows)),
        "cache_locs": draw.lay(torch.tensor(or_none(draw, locations)).view(batch, rows)),
        "location_map": None if mapped is None else draw.lay(mapped),
        "ring_rows": None if ring_rows is None else draw.lay(ring_rows),
        "ring_size": size,
    }


def staged_kv(draw: Draw) -> Drawn:
    values, keep = context_kv(draw)
    values["out_commit_lens"] = values.pop("commit_lens")
    return values, keep | {"out_commit_lens"}


def kv_staging(draw: Draw) -> Drawn:
    batch, rows = draw.batch(), draw.size("T", 2, 9)
    staged = batch + draw.size("M - B", 0, 9)
    locations = or_none(draw, draw.random.sample(range(1, 1 << 20), batch * rows))
    lengths = draw.ints(batch, 0, rows)
    return {
        "cache_locs": draw.lay(torch.tensor(locations).view(batch, rows)),
        "positions": draw.lay(torch.tensor(or_none(draw, draw.ints(batch * rows, 0, 99))).view(batch, rows)),
        "commit_lens": draw.lay(torch.tensor(draw.fact("commit_lens", lengths), dtype=torch.int32)),
        "out_cache_locs": draw.zeros(staged, rows),
        "out_positions": draw.zeros(staged, rows),
        "out_commit_lens": draw.zeros(staged, dtype=torch.int32),
    }, frozenset()


def history_commit(draw: Draw) -> Drawn:
    batch, rows, ids = draw.batch(), draw.size("T", 2, 9), draw.size("N", 1, 5)
    table = batch + draw.size("Q - B", 0, 3)
    owners = draw.random.sample(range(table), batch)
    lengths = [0 if draw.chance(0.3) else draw.random.randint(1, rows) for _ in range(batch)]
    index_dtype = draw.index_dtype("table rows")
    far = [table, -1, torch.iinfo(index_dtype).max]
    chosen: Sequence[int] = [draw.random.choice(far) if draw.chance(0.15) else owner for owner in owners]
    tokens = torch.tensor(draw.ints(batch * rows, 0, 1 << 20)).view(batch, rows)
    return {
        "tokens": draw.lay(tokens),
        "req_pool_indices": draw.lay(torch.tensor(chosen, dtype=index_dtype)),
        "commit_lens": draw.lay(torch.tensor(draw.fact("commit_lens", lengths), dtype=torch.int32)),
        "out_histories": draw.lay(torch.tensor(draw.ints(table * ids, 0, 1 << 20)).view(table, ids)).to(
            draw.index_dtype("histories")
        ),
    }, frozenset({"out_histories"})


def _window(arguments: Arguments) -> tuple[int, int, int]:
    batch, rows = arguments["positions"].shape
    return batch, rows - 1, 1


def _staging_ranges(arguments: Arguments) -> tuple[Range, ...]:
    return (("out_commit_lens", 0, arguments["positions"].shape[1]),)


KITS = (
    SeamKit("context_kv", context_kv, _window),
    SeamKit("kv_staging", kv_staging, _window, _staging_ranges),
    SeamKit("staged_kv", staged_kv, _window, lambda arguments: (("out_commit_lens", 0, 0),)),
    SeamKit("history_commit", history_commit, lambda a: (a["tokens"].shape[0], a["tokens"].shape[1] - 1, 1)),
)
