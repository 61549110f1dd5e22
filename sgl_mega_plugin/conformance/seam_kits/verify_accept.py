"""Kits of the verify-accept stage's seams."""

from __future__ import annotations

from typing import Any

import torch

from sgl_mega_plugin.conformance.arguments import turn_winners
from sgl_mega_plugin.conformance.seam_kits.draw import FAR, INF, NOTHING_KEPT, Draw, Drawn
from sgl_mega_plugin.conformance.seam_kits.kit import Arguments, Range, SeamKit


def greedy_accept(draw: Draw) -> Drawn:
    return _accept(draw, draw.batch(), draw.size("T", 2, 6), draw.vocab()), NOTHING_KEPT


def sampled_accept(draw: Draw) -> Drawn:
    batch, rows, vocab = draw.batch(), draw.size("T", 2, 6), draw.vocab()
    temperatures = draw.temperatures("temperatures", batch)
    q_temperatures = torch.where(temperatures > 0, temperatures, 1.0) if draw.chance(0.7) else torch.ones(batch)
    kept = draw.fact("draft logits", draw.chance(0.6))
    q = draw.logits(batch * (rows - 1), vocab, draw.dtype("q"), 4).view(batch, rows - 1, vocab) if kept else None
    values = _accept(draw, batch, rows, vocab)
    if q is not None:
        law = (torch.nan_to_num(q.float(), -INF, 50.0, -INF) / q_temperatures[:, None, None]).softmax(-1)
        drafts = torch.multinomial(law.nan_to_num(1.0).flatten(0, 1), 1, generator=draw.numbers).view(batch, -1)
        drawn = torch.rand(batch, 1, generator=draw.numbers) < 0.8  # other rows keep ids of any kind
        values["candidates"][:, 1:] = torch.where(drawn, drafts, values["candidates"][:, 1:])
    return values | {
        "draft_logits": None if q is None else draw.lay(q),
        "target_temperatures": draw.lay(temperatures),
        "draft_temperatures": draw.lay(q_temperatures),
        "noise_key": draw.random.getrandbits(64),
        "noise_offset": draw.lay(torch.tensor([draw.random.getrandbits(40)])),
    }, NOTHING_KEPT


def _accept(draw: Draw, batch: int, rows: int, vocab: int) -> dict[str, Any]:
    """What both accepts take: drafts that mostly agree with the row before them."""
    logits = draw.logits(batch * rows, vocab, draw.dtype("logits"), 2)
    if draw.fact("near ties", draw.chance(0.5)):
        turn_winners(logits, torch.rand(len(logits), generator=draw.numbers) < 0.5)
    known = torch.where(logits.isnan(), -INF, logits.float())
    candidates = torch.zeros(batch, rows, dtype=torch.int64)
    candidates[:, 1:] = known.argmax(-1).view(batch, rows)[:, :-1]
    for request in range(batch):
        if draw.chance(0.6):
            wrong = draw.random.choice([*FAR, vocab, draw.random.randrange(vocab)])
            candidates[request, draw.random.randrange(1, rows)] = wrong
    seq_dtype = draw.index_dtype("seq_lens")
    lens = draw.fact("verify_lens", draw.ints(batch, 0, rows))
    return {
        "candidates": draw.lay(candidates),
        "target_logits": draw.lay(logits),
        "seq_lens": draw.lay(torch.tensor(draw.ints(batch, 0, 1 << 20), dtype=seq_dtype)),
        "verify_lens": draw.lay(torch.tensor(lens, dtype=torch.int32)),
        "out_correct_lens": draw.zeros(batch, dtype=torch.int32),
        "out_bonus_tokens": draw.zeros(batch),
        "out_commit_lens": draw.zeros(batch, dtype=torch.int32),
        "out_new_seq_lens": draw.zeros(batch, dtype=seq_dtype),
        "out_tokens": draw.zeros(batch, rows),
    }


def _accept_ranges(arguments: Arguments) -> tuple[Range, ...]:
    rows, vocab = arguments["candidates"].shape[1], arguments["target_logits"].shape[-1]
    return (
        ("out_correct_lens", 0, rows - 1),
        ("out_bonus_tokens", 0, vocab - 1),
        ("out_commit_lens", 0, rows),
        ("out_tokens", 0, vocab - 1),
    )


def _sizes(arguments: Arguments) -> tuple[int, int, int]:
    batch, rows = arguments["candidates"].shape
    return batch, rows - 1, arguments["target_logits"].shape[1]


KITS = (
    SeamKit("greedy_accept", greedy_accept, _sizes, _accept_ranges),
    SeamKit(
        "sampled_accept",
        sampled_accept,
        _sizes,
        _accept_ranges,
        {"target_logits": "target_temperatures", "draft_logits": "draft_temperatures"},
    ),
)
