"""Conformance cases of `draft_block`.

Most have logits and weights that are multiples of 1/8, whose sums are exact in fp32 in any order:
kernel and reference then agree bit for bit. Sampled rows' seeds are such that the
winner leads by more than rounding can move it; a test holds them to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
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
    step_dtype: torch.dtype | None = None,
    features: bool = False,
    mixer: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> dict[str, Any]:
    """The seam's arguments on the logits' device: logits [B, G, V], weights [V, R], mixer (hidden, weight, bias)."""
    batch, gamma, vocab = base_logits.shape
    device = base_logits.device
    hidden, mixer_weight, mixer_bias = mixer or (None, None, None)
    spread = strided if stride else torch.clone
    dtype = step_dtype or torch.promote_types(base_logits.dtype, markov_w1.dtype)
    anchor_ids = [(13 * row + 5) % vocab for row in range(batch)] if anchors is None else anchors
    return {
        "base_logits": spread(base_logits),
        "anchor_tokens": _column(torch.tensor(anchor_ids, device=device), 5 if stride else 1),
        "markov_w1": spread(markov_w1.to(device)),
        "markov_w2": spread(markov_w2.to(device)),
        "draft_hidden": None if hidden is None else spread(hidden.to(device)),
        "mixer_weight": None if mixer_weight is None else spread(mixer_weight.to(device)),
        "mixer_bias": None if mixer_bias is None else spread(mixer_bias.to(device)),
        "temperatures": torch.tensor(temperatures, dtype=torch.float32, device=device),
        "noise_key": noise_key,
        "noise_offset": torch.tensor([noise_offset], device=device),
        "out_draft_tokens": spread(torch.zeros(batch, gamma, dtype=torch.int64, device=device)),
        "out_step_logits": spread(torch.zeros(batch, gamma, vocab, dtype=dtype, device=device))
        if step_logits
        else None,
        "out_features": spread(markov_w1.new_zeros(batch, gamma, markov_w1.shape[1], device=device))
        if features
        else None,
    }


def _column(ids: Tensor, width: int) -> Tensor:
    """The same ids as a column of a matrix, which is how SGLang hands anchors over."""
    return ids[:, None].expand(-1, width).contiguous()[:, width // 2]


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
    mixer: Callable[[], tuple[Tensor, Tensor, Tensor | None]] | None = None,
    **kwargs: Any,
) -> Case:
    """A case in which every order of the sums gives the same bits."""

    def make(device: str) -> dict[str, Any]:
        logits = eighths((batch, gamma, vocab), 8, seed).to(device, base)
        w1, w2 = (eighths((vocab, rank), 1, seed + i).to(weights) for i in (1, 2))
        return arguments(logits, w1, w2, temperatures, mixer=None if mixer is None else mixer(), **kwargs)

    return Case(id_, make, kernel_only=large, exact=True)


def _mixer(
    batch: int,
    gamma: int,
    rank: int,
    width: int,
    dtype: torch.dtype,
    *,
    recurrent: bool,
    scale: float,
    bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias of a gated head or an RNN. Above scale 1000: sums are odd multiples of 64.

    So far out sigmoid is 0 or 1 and tanh -1 or 1 in every dtype, and what follows is exact in any order as well.
    """
    rows, columns = (3 * rank, 2 * rank + width) if recurrent else (rank, rank + width)
    source = generator(rank + width)
    if scale > 1000:
        hidden = eighths((batch, gamma, width), 1, 17)
        weight = torch.randint(-1, 2, (rows, columns), generator=source) * scale
        offset = torch.randint(0, 2, (rows,), generator=source) * 128.0 - 64
    else:
        hidden = torch.randn(batch, gamma, width, generator=source)
        weight = torch.randn(rows, columns, generator=source) * scale
        offset = torch.randn(rows, generator=source)
    return hidden.to(dtype), weight.to(dtype), offset.to(dtype) if bias else None


def _saturated(
    id_: str,
    batch: int,
    temperatures: list[float],
    dtype: torch.dtype,
    *,
    recurrent: bool,
    rank: int = 16,
    **kwargs: Any,
) -> Case:
    """Mixers whose gates are open or shut, so that every order of the sums gives the same bits."""
    gamma = 3
    mixer = partial(_mixer, batch, gamma, rank, 21, dtype, recurrent=recurrent, scale=1024.0)
    return _exact(id_, batch, gamma, 75, rank, temperatures, weights=dtype, mixer=mixer, **kwargs)


def _gaussian(
    id_: str,
    batch: int,
    vocab: int,
    rank: int,
    dtype: torch.dtype,
    *,
    large: bool = False,
    recurrent: bool | None = None,
    width: int = 40,
) -> Case:
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
        mixer = None
        if recurrent is not None:
            scale = (rank + width) ** -0.5
            mixer = _mixer(batch, gamma, rank, width, dtype, recurrent=recurrent, scale=scale, bias=recurrent)
        return arguments(
            logits.to(device, dtype), w1.to(dtype), w2.to(dtype), temperatures, mixer=mixer, features=mixer is not None
        )

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


