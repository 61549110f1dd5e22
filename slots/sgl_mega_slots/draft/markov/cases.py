"""Conformance cases of `draft_block`.

Most have logits and weights that are multiples of 1/8, whose sums are exact in fp32 in any order:
kernel and reference then agree bit for bit. Sampled rows' seeds are such that the
winner leads by more than rounding can move it; a test holds them to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import Case
from sgl_mega_slots.common.case_tools import eighths, generator, mostly, strided

NAN, INF = float("nan"), float("inf")
NOISE_KEY = 0x9ABCDEF012345678


def arguments(
    base_logits: Tensor,
    markov_w1: Tensor,
    markov_w2: Tensor,
    temperatures: list[float],
    *,
    anchors: list[int] | None = None,
    noise_key: int = NOISE_KEY,
    noise_offset: int = 0,
    stride: bool = False,
    step_logits: bool = True,
) -> dict[str, Any]:
    """The seam's arguments on the logits' device: base_logits [B, G, V], weights [V, R]."""
    batch, gamma, vocab = base_logits.shape
    device = base_logits.device
    spread = strided if stride else torch.clone
    dtype = torch.promote_types(base_logits.dtype, markov_w1.dtype)
    anchor_ids = [(13 * row + 5) % vocab for row in range(batch)] if anchors is None else anchors
    return {
        "base_logits": spread(base_logits),
        "anchor_tokens": torch.tensor(anchor_ids, device=device),
        "markov_w1": spread(markov_w1.to(device)),
        "markov_w2": spread(markov_w2.to(device)),
        "temperatures": torch.tensor(temperatures, dtype=torch.float32, device=device),
        "noise_key": noise_key,
        "noise_offset": torch.tensor([noise_offset], device=device),
        "out_draft_tokens": spread(torch.zeros(batch, gamma, dtype=torch.int64, device=device)),
        "out_step_logits": spread(torch.zeros(batch, gamma, vocab, dtype=dtype, device=device))
        if step_logits
        else None,
    }


def _exact(
    id_: str,
    batch: int,
    gamma: int,
    vocab: int,
    rank: int,
    temperatures: list[float],
    *,
    base: torch.dtype = torch.float32,
    weights: torch.dtype = torch.bfloat16,
    seed: int = 1,
    large: bool = False,
    **kwargs: Any,
) -> Case:
    """A case in which every order of the sums gives the same bits."""

    def make(device: str) -> dict[str, Any]:
        logits = eighths((batch, gamma, vocab), 8, seed).to(device, base)
        w1, w2 = (eighths((vocab, rank), 1, seed + i).to(weights) for i in (1, 2))
        return arguments(logits, w1, w2, temperatures, **kwargs)

    return Case(id_, make, kernel_only=large, exact=True)


def _gaussian(id_: str, batch: int, vocab: int, rank: int, dtype: torch.dtype, *, large: bool = False) -> Case:
    """Random weights, whose sums round by order; each step's winner leads by more than that. |bias| < 1."""

    def make(device: str) -> dict[str, Any]:
        source = generator(11)
        gamma = 4
        logits = torch.randn(batch, gamma, vocab, generator=source)
        w1, w2 = (torch.randn(vocab, rank, generator=source) * rank**-0.5 for _ in range(2))
        for row in range(batch):
            for step in range(gamma):
                logits[row, step, (31 * row + 17 * step + 3) % vocab] = 24.0
        temperatures = [0.8 * (row % 2) for row in range(batch)]
        return arguments(logits.to(device, dtype), w1.to(dtype), w2.to(dtype), temperatures)

    return Case(id_, make, kernel_only=large)


def _dead_row(id_: str, row: Callable[[int], Tensor], temperature: float) -> Case:
    """One request, three steps, V 37: step 1 has this row."""

    def make(device: str) -> dict[str, Any]:
        logits = eighths((1, 3, 37), 8, 5)
        logits[0, 1] = row(37)
        w1, w2 = (eighths((37, 16), 1, seed) for seed in (6, 7))
        return arguments(logits.to(device), w1, w2, [temperature])

    return Case(id_, make, exact=True)


