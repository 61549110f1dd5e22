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

    Exactly one of ``target_logits`` and ``target_tokens`` is given: the second where the LM head took the
    argmax. V is then not known and stands for 2**31; a target token outside [0, 2**31) counts as id 0.

    ``simulated_correct`` replaces ``correct`` in every live row, at most ``verify_lens - 1`` and at least 0, once the
    bonus is found: that stays the argmax behind the drafts that do match, as in SGLang 0.5.23's ``static_accept_tail``
    and ``build_accept_outs``. A draft outside [0, V) that is accepted so is committed as id 0. (SGLang commits it as
    it is, and simulates past the verify length.)
    """

    def __call__(
        self,
        *,
        candidates: Tensor,  # [B, T] int64: the anchor, then G drafts
        target_logits: Tensor | None,  # [B * T, V] fp32 / bf16 / fp16, last axis contiguous
        target_tokens: Tensor | None,  # [B, T] int64: the argmax of each row
        seq_lens: Tensor,  # [B] int32 or int64: committed tokens before this step
        verify_lens: Tensor,  # [B] int32 in [0, T]
        simulated_correct: Tensor | None,  # [1] int32 or int64: accepted drafts of every row, under simulation
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

    Where ``target_cutoffs`` is given, a target logit of a sampled row below its row's cutoff counts as -inf, so p is
    the filtered law of :class:`SamplingCutoffs`; the draft's law q stays as it is.

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

    Under simulation ``simulated_correct`` is the number of accepted drafts in every live row, at most
    ``verify_lens - 1`` and at least 0, and nothing else of the draft is looked at. The bonus comes from the target's
    row behind them: its argmax on greedy rows; on sampled ones
    ``argmax(logit / max(temperature, 1e-5) - log(-log(u)))`` with
    ``u = (w < 2**31 ? w : 2**32 - 1 - w)`` in fp32 times fp32(4.6566127342e-10), w the first word of Philox4x32-10
    with key ``simulated_seed`` (32 bits) and counter ((b * V + v) mod 2**32, 0, 0, 0), and -inf where u is 0. That is
    SGLang's bonus under SGLANG_DSPARK_SIMULATE_FOLD, bit for bit but for what its compiler fuses. (SGLang's eager
    simulation draws the same from one Philox counter per verify row instead of request, with a seed that stays on the
    host.) Accepted drafts outside [0, V) are as in :class:`GreedyAccept`.
    """

    def __call__(
        self,
        *,
        candidates: Tensor,  # [B, T] int64: the anchor, then G drafts
        target_logits: Tensor,  # [B * T, V] fp32 / bf16 / fp16, last axis contiguous
        draft_logits: Tensor | None,  # [B, G, Vd] fp32 / bf16 / fp16, Vd <= V: what the drafts were drawn from
        target_temperatures: Tensor,  # [B] fp32, 0 on greedy rows
        draft_temperatures: Tensor,  # [B] fp32; read, as draft_logits are, on sampled rows
        target_cutoffs: Tensor | None,  # [B * T] fp32: the smallest logit with mass; read on sampled rows
        seq_lens: Tensor,  # [B] int32 or int64: committed tokens before this step
        verify_lens: Tensor,  # [B] int32 in [0, T]
        noise_key: int,  # 64-bit Philox key
        noise_offset: Tensor,  # [1] int64
        simulated_correct: Tensor | None,  # [1] int32 or int64: accepted drafts of every row, under simulation
        simulated_seed: Tensor | None,  # [1] int32, with simulated_correct: the step's seed of the simulated bonus
        out_correct_lens: Tensor,  # [B] int32
        out_bonus_tokens: Tensor,  # [B] int64
        out_commit_lens: Tensor,  # [B] int32
        out_new_seq_lens: Tensor,  # [B], dtype of seq_lens
        out_tokens: Tensor,  # [B, T] int64
    ) -> None: ...


class SamplingCutoffs(Protocol):
    """Top-k, top-p and min-p of each row of target logits, as the smallest logit that keeps its mass.

    With logits x of a row t < ``verify_lens`` of a sampled request (NaN as -inf, at most 1e30, -0.0 as 0.0) and masses
    ``m = exp((x - max x) / temperature)``, ids are left out in this order:

    1. top-k, where 0 < top_k < V: those with top_k or more greater logits.
    2. top-p, where top_p < 1: those where the mass of greater logits is at least top_p times the mass of all that
       step 1 keeps. The greatest logit stays at any top_p.
    3. min-p, where min_p > 0: those with ``m < min_p``. The greatest logit stays at any min_p.

    Equal logits stay or go together. The cutoff is the smallest logit that stays. It is -inf where none of the three
    is asked for, in rows with nothing above -inf, and in greedy and padding rows; a top_p or min_p that is NaN asks for
    nothing. A cutoff is a logit of its row, so it is exact, but where a sum of masses is within 2**-16 of top_p's, or a
    mass of min_p: there rounding decides.

    SGLang 0.5.23's verify (``build_speculative_verify_target_probs``) does steps 1 and 2, and leaves min-p out, which
    its sampler does as step 3. On equal logits at the last place it keeps some or all, as its library does.
    """

    def __call__(
        self,
        *,
        target_logits: Tensor,  # [B * T, V] fp32 / bf16 / fp16, last axis contiguous
        temperatures: Tensor,  # [B] fp32, 0 on greedy rows
        top_ks: Tensor,  # [B] int32
        top_ps: Tensor,  # [B] fp32
        min_ps: Tensor,  # [B] fp32
        verify_lens: Tensor,  # [B] int32 in [0, T]
        out_cutoffs: Tensor,  # [B * T] fp32
    ) -> None: ...
