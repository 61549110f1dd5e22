"""Seams of the verify-accept stage: decide what of a block stands. Letters as in the package's docstring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class GreedyAccept(Protocol):
    """Accept the longest drafted prefix that equals the target's argmax, and keep the books.

    ``correct`` is the number of leading matches, at most ``verify_lens - 1``; the bonus is
    the target's argmax at row ``correct``; ``commit = correct + 1``. The argmax takes the
    lowest id among equals, NaN never wins, and a row with nothing above -inf gives id 0. A
    drafted id outside [0, V) is a rejection. ``out_tokens`` row: accepted drafts, then the
    bonus, then zeros. Padding rows: correct 0, bonus 0,
    commit 0, ``out_new_seq_lens = seq_lens``, tokens 0.
    """

    def __call__(
        self,
        *,
        candidates: Tensor,  # [B, T] int64: the anchor, then G drafts
        target_logits: Tensor,  # [B * T, V] fp32 / bf16 / fp16, last axis contiguous
        seq_lens: Tensor,  # [B] int32 or int64: committed tokens before this step
        verify_lens: Tensor,  # [B] int32 in [0, T]
        out_correct_lens: Tensor,  # [B] int32
        out_bonus_tokens: Tensor,  # [B] int64
        out_commit_lens: Tensor,  # [B] int32
        out_new_seq_lens: Tensor,  # [B], dtype of seq_lens
        out_tokens: Tensor,  # [B, T] int64
    ) -> None: ...


class SampledAccept(Protocol):
    """Accept a drafted block by rejection sampling, greedy rows among sampled ones, and keep the books.

    With p = softmax(target / temperature) and q = softmax(draft / draft temperature), draft g stands iff
    ``coin * q(d) < p(d)`` and every draft before it stands. Where ``draft_logits`` is None, and on rows of draft
    temperature 0, q is certain of the drafted id. The drafts of rows t < ``verify_lens`` are tested: where all
    stand and no row is left behind them, the last of them is the bonus. Else the bonus is ``argmax(log r + noise)``,
    lowest id among equals, with r = max(p - q, 0) at the row of the draft that fell, and r = p past draft G.
    So the committed tokens have exactly the target's law. Rows of temperature 0, ``correct``, ``commit``,
    ``out_tokens`` and padding rows are as in :class:`GreedyAccept`.

    A drafted id outside [0, V), where nothing is read, or with q at most 2**-126, which no draft comes from, falls and
    leaves r = p. So r is where nothing is left of p - q: equal laws, of which rounding refused a draft. NaN logits
    have no mass, logits above 1e30 count as 1e30, and a row with nothing above -inf is certain of id 0.

    Random numbers are those of SGLang 0.5.23's block-wise rejection, so equal noise gives its decisions up
    to rounding: with s = (``noise_key`` + ``noise_offset`` * 0x632BE59BD9B4E019) mod 2**64, the coin of draft g in
    row b is ``max(w < 2**31 ? w : 2**32 - 1 - w, 1)`` in fp32 times fp32(4.6566127342e-10), w the first word of
    Philox4x32-10 with key s and counter (b * T + g, 0, 0, 0). Id v of row b has noise ``-log(-log1p(-u))``,
    ``u = (h + 0.5) / 2**32`` rounded to fp32, at most ``1 - 2**-24``, h the MurmurHash3_x86_32 (seed 0) of the words
    (s mod 2**32, s // 2**32, b, v). The key must differ from that of the drafts' own noise; the caller advances
    ``noise_offset`` once a step.
    """

    def __call__(
        self,
        *,
        candidates: Tensor,  # [B, T] int64: the anchor, then G drafts
        target_logits: Tensor,  # [B * T, V] fp32 / bf16 / fp16, last axis contiguous
        draft_logits: Tensor | None,  # [B, G, Vd] fp32 / bf16 / fp16, Vd <= V: what the drafts were drawn from
        target_temperatures: Tensor,  # [B] fp32, 0 on greedy rows
        draft_temperatures: Tensor,  # [B] fp32; read, as draft_logits are, on sampled rows
        seq_lens: Tensor,  # [B] int32 or int64: committed tokens before this step
        verify_lens: Tensor,  # [B] int32 in [0, T]
        noise_key: int,  # 64-bit Philox key
        noise_offset: Tensor,  # [1] int64
        out_correct_lens: Tensor,  # [B] int32
        out_bonus_tokens: Tensor,  # [B] int64
        out_commit_lens: Tensor,  # [B] int32
        out_new_seq_lens: Tensor,  # [B], dtype of seq_lens
        out_tokens: Tensor,  # [B, T] int64
    ) -> None: ...
