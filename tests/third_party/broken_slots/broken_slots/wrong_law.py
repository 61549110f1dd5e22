"""A draft block whose law is wrong alike in reference and implementation, so that no comparison of the two shows it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import Case, SlotSetup


def draft_block(
    *,
    base_logits: Tensor,
    anchor_tokens: Tensor,
    markov_w1: Tensor,
    markov_w2: Tensor,
    draft_hidden: Tensor | None,
    mixer_weight: Tensor | None,
    mixer_bias: Tensor | None,
    temperatures: Tensor,
    noise_key: int,
    noise_offset: Tensor,
    out_draft_tokens: Tensor,
    out_step_logits: Tensor | None,
    out_features: Tensor | None,
) -> None:
    """The seam's steps, but the noise is added before the temperature divides, which then changes nothing."""
    vocab = base_logits.shape[-1]
    joint_dtype = torch.promote_types(base_logits.dtype, markov_w1.dtype)
    step_dtype = joint_dtype if out_step_logits is None else out_step_logits.dtype
    sampled = (temperatures > 0)[:, None]
    previous = anchor_tokens
    for step in range(base_logits.shape[1]):
        known = ((previous >= 0) & (previous < vocab))[:, None]
        features = torch.where(known, markov_w1[previous.clamp(0, vocab - 1)], 0).float()
        bias = (features @ markov_w2.float().T).to(markov_w1.dtype)
        exact = base_logits[:, step].float() + bias.float()
        logits = exact.to(step_dtype)
        scores = logits.float() + torch.where(sampled, _gumbel(logits.shape, step, noise_key, noise_offset), 0)
        scores = torch.where(scores.isnan(), -torch.inf, scores)
        best = scores.amax(-1, keepdim=True)
        lowest = torch.where(scores == best, torch.arange(vocab, device=scores.device), vocab).amin(-1)
        previous = torch.where(best[:, 0] > -torch.inf, lowest, 0)
        out_draft_tokens[:, step] = previous
        if out_step_logits is not None:
            out_step_logits[:, step] = torch.where(sampled, logits, out_step_logits[:, step])


def _gumbel(shape: torch.Size, step: int, key: int, offset: Tensor) -> Tensor:
    """Noise [B, V] from an integer mixed a few times: a function of key, offset, row, step and id."""
    rows = torch.arange(shape[0], device=offset.device)[:, None]
    ids = torch.arange(shape[1], device=offset.device)
    word = (key & 0xFFFFFFFF) + 1
    for part in (offset, rows, torch.full_like(rows, step), ids):
        word = ((word ^ (part & 0xFFFFFFFF)) * 0x2C1B3C6D) & 0xFFFFFFFF
        word = ((word ^ (word >> 15)) * 0x297A2D39) & 0xFFFFFFFF
        word = word ^ (word >> 16)
    uniform = ((word.double() + 0.5) / 2**32).float().clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


class WrongLaw:
    """The same again, as an implementation."""

    def __init__(self, setup: SlotSetup) -> None: ...

    def __call__(
        self,
        *,
        base_logits: Tensor,
        anchor_tokens: Tensor,
        markov_w1: Tensor,
        markov_w2: Tensor,
        draft_hidden: Tensor | None,
        mixer_weight: Tensor | None,
        mixer_bias: Tensor | None,
        temperatures: Tensor,
        noise_key: int,
        noise_offset: Tensor,
        out_draft_tokens: Tensor,
        out_step_logits: Tensor | None,
        out_features: Tensor | None,
    ) -> None:
        draft_block(**{name: value for name, value in locals().items() if name != "self"})


def _arguments(device: str) -> dict[str, Any]:
    return {
        "base_logits": torch.tensor([[[1.0, 0.5, 0.0], [0.0, 0.5, 1.0]]], device=device),
        "anchor_tokens": torch.tensor([1], device=device),
        "markov_w1": torch.zeros(3, 16, device=device),
        "markov_w2": torch.zeros(3, 16, device=device),
        "draft_hidden": None,
        "mixer_weight": None,
        "mixer_bias": None,
        "temperatures": torch.tensor([0.7], device=device),
        "noise_key": 7,
        "noise_offset": torch.zeros(1, dtype=torch.int64, device=device),
        "out_draft_tokens": torch.zeros(1, 2, dtype=torch.int64, device=device),
        "out_step_logits": None,
        "out_features": None,
    }


def cases() -> Iterator[Case]:
    yield Case("one_block", _arguments)
