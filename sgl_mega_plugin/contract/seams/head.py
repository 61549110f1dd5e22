"""Seams of the LM head: the draft's base logits, the target's argmax. Letters as in the package's docstring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class DraftLogits(Protocol):
    """Base logits of a draft block by the target's LM head, or no more than their argmax.

    Row g of request b is ``hidden[b, Q - G + g]``: where Q = G + 1 the anchor comes first, and nobody reads it. The row
    times fp32(1 / ``divisor``) is rounded to hidden's dtype (1.0 changes nothing) and then to the weights'. Its
    products with a row v < ``vocab_size`` of the weight are accumulated in fp32, and the sum is rounded once to the
    weights' dtype: the logit of id v. A token is the argmax of these rounded logits: lowest id among equals, NaN never
    wins, and a row with nothing above -inf gives id 0.

    At least one output is asked for. Where only tokens are, logits need not exist. G is 1 or more, read off an
    output. No row is padding: hidden states of a graph's idle rows are computed like any.
    """

    def __call__(
        self,
        *,
        hidden: Tensor,  # [B, Q, H] bf16 / fp16 / fp32, Q = G or G + 1, last axis contiguous
        lm_head_weight: Tensor,  # [W, H] bf16 / fp16 / fp32, W >= V: rows past V are not read
        divisor: float,  # muP multiplier of the head, above 0; 1.0 where there is none
        vocab_size: int,  # V
        out_logits: Tensor | None,  # [B, G, V], dtype of the weight
        out_tokens: Tensor | None,  # [B, G] int64
    ) -> None: ...


class TargetArgmax(Protocol):
    """The target's choice after each verify row: argmax of the LM head, for a step in which nobody reads logits.

    Rows t < ``verify_lens`` are wanted; row b * T + t is token t of request b. Logits and their argmax are those of
    :class:`DraftLogits`. Rows that are not wanted, padding rows among them, give token 0 whatever they hold.

    For steps whose rows are all greedy. Not in it, so an adapter declines them: what reads or changes logits (logprobs,
    grammar, penalties, bias), a logit scale or a soft cap (both keep the order, but rounding makes ties that
    take the lowest id), a bias or LoRA of the head, and heads that keep fp32 sums (``enable_fp32_lm_head``).
    """

    def __call__(
        self,
        *,
        hidden: Tensor,  # [B * T, H] bf16 / fp16 / fp32, last axis contiguous
        lm_head_weight: Tensor,  # [W, H] bf16 / fp16 / fp32, W >= V: rows past V are not read
        divisor: float,  # muP multiplier of the head, above 0; 1.0 where there is none
        vocab_size: int,  # V
        verify_lens: Tensor,  # [B] int32 in [0, T]
        out_tokens: Tensor,  # [B, T] int64
    ) -> None: ...
