"""Seams of the draft stage: propose a block of tokens. Letters as in the package's docstring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class DraftBlock(Protocol):
    """Pick the G tokens of a draft block, each corrected by the token before it.

    Step g has logits ``base_logits[:, g] + factors @ markov_w2.T``. Of the row ``w1 = markov_w1[previous]``, where
    ``previous`` is the anchor at g = 0, the kind of the head makes the factors [B, R]; W is the weights' dtype:

    - Vanilla, no mixer: ``factors = w1``.
    - Gated, ``mixer_weight`` [R, H + R]: ``gate = sigmoid(mixer_weight @ [draft_hidden[:, g], w1] + mixer_bias)``,
      ``factors = gate * w1``.
    - RNN, ``mixer_weight`` [3R, 2R + H]: ``[a, c, o] = mixer_weight @ [state, w1, draft_hidden[:, g]] + mixer_bias``,
      R each; ``factors = tanh(o)``, and the next step's ``state = sigmoid(a) * state + (1 - sigmoid(a)) * tanh(c)``.
      The first state is zero.

    A mixer's sum, bias included, is accumulated in fp32 and rounded to W once; then each sigmoid, tanh, difference,
    product and sum is computed in fp32 and rounded to W. The bias of the logits is accumulated in fp32, rounded to W,
    added in fp32, and the sum rounded to the step dtype: fp32 where ``out_step_logits`` are, else ``promote(base, W)``.
    An anchor outside [0, V) has a row
    w1 of zeros.

    A row of temperature 0 takes the argmax, lowest id among equals; others take
    ``argmax(logits / temperature - log(-log1p(-u)))``, u from Philox4x32-10 with key
    ``noise_key`` and counter (id // 4, row, g, ``noise_offset`` mod 2**32), word id % 4,
    ``u = (word + 0.5) / 2**32`` in fp32, at most ``1 - 2**-24``. NaN logits never win; a row with
    nothing above -inf takes id 0. The caller advances ``noise_offset`` once per sampled block.
    """

    def __call__(
        self,
        *,
        base_logits: Tensor,  # [B, G, V] fp32 / bf16 / fp16, last axis contiguous
        anchor_tokens: Tensor,  # [B] int64, of any stride
        markov_w1: Tensor,  # [V, R]
        markov_w2: Tensor,  # [V, R], dtype of markov_w1
        draft_hidden: Tensor | None,  # [B, G, H], dtype of markov_w1; with a mixer only
        mixer_weight: Tensor | None,  # [R, H + R] or [3R, 2R + H], dtype of markov_w1
        mixer_bias: Tensor | None,  # [R] or [3R], dtype of markov_w1; a mixer may have none
        temperatures: Tensor,  # [B] fp32, 0 on greedy rows
        noise_key: int,  # 64-bit Philox key
        noise_offset: Tensor,  # [1] int64
        out_draft_tokens: Tensor,  # [B, G] int64
        out_step_logits: Tensor | None,  # [B, G, V] promote(base, W) or fp32; sampled rows are written
        out_features: Tensor | None,  # [B, G, R], dtype of markov_w1: each step's w1, which a confidence head reads
    ) -> None: ...
