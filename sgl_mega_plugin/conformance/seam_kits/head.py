"""Kits of the LM head's seams."""

from __future__ import annotations

from typing import Any

import torch

from sgl_mega_plugin.conformance.seam_kits.draw import INF, NAN, NOTHING_KEPT, Draw, Drawn
from sgl_mega_plugin.conformance.seam_kits.kit import Arguments, Range, SeamKit

_LARGE = 6e4  # finite in every dtype; its products with the weights stay so in all but fp16


def draft_logits(draw: Draw) -> Drawn:
    batch, gamma, vocab = draw.batch(), draw.size("G", 1, 5), draw.vocab()
    anchor = draw.fact("anchor first", draw.chance(0.5))
    values = _head(draw, batch * (gamma + anchor), vocab)
    hidden = values["hidden"].view(batch, gamma + anchor, -1)
    if anchor:
        hidden[:, 0] = NAN
    outputs = draw.fact("outputs", draw.random.choice(["logits", "tokens", "both"]))
    logits = draw.zeros(batch, gamma, vocab, dtype=values["lm_head_weight"].dtype)
    return values | {
        "hidden": draw.lay(hidden),
        "out_logits": None if outputs == "tokens" else logits,
        "out_tokens": None if outputs == "logits" else draw.zeros(batch, gamma),
    }, NOTHING_KEPT


def target_argmax(draw: Draw) -> Drawn:
    batch, rows, vocab = draw.batch(), draw.size("T", 2, 6), draw.vocab()
    lens = draw.fact("verify_lens", draw.ints(batch, 0, rows))
    values = _head(draw, batch * rows, vocab)
    return values | {
        "hidden": draw.lay(values["hidden"]),
        "verify_lens": draw.lay(torch.tensor(lens, dtype=torch.int32)),
        "out_tokens": draw.zeros(batch, rows),
    }, NOTHING_KEPT


def _head(draw: Draw, rows: int, vocab: int) -> dict[str, Any]:
    """Eighths, whose sums are exact in any order: ties are common. A row in four holds what is no number, or is huge.

    A divisor of three leaves too many digits for exact sums if nothing rounds them.
    """
    depth, padding = draw.fact("H", draw.random.choice([8, 16, 24, 40])), draw.random.choice([0, 0, 3])
    dtype, weights = draw.dtype("hidden"), draw.dtype("weights")
    hidden = draw.eighths(rows, depth, reach=1).to(dtype)
    for row in range(rows):
        if draw.chance(0.25):
            hidden[row, draw.random.randrange(depth)] = draw.random.choice([NAN, INF, -INF, _LARGE, -_LARGE])
    head = draw.eighths(vocab + padding, depth, reach=1).to(weights)
    head[vocab:] = NAN
    divisors = [1.0, 1.0, 4.0] + [3.0] * (torch.float32 not in (dtype, weights))
    return {
        "hidden": hidden,
        "lm_head_weight": draw.lay(head),
        "divisor": draw.fact("divisor", draw.random.choice(divisors)),
        "vocab_size": vocab,
    }


def _ranges(arguments: Arguments) -> tuple[Range, ...]:
    if arguments["out_tokens"] is None:
        return ()
    return (("out_tokens", 0, arguments["vocab_size"] - 1),)


def _draft_sizes(arguments: Arguments) -> tuple[int, int, int]:
    output = arguments["out_tokens"] if arguments["out_logits"] is None else arguments["out_logits"]
    return output.shape[0], output.shape[1], arguments["vocab_size"]


def _target_sizes(arguments: Arguments) -> tuple[int, int, int]:
    batch, rows = arguments["out_tokens"].shape
    return batch, rows - 1, arguments["vocab_size"]


KITS = (
    SeamKit("draft_logits", draft_logits, _draft_sizes, _ranges),
    SeamKit("target_argmax", target_argmax, _target_sizes, _ranges),
)
