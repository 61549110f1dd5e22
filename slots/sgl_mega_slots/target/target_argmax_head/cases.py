"""Conformance cases of `target_argmax`: integers only, so every winner is clear or every sum exact."""

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
    verify_lens: list[int],
    *,
    vocab: int | None = None,
    divisor: float = 1.0,
    stride: bool = False,
) -> dict[str, Any]:
    """The seam's arguments on the device of ``hidden`` [B * T, H]; rows that nobody wants become NaN."""
    batch, device = len(verify_lens), hidden.device
    rows = len(hidden) // batch
    wanted = torch.arange(rows) < torch.tensor(verify_lens)[:, None]
    spread = strided if stride else torch.clone
    return {
        "hidden": spread(torch.where(wanted.view(-1, 1).to(device), hidden, NAN)),
        "lm_head_weight": spread(lm_head_weight.to(device)),
        "divisor": divisor,
        "vocab_size": len(lm_head_weight) if vocab is None else vocab,
        "verify_lens": torch.tensor(verify_lens, dtype=torch.int32, device=device),
        "out_tokens": spread(torch.zeros(batch, rows, dtype=torch.int64, device=device)),
    }


def _exact(
    id_: str,
    verify_lens: list[int],
    rows: int,
    vocab: int,
    depth: int,
    *,
    hidden: torch.dtype = torch.bfloat16,
    weight: torch.dtype = torch.bfloat16,
    padding: int = 0,
    large: bool = False,
    **kwargs: Any,
) -> Case:
    def make(device: str) -> dict[str, Any]:
        states = exact((len(verify_lens) * rows, depth), 2, hidden, len(id_)).to(device)
        head = exact_weight(vocab, depth, weight, 3, padding=padding)
        return arguments(states, head, verify_lens, vocab=vocab, **kwargs)

    return Case(id_, make, kernel_only=large)


def _rounding(id_: str, batch: int, rows: int, vocab: int, depth: int, dtype: torch.dtype, *, large: bool) -> Case:
    def make(device: str) -> dict[str, Any]:
        hidden, weight = planted(batch * rows, vocab, depth, dtype)
        return arguments(hidden.to(device), weight, [rows] * batch)

    return Case(id_, make, kernel_only=large)


def _dead(dtype: torch.dtype) -> Case:
    def make(device: str) -> dict[str, Any]:
        hidden, weight = dead_rows(dtype)
        return arguments(hidden.to(device), weight, [3, 3])

    return Case(f"dead_rows_{str(dtype).removeprefix('torch.')}", make)


def _one_live_id(device: str) -> dict[str, Any]:
    hidden, weight = one_live_id(torch.bfloat16)
    return arguments(hidden.to(device), weight, [2])


def cases() -> Iterator[Case]:
    """Every case; the ids say what is odd about them."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    yield _exact("b1_t8", [8], 8, 97, 40)
    yield _exact("b1_t2_depth_8", [2], 2, 33, 8)
    yield _exact("b3_strided", [4, 4, 4], 4, 97, 24, stride=True)
    yield _exact("every_verify_length", [0, 1, 2, 3, 4], 4, 65, 24)
    yield _exact("no_row_wanted", [0, 0], 3, 65, 24)
    yield _exact("a_block_of_padding", [8, 8, 0, 0, 5, 0, 0], 8, 65, 24)
    yield _exact("padded_vocabulary", [3, 3], 3, 61, 24, padding=3)
    yield _exact("v1", [3, 2], 3, 1, 16)
    yield _exact("fp16_everywhere", [3, 3], 3, 70, 40, hidden=f16, weight=f16)
    yield _exact("fp32_everywhere", [3, 3], 3, 70, 40, hidden=f32, weight=f32)
    yield _exact("fp32_hidden_bf16_weight", [3, 3], 3, 70, 24, hidden=f32)
    yield _exact("bf16_hidden_fp32_weight", [3, 3], 3, 70, 24, weight=f32)
    yield _exact("divisor_three", [3, 3], 3, 70, 24, divisor=3.0)
    for dtype in (f32, bf16, f16):
        yield _dead(dtype)
    yield Case("one_live_id_among_nan", _one_live_id)
    yield _rounding("gaussian_bf16", 1, 3, 97, 96, bf16, large=False)
    yield _rounding("gaussian_fp32", 1, 3, 97, 96, f32, large=False)
    yield _exact("qwen3_vocab_b1", [8], 8, 151_936, 1024, large=True)
    yield _exact("qwen3_vocab_b33_padding_block", [8] * 16 + [0] * 16 + [8], 8, 151_936, 1024, large=True)
    yield _exact("smollm2_vocab_fp32", [8] * 4, 8, 49_152, 576, hidden=f32, weight=f32, large=True)
    yield _rounding("gaussian_depth_4096", 8, 8, 8_193, 4096, bf16, large=True)
