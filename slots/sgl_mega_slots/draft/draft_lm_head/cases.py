"""Conformance cases of `draft_logits`.

Most have rows and weights that are multiples of 1/8, whose sums are exact in fp32 in any order: kernel and reference
then agree bit for bit, and rounding to the weights' dtype makes ties.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import Case
from sgl_mega_slots.common.case_tools import strided
from sgl_mega_slots.common.lm_head.case_rows import NAN, dead_rows, exact, exact_weight, one_live_id, planted


def arguments(
    hidden: Tensor,
    lm_head_weight: Tensor,
    gamma: int,
    *,
    vocab: int | None = None,
    divisor: float = 1.0,
    stride: bool = False,
    outputs: str = "logits and tokens",
) -> dict[str, Any]:
    """The seam's arguments on the device of ``hidden`` [B, Q, H]; V is the weight's rows unless given."""
    batch, device = hidden.shape[0], hidden.device
    vocab = len(lm_head_weight) if vocab is None else vocab
    spread = strided if stride else torch.clone
    logits = torch.zeros(batch, gamma, vocab, dtype=lm_head_weight.dtype, device=device)
    tokens = torch.zeros(batch, gamma, dtype=torch.int64, device=device)
    return {
        "hidden": spread(hidden),
        "lm_head_weight": spread(lm_head_weight.to(device)),
        "divisor": divisor,
        "vocab_size": vocab,
        "out_logits": spread(logits) if "logits" in outputs else None,
        "out_tokens": spread(tokens) if "tokens" in outputs else None,
    }


def _exact(
    id_: str,
    batch: int,
    gamma: int,
    vocab: int,
    depth: int,
    *,
    hidden: torch.dtype = torch.bfloat16,
    weight: torch.dtype = torch.bfloat16,
    anchor: bool = False,
    padding: int = 0,
    large: bool = False,
    **kwargs: Any,
) -> Case:
    """A case in which every order of the sums gives the same bits. With ``anchor`` a block's first row is NaN."""

    def make(device: str) -> dict[str, Any]:
        rows = exact((batch * gamma, depth), 2, hidden, len(id_)).view(batch, gamma, depth)
        if anchor:
            rows = torch.cat([torch.full_like(rows[:, :1], NAN), rows], dim=1)
        head = exact_weight(vocab, depth, weight, 3, padding=padding)
        return arguments(rows.to(device), head, gamma, vocab=vocab, **kwargs)

    return Case(id_, make, kernel_only=large, exact=True)


def _rounding(id_: str, batch: int, gamma: int, vocab: int, depth: int, dtype: torch.dtype, *, large: bool) -> Case:
    def make(device: str) -> dict[str, Any]:
        hidden, weight = planted(batch * gamma, vocab, depth, dtype)
        return arguments(hidden.view(batch, gamma, depth).to(device), weight, gamma)

    return Case(id_, make, kernel_only=large)


def _dead(dtype: torch.dtype) -> Case:
    def make(device: str) -> dict[str, Any]:
        hidden, weight = dead_rows(dtype)
        return arguments(hidden.view(2, 3, 16).to(device), weight, 3)

    return Case(f"dead_rows_{str(dtype).removeprefix('torch.')}", make, exact=True)


def _one_live_id(device: str) -> dict[str, Any]:
    hidden, weight = one_live_id(torch.bfloat16)
    return arguments(hidden.view(1, 2, 16).to(device), weight, 2)


def _all_equal(device: str) -> dict[str, Any]:
    """Rows of zeros: every id ties, in every tile and program."""
    return arguments(torch.zeros(2, 2, 24, device=device), exact_weight(130, 24, torch.float32, 3), 2)


def cases() -> Iterator[Case]:
    """Every case; the ids say what is odd about them."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    yield _exact("b1_g7", 1, 7, 97, 40)
    yield _exact("b1_g1_depth_8", 1, 1, 33, 8)
    yield _exact("b3_strided_anchor", 3, 3, 97, 24, anchor=True, stride=True)
    yield _exact("b2_g8_fills_a_block", 2, 8, 65, 32)
    yield _exact("b5_g7_three_blocks", 5, 7, 65, 24)
    yield _exact("b2_padded_vocabulary", 2, 3, 61, 24, padding=3)
    yield _exact("v1", 2, 2, 1, 16)
    yield _exact("logits_only", 2, 3, 70, 24, outputs="logits")
    yield _exact("tokens_only", 2, 3, 70, 24, outputs="tokens")
    yield _exact("tokens_only_anchor_strided", 2, 3, 70, 24, outputs="tokens", anchor=True, stride=True)
    yield _exact("fp16_everywhere", 2, 3, 70, 40, hidden=f16, weight=f16)
    yield _exact("fp32_everywhere", 2, 3, 70, 40, hidden=f32, weight=f32)
    yield _exact("fp32_hidden_bf16_weight", 2, 3, 70, 24, hidden=f32)
    yield _exact("bf16_hidden_fp32_weight", 2, 3, 70, 24, weight=f32)
    yield _exact("divisor_eight", 2, 3, 70, 24, divisor=8.0)
    yield _exact("divisor_three_rounds_hidden", 2, 3, 70, 24, divisor=3.0)
    yield _exact("divisor_three_fp32_hidden", 2, 3, 70, 24, divisor=3.0, hidden=f32)
    yield Case("every_id_ties", _all_equal, exact=True)
    for dtype in (f32, bf16, f16):
        yield _dead(dtype)
    yield Case("one_live_id_among_nan", _one_live_id, exact=True)
    yield _rounding("gaussian_bf16", 1, 3, 97, 96, bf16, large=False)
    yield _rounding("gaussian_fp32", 1, 3, 97, 96, f32, large=False)
    yield _exact("qwen3_vocab_b1", 1, 7, 151_936, 1024, anchor=True, large=True)
    yield _exact("qwen3_vocab_b5_padded_tokens_only", 5, 7, 151_669, 1024, padding=267, outputs="tokens", large=True)
    yield _exact("smollm2_vocab_b65_two_blocks", 65, 3, 49_152, 576, large=True)
    yield _exact("smollm2_vocab_fp32", 4, 7, 49_152, 576, hidden=f32, weight=f32, large=True)
    yield _rounding("gaussian_depth_4096", 9, 7, 8_193, 4096, bf16, large=True)
