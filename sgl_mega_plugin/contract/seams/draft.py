"""Seams of the draft stage: propose a block of tokens. Letters as in the package's docstring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class DraftBlock(Protocol):
    """Pick the G tokens of a draft block, each corrected by the token before it.

    Step g has logits ``base_logits[:, g] + markov_w1[previous] @ markov_w2.T``, where
    ``previous`` is the anchor at g = 0. The bias is accumulated in fp32, rounded to the
    weights' dtype, added in fp32, and the sum rounded to ``promote(base, weights)``: the
    step dtype. A row of temperature 0 takes the argmax, lowest id among equals; others take
    ``argmax(logits / temperature - log(-log1p(-u)))``, u from Philox4x32-10 with key
    ``noise_key`` and counter (id // 4, row, g, ``noise_offset`` mod 2**32), word id % 4,
    ``u = (word + 0.5) / 2**32`` in fp32, at most ``1 - 2**-24``. NaN logits never win; a row with
    nothing above -inf takes id 0. An anchor outside [0, V) adds no bias. The caller advances
    ``noise_offset`` once per sampled block.
    """

    def __call__(
        self,
        *,
        base_logits: Tensor,  # [B, G, V] fp32 / bf16 / fp16, last axis contiguous
        anchor_tokens: Tensor,  # [B] int64
        markov_w1: Tensor,  # [V, R]
        markov_w2: Tensor,  # [V, R], dtype of markov_w1
        temperatures: Tensor,  # [B] fp32, 0 on greedy rows
        noise_key: int,  # 64-bit Philox key
        noise_offset: Tensor,  # [1] int64
        out_draft_tokens: Tensor,  # [B, G] int64
        out_step_logits: Tensor | None,  # [B, G, V] step dtype; sampled rows are written
    ) -> None: ...