def _dead_rows(device: str) -> dict[str, Any]:
    """Every dead row in step 1 of a batch, greedy and sampled, among rows that live."""
    dead = list(_DEAD_ROWS.values())
    batch = 3 * len(dead)
    logits = eighths((batch, 3, 37), 8, 22)
    for index, row in enumerate(dead):
        logits[3 * index, 1] = row(37)
        logits[3 * index + 1, 1] = row(37)
    w1, w2 = (eighths((37, 16), 1, seed).to(torch.bfloat16) for seed in (6, 7))
    return arguments(logits.to(device, torch.bfloat16), w1, w2, [0.0, 0.8, 0.5] * len(dead))


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
    yield _exact("fp32_steps_over_bf16", 3, 3, 97, 32, [0.0, 1.0, 0.5], base=bf16, step_dtype=f32, seed=22)
    yield _exact("fp32_steps_over_fp16", 2, 2, 66, 16, [0.7, 0.0], base=f16, weights=f16, step_dtype=f32)
    yield _exact("no_step_logits", 2, 3, 66, 16, [0.0, 0.8], step_logits=False)
    yield _exact("equal_rows_draw_apart", 4, 2, 64, 16, [1.0] * 4, anchors=[3] * 4, seed=30)
    yield _exact("late_offset", 1, 2, 64, 16, [1.0], noise_offset=(1 << 32) + 7, noise_key=-1)
    yield _exact("small_key", 1, 2, 64, 16, [1.0], noise_offset=(1 << 40) - 1, noise_key=1)
    yield _exact("anchors_out_of_range", 4, 2, 66, 16, [0.0, 0.9, 0.0, 0.9], anchors=[-1, 66, 0x7FFFFFFF, 1 << 45])
    yield _exact("v1", 2, 2, 1, 16, [0.0, 1.0])
    yield _exact("b17_two_row_tiles", 17, 2, 40, 16, [0.0, 1.0] * 8 + [0.5], seed=41)
    yield _exact("b9_g1", 9, 1, 70, 16, [0.0, 0.9, 0.4] * 3, base=bf16, seed=50)
    yield _exact("b33_no_step_logits", 33, 2, 20, 24, [0.0, 0.8, 0.6] * 11, seed=60, step_logits=False, features=True)
    yield _exact("b18_rank_72_strided", 18, 2, 136, 72, [0.7, 0.0] * 9, base=f16, seed=70, stride=True)
    yield Case("dead_rows_in_a_batch", _dead_rows, exact=True)
    yield Case("ties_take_the_lowest_id", _ties, exact=True)
    for id_, row in _DEAD_ROWS.items():
        yield _dead_row(f"{id_}_greedy", row, 0.0)
        yield _dead_row(f"{id_}_sampled", row, 0.8)
    yield _gaussian("gaussian_bf16", 3, 97, 32, bf16)
    yield _gaussian("gaussian_fp32", 3, 97, 32, f32)
    yield _saturated("gated_b1", 1, [0.0], bf16, recurrent=False)
    yield _saturated("gated_b3_mixed_features", 3, [0.7, 0.0, 1.0], f32, recurrent=False, rank=24, features=True)
    yield _saturated("gated_anchor_out_of_range", 2, [0.0, 0.9], f16, recurrent=False, anchors=[-1, 75], features=True)
    yield _saturated("rnn_b1_sampled", 1, [0.8], bf16, recurrent=True)
    yield _saturated("rnn_b3_strided", 3, [0.7, 0.0, 1.0], bf16, recurrent=True, rank=40, stride=True, features=True)
    yield _saturated("rnn_anchor_out_of_range", 2, [0.0, 0.9], f32, recurrent=True, rank=40, anchors=[1 << 45, -3])
    yield _gaussian("gated_gaussian_bf16", 3, 97, 32, bf16, recurrent=False)
    yield _gaussian("rnn_gaussian_fp32", 2, 97, 24, f32, recurrent=True)
    yield _exact("features", 2, 3, 66, 24, [0.0, 0.8], anchors=[66, 4], features=True)
    yield _exact("qwen3_vocab_b1", 1, 7, 151_936, 256, [0.0], base=bf16, large=True)
    yield _exact("qwen3_vocab_b5_mixed", 5, 4, 151_936, 256, [0.0, 1.0, 0.7, 0.0, 0.3], base=bf16, large=True)
    yield _exact("smollm2_vocab_b65", 65, 3, 49_152, 64, [0.0] * 65, base=f32, large=True)
    yield _exact("smollm2_vocab_fp32", 3, 3, 49_152, 256, [0.0, 1.0, 0.0], weights=f32, large=True)
    yield _exact("v4_vocab_b2_fp32_steps", 2, 5, 129_280, 256, [0.0, 1.0], base=bf16, step_dtype=f32, large=True)
    yield _exact("qwen3_vocab_b32", 32, 7, 151_936, 256, [0.0, 0.8] * 16, base=bf16, large=True, features=True)
    yield _exact("qwen3_vocab_b9_g1", 9, 1, 151_936, 256, [0.0, 0.8, 0.6] * 3, base=bf16, large=True)
    yield _exact("qwen3_vocab_b17_rank_512", 17, 2, 151_936, 512, [0.7] + [0.0] * 16, base=bf16, large=True)
    yield _exact("qwen3_vocab_b64", 64, 2, 151_936, 256, [0.0] * 63 + [1.0], base=bf16, large=True, features=True)
    yield _gaussian("qwen3_vocab_gaussian", 16, 151_936, 256, bf16, large=True)
    yield _gaussian("qwen3_vocab_gated", 3, 151_936, 256, bf16, large=True, recurrent=False, width=4096)
    yield _gaussian("qwen3_vocab_rnn", 9, 151_936, 256, bf16, large=True, recurrent=True, width=4096)