_DEAD_ROWS = {
    "dead_row_nan": mostly(NAN, {}),
    "dead_row_minus_inf": mostly(-INF, {}),
    "one_finite_entry": mostly(-INF, {36: -1e4}),
    "one_finite_among_nan": mostly(NAN, {36: -1e4}),
    "infinity_wins": mostly(1.0, {3: NAN, 20: INF, 36: INF}),
}


def _ties(device: str) -> dict[str, Any]:
    """Equal logits, no bias: the lowest id, within a tile and across tiles and programs."""
    logits = torch.zeros(3, 2, 200)
    logits[1, :, [40, 41, 150]] = 1.0
    logits[2, :, [70, 199]] = 2.0
    nothing = torch.zeros(200, 16, dtype=torch.bfloat16)
    return arguments(logits.to(device), nothing, nothing, [0.0] * 3)


def cases() -> Iterator[Case]:
    """Every case; the ids say what is odd about them."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    yield _exact("b1_greedy", 1, 3, 97, 16, [0.0])
    yield _exact("b1_g1", 1, 1, 97, 16, [0.0], base=bf16)
    yield _exact("b1_g7_sampled", 1, 7, 130, 64, [1.0])
    yield _exact("b3_mixed_strided", 3, 3, 97, 16, [0.3, 0.0, 1.2], stride=True, seed=4)
    yield _exact("b5_rank_24_fp16", 5, 2, 70, 24, [0.0, 0.6, 0.9, 0.0, 1.2], base=f16, weights=f16, seed=9)
    yield _exact("fp32_weights_bf16_logits", 2, 2, 65, 40, [0.0, 0.7], base=bf16, weights=f32)
    yield _exact("bf16_weights_fp16_logits", 2, 2, 65, 16, [0.0, 0.7], base=f16)
    yield _exact("bf16_everywhere", 3, 4, 101, 32, [0.0, 1.0, 0.5], base=bf16, seed=21)
    yield _exact("no_step_logits", 2, 3, 66, 16, [0.0, 0.8], step_logits=False)
    yield _exact("equal_rows_draw_apart", 4, 2, 64, 16, [1.0] * 4, anchors=[3] * 4, seed=30)
    yield _exact("late_offset", 1, 2, 64, 16, [1.0], noise_offset=(1 << 32) + 7, noise_key=-1)
    yield _exact("small_key", 1, 2, 64, 16, [1.0], noise_offset=(1 << 40) - 1, noise_key=1)
    yield _exact("anchors_out_of_range", 4, 2, 66, 16, [0.0, 0.9, 0.0, 0.9], anchors=[-1, 66, 0x7FFFFFFF, 1 << 45])
    yield _exact("v1", 2, 2, 1, 16, [0.0, 1.0])
    yield _exact("b17_two_row_tiles", 17, 2, 40, 16, [0.0, 1.0] * 8 + [0.5], seed=41)
    yield Case("ties_take_the_lowest_id", _ties, exact=True)
    for id_, row in _DEAD_ROWS.items():
        yield _dead_row(f"{id_}_greedy", row, 0.0)
        yield _dead_row(f"{id_}_sampled", row, 0.8)
    yield _gaussian("gaussian_bf16", 3, 97, 32, bf16)
    yield _gaussian("gaussian_fp32", 3, 97, 32, f32)
    yield _exact("qwen3_vocab_b1", 1, 7, 151_936, 256, [0.0], base=bf16, large=True)
    yield _exact("qwen3_vocab_b5_mixed", 5, 4, 151_936, 256, [0.0, 1.0, 0.7, 0.0, 0.3], base=bf16, large=True)
    yield _exact("smollm2_vocab_b65", 65, 3, 49_152, 64, [0.0] * 65, base=f32, large=True)
    yield _exact("smollm2_vocab_fp32", 3, 3, 49_152, 256, [0.0, 1.0, 0.0], weights=f32, large=True)
    yield _gaussian("qwen3_vocab_gaussian", 16, 151_936, 256, bf16, large=True)
