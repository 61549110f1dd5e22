"""Kits of the draft stage's seams."""

from __future__ import annotations

from typing import Any

import torch

from sgl_mega_plugin.conformance.seam_kits.draw import FAR, NOTHING_KEPT, Draw, Drawn
from sgl_mega_plugin.conformance.seam_kits.kit import Arguments, Range, SeamKit


def draft_block(draw: Draw) -> Drawn:
    batch, gamma, vocab, rank = draw.batch(), draw.size("G", 1, 5), draw.vocab(), draw.random.choice([16, 24])
    draw.fact("R", rank)
    base, weights = draw.dtype("logits"), draw.dtype("weights")
    anchors = [draw.random.choice(FAR) if draw.chance(0.15) else draw.random.randrange(vocab) for _ in range(batch)]
    step_dtype = torch.float32 if draw.fact("fp32 steps", draw.chance(0.2)) else torch.promote_types(base, weights)
    keep_logits = draw.fact("step logits", draw.chance(0.7))
    return {
        "base_logits": draw.lay(draw.logits(batch * gamma, vocab, base, 4).view(batch, gamma, vocab)),
        "anchor_tokens": draw.lay(torch.tensor(draw.fact("anchors", anchors))[:, None])[:, 0],
        "markov_w1": draw.lay(draw.eighths(vocab, rank, reach=1).to(weights)),
        "markov_w2": draw.lay(draw.eighths(vocab, rank, reach=1).to(weights)),
        **_mixer(draw, batch, gamma, rank, weights),
        "temperatures": draw.lay(draw.temperatures("temperatures", batch)),
        "noise_key": draw.random.getrandbits(64),
        "noise_offset": draw.lay(torch.tensor([draw.random.getrandbits(40)])),
        "out_draft_tokens": draw.zeros(batch, gamma),
        "out_step_logits": draw.zeros(batch, gamma, vocab, dtype=step_dtype) if keep_logits else None,
        "out_features": draw.zeros(batch, gamma, rank, dtype=weights) if draw.chance(0.5) else None,
    }, NOTHING_KEPT


def _mixer(draw: Draw, batch: int, gamma: int, rank: int, weights: torch.dtype) -> dict[str, Any]:
    """No mixer, a gated head or an RNN whose sums are odd multiples of 64.

    So far out sigmoid is 0 or 1 and tanh -1 or 1 in every dtype, and what follows is exact in any order as well.
    """
    head = draw.fact("head", draw.random.choice(["vanilla", "gated", "rnn"]))
    if head == "vanilla":
        return dict.fromkeys(("draft_hidden", "mixer_weight", "mixer_bias"))
    width = draw.size("H", 1, 40)
    rows, columns = (rank, width + rank) if head == "gated" else (3 * rank, 2 * rank + width)
    signs = torch.randint(0, 2, (rows,), generator=draw.numbers) * 2 - 1
    factors = torch.randint(-1, 2, (rows, columns), generator=draw.numbers) * 1024  # times an eighth: 128s
    return {
        "draft_hidden": draw.lay(draw.eighths(batch, gamma, width, reach=1).to(weights)),
        "mixer_weight": draw.lay(factors.to(weights)),
        "mixer_bias": draw.lay((signs * 64).to(weights)),
    }


def _block_ranges(arguments: Arguments) -> tuple[Range, ...]:
    return (("out_draft_tokens", 0, arguments["base_logits"].shape[-1] - 1),)


KITS = (
    SeamKit(
        "draft_block",
        draft_block,
        lambda a: tuple(a["base_logits"].shape),
        _block_ranges,
        {"base_logits": "temperatures"},
    ),
)
