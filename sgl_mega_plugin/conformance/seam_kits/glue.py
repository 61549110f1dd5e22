"""Kits of the glue stage's seams."""

from __future__ import annotations

import torch

from sgl_mega_plugin.conformance.seam_kits.draw import NOTHING_KEPT, Draw, Drawn
from sgl_mega_plugin.conformance.seam_kits.kit import Arguments, Range, SeamKit


def step_inputs(draw: Draw) -> Drawn:
    batch, gamma, columns = draw.batch(), draw.size("G", 1, 8), draw.size("C", 1, 40)
    pool_rows = batch + draw.random.randint(0, 3)
    index_dtype, last = draw.index_dtype("lengths"), draw.size("max_positions", 1, 40)
    table = draw.random.sample(range(1, 1 << 20), pool_rows * columns)
    return {
        "req_pool_indices": draw.lay(torch.tensor(draw.ints(batch, -1, pool_rows), dtype=index_dtype)),
        "req_to_token": draw.lay(torch.tensor(table, dtype=torch.int32).view(pool_rows, columns)),
        "seq_lens": draw.lay(torch.tensor(draw.fact("seq_lens", draw.ints(batch, -2, 42)), dtype=index_dtype)),
        "verify_lens": draw.lay(torch.tensor(draw.fact("verify_lens", draw.ints(batch, 0, gamma + 1))).int()),
        "anchor_tokens": draw.lay(torch.tensor(draw.ints(batch, 0, 99))),
        "mask_token": 100,
        "max_positions": last,
        "out_positions": draw.zeros(batch, gamma + 1),
        "out_cache_locs": draw.zeros(batch, gamma + 1),
        "out_draft_ids": draw.zeros(batch, gamma),
    }, NOTHING_KEPT


def _step_ranges(arguments: Arguments) -> tuple[Range, ...]:
    last = min(arguments["max_positions"], arguments["req_to_token"].shape[1]) - 1
    return (
        ("out_positions", 0, last),
        ("out_cache_locs", 0, max(0, int(arguments["req_to_token"].max()))),
    )


KITS = (
    SeamKit(
        "step_inputs",
        step_inputs,
        lambda a: (a["out_positions"].shape[0], a["out_positions"].shape[1] - 1, a["mask_token"] + 1),
        _step_ranges,
    ),
)
