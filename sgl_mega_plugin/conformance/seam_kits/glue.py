"""Kits of the glue stage's seams."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_plugin.conformance.seam_kits.draw import FAR, INF, NAN, NOTHING_KEPT, Draw, Drawn
from sgl_mega_plugin.conformance.seam_kits.kit import Arguments, Range, SeamKit

_INT32_MAX = 2**31 - 1
_PAGES = ("out_page_table", "out_window_page_table")
_INDICES = ("out_kv_indices", "out_window_kv_indices")
_TABLES = ("out_relay_lens", "out_relay_tokens")


def step_inputs(draw: Draw) -> Drawn:
    batch, gamma, columns = draw.batch(), draw.size("G", 1, 8), draw.size("C", 1, 40)
    pool_rows = batch + draw.random.randint(0, 3)
    index_dtype, last = draw.index_dtype("lengths"), draw.size("max_positions", 1, 40)
    table = draw.random.sample(range(1, 1 << 20), pool_rows * columns)
    relayed, used = draw.fact("relay", draw.chance(0.5)), draw.chance(0.5)
    relay = torch.tensor(draw.ints(pool_rows, -2, 42)), torch.tensor(draw.ints(pool_rows, 0, 99))
    return {
        "req_pool_indices": draw.lay(torch.tensor(draw.ints(batch, -1, pool_rows), dtype=index_dtype)),
        "req_to_token": draw.lay(torch.tensor(table, dtype=torch.int32).view(pool_rows, columns)),
        "seq_lens": draw.lay(torch.tensor(draw.fact("seq_lens", draw.ints(batch, -2, 42)), dtype=index_dtype)),
        "verify_lens": draw.lay(torch.tensor(draw.fact("verify_lens", draw.ints(batch, 0, gamma + 1))).int()),
        "anchor_tokens": draw.lay(torch.tensor(draw.ints(batch, 0, 99))),
        "relay_lens": draw.lay(relay[0]) if relayed else None,
        "relay_tokens": draw.lay(relay[1]) if relayed else None,
        "mask_token": 100,
        "max_positions": last,
        "out_positions": draw.zeros(batch, gamma + 1),
        "out_cache_locs": draw.zeros(batch, gamma + 1),
        "out_draft_ids": draw.zeros(batch, gamma),
        "out_seq_lens": draw.zeros(batch) if used else None,
        "out_anchor_tokens": draw.zeros(batch) if used else None,
    }, NOTHING_KEPT


def _step_ranges(arguments: Arguments) -> tuple[Range, ...]:
    last = min(arguments["max_positions"], arguments["req_to_token"].shape[1]) - 1
    return (
        ("out_positions", 0, last),
        ("out_cache_locs", 0, max(0, int(arguments["req_to_token"].max()))),
    )


def attention_metadata(draw: Draw) -> Drawn:
    """Any mixture of outputs; pages, windows, rooms and maps too small for some requests."""
    batch, rows, columns = draw.batch(), draw.size("T", 1, 9), draw.size("C", 1, 70)
    page_size = draw.fact("page_size", draw.random.choice([1, 1, 2, 4, 16, 64]))
    window = draw.fact("window", draw.random.choice([0, 1, 3, 16, 100]))
    pool_rows, index_dtype = batch + draw.random.randint(0, 3), draw.index_dtype("lengths")
    most = -(-columns // page_size)
    pages = draw.fact("M", draw.random.choice([most, most, most + 2, max(1, most - 1)]))
    slots = draw.size("S", 1, 200)
    entries = [draw.random.choice(FAR[:2]) if draw.chance(0.03) else e for e in draw.ints(pool_rows * columns, 0, 250)]
    rooms = {name: draw.random.choice([batch * columns, draw.random.randint(0, batch * columns)]) for name in _INDICES}
    kind = draw.index_dtype("indices")
    shapes = {
        "out_qo_indptr": ((batch + 1,), torch.int32),
        "out_mask_indptr": ((batch + 1,), torch.int64),
        **dict.fromkeys(_PAGES, ((batch, pages), torch.int32)),
        "out_kv_indices": ((rooms["out_kv_indices"],), kind),
        "out_window_kv_indptr": ((batch + 1,), torch.int32),
        "out_window_kv_indices": ((rooms["out_window_kv_indices"],), kind),
        "out_window_kv_offsets": ((batch,), torch.int32),
    }
    wanted = {name for name in shapes if draw.chance(0.6)}
    if window == 0:
        wanted -= {name for name in wanted if name.startswith("out_window_kv")}
    if "out_window_kv_indptr" not in wanted:
        wanted -= {"out_window_kv_indices"}
    draw.fact("outputs", sorted(wanted))
    mapped = torch.tensor(draw.ints(slots, -1, 99), dtype=draw.index_dtype("map")) if draw.chance(0.6) else None
    outputs = {name: draw.zeros(*shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    return {
        "req_pool_indices": draw.lay(torch.tensor(draw.ints(batch, -1, pool_rows), dtype=index_dtype)),
        "req_to_token": draw.lay(torch.tensor(entries, dtype=torch.int32).view(pool_rows, columns)),
        "seq_lens": draw.lay(torch.tensor(draw.fact("seq_lens", draw.ints(batch, -2, 75)), dtype=index_dtype)),
        "verify_lens": draw.lay(torch.tensor(draw.fact("verify_lens", draw.ints(batch, 0, rows))).int()),
        "query_rows": rows,
        "kv_rows": draw.fact("kv_rows", draw.random.choice([0, rows])),
        "page_size": page_size,
        "window": window,
        "location_map": None if mapped is None else draw.lay(mapped),
        "out_kv_lens": draw.zeros(batch, dtype=torch.int32),
        "out_kv_indptr": draw.zeros(batch + 1, dtype=torch.int32),
        **{name: outputs[name] if name in wanted else None for name in shapes},
    }, frozenset({*_PAGES, *_INDICES} & wanted)


def _attention_ranges(arguments: Arguments) -> tuple[Range, ...]:
    columns, batch = arguments["req_to_token"].shape[1], arguments["out_kv_lens"].shape[0]
    room = arguments["out_kv_indices"]
    ranges: list[Range] = [
        ("out_kv_lens", 0, columns),
        ("out_kv_indptr", 0, batch * columns if room is None else len(room)),
    ]
    if arguments["out_window_kv_offsets"] is not None:
        ranges.append(("out_window_kv_offsets", 0, columns))
    # Entries that stay as they were are in the range too: the kit keeps them, and they start at zero.
    for name in (*_PAGES, *_INDICES):
        if arguments[name] is not None:
            ranges.append((name, 0, _INT32_MAX))
    return tuple(ranges)


def relay(draw: Draw) -> Drawn:
    batch, index_dtype, following = draw.batch(), draw.index_dtype("lengths"), draw.chance(0.6)
    pool_rows = batch + draw.random.randint(0, 3)
    verify_lens = draw.fact("verify_lens", [draw.random.choice([0, 1, 8]) for _ in range(batch)])
    # Live rows name rows of their own; a padding row may name another's.
    own = draw.random.sample(range(-1, pool_rows + 1), batch)
    rows = [row if lens else draw.random.randint(-1, pool_rows) for row, lens in zip(own, verify_lens, strict=True)]

    def next_rows(dtype: torch.dtype) -> Tensor | None:
        return draw.zeros(batch, dtype=dtype) if following else None

    return {
        "req_pool_indices": draw.lay(torch.tensor(draw.fact("rows", rows), dtype=index_dtype)),
        "verify_lens": draw.lay(torch.tensor(verify_lens).int()),
        "new_seq_lens": draw.lay(torch.tensor(draw.ints(batch, -1, 1 << 20), dtype=index_dtype)),
        "bonus_tokens": draw.lay(torch.tensor(draw.ints(batch, 0, 99))),
        "out_relay_lens": draw.lay(torch.tensor(draw.ints(pool_rows, 0, 99))),
        "out_relay_tokens": draw.lay(torch.tensor(draw.ints(pool_rows, 0, 99))),
        "out_next_seq_lens": next_rows(index_dtype),
        "out_next_anchors": next_rows(torch.int64),
    }, frozenset(_TABLES)


def step_params(draw: Draw) -> Drawn:
    batch = draw.batch()
    given = draw.size("n", 0, batch)
    odd = [0.0, 0.3, 0.7, 1.0, 1.5, 1e-5, 1e-6, -1.0, NAN, INF]
    values = torch.tensor(draw.fact("temperatures", [draw.random.choice(odd) for _ in range(given)]))
    values = values.to(draw.dtype("temperature dtype"))
    top_ks = draw.fact("top_ks", [draw.random.choice([-1, 0, 1, 2, 40, 1 << 30]) for _ in range(given)])
    padded = draw.fact("verify_lens", [draw.random.choice([0, 1, 8]) for _ in range(batch)])
    return {
        "temperatures": draw.lay(values.view(-1, 1) if draw.chance(0.5) else values),
        "top_ks": draw.lay(torch.tensor(top_ks, dtype=draw.index_dtype("top_k dtype"))),
        "verify_lens": draw.lay(torch.tensor(padded).int()) if draw.chance(0.5) else None,
        "out_temperatures": draw.zeros(batch, dtype=torch.float32),
        "out_greedy": draw.zeros(batch, dtype=torch.bool),
        "out_step_temperatures": draw.zeros(batch, dtype=torch.float32),
    }, NOTHING_KEPT


KITS = (
    SeamKit(
        "step_inputs",
        step_inputs,
        lambda a: (a["out_positions"].shape[0], a["out_positions"].shape[1] - 1, a["mask_token"] + 1),
        _step_ranges,
    ),
    SeamKit(
        "attention_metadata",
        attention_metadata,
        lambda a: (a["out_kv_lens"].shape[0], max(1, a["query_rows"] - 1), 1),
        _attention_ranges,
    ),
    SeamKit("relay", relay, lambda a: (a["req_pool_indices"].shape[0], 1, 1)),
    SeamKit("step_params", step_params, lambda a: (a["out_temperatures"].shape[0], 1, 1)),
)
