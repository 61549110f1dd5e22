"""Kits of the commit stage's seams."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_plugin.conformance.seam_kits.draw import NAN, Draw, Drawn, or_none
from sgl_mega_plugin.conformance.seam_kits.kit import SeamKit


def context_kv(draw: Draw) -> Drawn:
    batch, rows, layers = draw.batch(), draw.size("T", 2, 5), draw.size("L", 1, 3)
    heads, size = draw.size("H", 1, 4), draw.fact("D", draw.random.choice([32, 64, 96, 128]))
    slots, table_rows, dtype = batch * rows + 10, 32, draw.dtype("dtype")

    def normal(*shape: int) -> Tensor:
        return draw.lay(torch.randn(*shape, generator=draw.numbers).to(dtype))

    commit_lens = draw.fact("commit_lens", draw.ints(batch, 0, rows))
    projected = normal(batch * rows, layers, 2, heads, size)
    for request, commit in enumerate(commit_lens):
        projected[request * rows + commit : (request + 1) * rows] = NAN
    # No two rows of a step share a location, but for those that are none.
    locations = draw.random.sample(range(1, slots), batch * rows)
    angles = torch.rand(table_rows, size // 2, generator=draw.numbers) * 6.3
    return {
        "projected_kv": projected,
        "k_norm_weights": normal(layers, size),
        "cos_sin": draw.lay(torch.cat([angles.cos(), angles.sin()], dim=-1)),
        "positions": draw.lay(torch.tensor(or_none(draw, draw.ints(batch * rows, 0, table_rows - 1))).view(batch, -1)),
        "cache_locs": draw.lay(torch.tensor(or_none(draw, locations)).view(batch, rows)),
        "commit_lens": draw.lay(torch.tensor(commit_lens, dtype=torch.int32)),
        "eps": draw.random.choice([1e-6, 1e-5]),
        "out_keys": [normal(slots, heads, size) for _ in range(layers)],
        "out_values": [normal(slots, heads, size) for _ in range(layers)],
    }, frozenset({"out_keys", "out_values"})


KITS = (SeamKit("context_kv", context_kv, lambda a: (a["positions"].shape[0], a["positions"].shape[1] - 1, 1)),)
