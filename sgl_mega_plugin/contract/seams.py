"""Seams: the typed calls at which a slot replaces the engine.

An adapter (the SGLang binding, the embedded engine, the conformance kit) fills a seam's
arguments; a slot's kernel and its reference both take exactly these. Every argument is
keyword-only. ``out_*`` arguments are written in place; everything else is read only.

Axis letters, here and everywhere: B requests, G draft tokens a request, T = G + 1 verify
rows a request, V vocabulary, R Markov rank, L layers, H KV heads, D head size, P positions
of the RoPE table, S KV slots, Q rows of the request table, C its columns.

A row with ``verify_lens == 0`` is padding: it belongs to a graph larger than the batch.
What a seam leaves in a padding row is said below; it never points at memory of a request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sgl_mega_plugin.contract.stage import Stage

if TYPE_CHECKING:
    from torch import Tensor

#: KV slot that no request owns; padding rows and positions past a request's row use it.
PADDING_SLOT = 0


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


class StepInputs(Protocol):
    """Positions, cache locations and draft inputs of a step, from the lengths on the device.

    Row t of request b sits at position ``seq_lens[b] + t`` and writes its KV to
    ``req_to_token[req_pool_indices[b], seq_lens[b] + t]``. A position past ``max_positions``
    or past the request's row (C columns) gets the last position, ``min(max_positions, C) - 1``, and the
    padding slot, so nothing is written past the request; so does a table row outside [0, Q) its slot.
    ``out_draft_ids`` is the anchor followed by the mask token.
    Padding rows: position 0, the padding slot, mask tokens.
    """

    def __call__(
        self,
        *,
        req_pool_indices: Tensor,  # [B] int64 or int32, rows of req_to_token
        req_to_token: Tensor,  # [Q, C] int32
        seq_lens: Tensor,  # [B] int32 or int64
        verify_lens: Tensor,  # [B] int32 in [0, T]
        anchor_tokens: Tensor,  # [B] int64
        mask_token: int,
        max_positions: int,
        out_positions: Tensor,  # [B, T] int64
        out_cache_locs: Tensor,  # [B, T] int64
        out_draft_ids: Tensor,  # [B, G] int64
    ) -> None: ...


class ContextKv(Protocol):
    """Write the draft's context KV of the accepted rows.

    For each row t < ``commit_lens[b]`` and each layer: ``k`` is RMS-normalised in fp32
    (eps, weight), rounded to the KV dtype, rotated by the RoPE table (neox pairs i and
    i + D/2) and stored; ``v`` is stored as it is. Rows past the commit length, rows whose
    location is the padding slot or outside [0, S) or whose position is outside [0, P), and padding
    rows are neither read nor written.
    """

    def __call__(
        self,
        *,
        projected_kv: Tensor,  # [B * T, L, 2, H, D] bf16 / fp16 / fp32: k then v of each layer
        k_norm_weights: Tensor,  # [L, D]
        cos_sin: Tensor,  # [P, D] fp32: cos of D/2 frequencies, then sin
        positions: Tensor,  # [B, T] int64
        cache_locs: Tensor,  # [B, T] int64
        commit_lens: Tensor,  # [B] int32 in [0, T]
        eps: float,
        out_keys: Sequence[Tensor],  # L x [S, H, D], dtype of projected_kv
        out_values: Sequence[Tensor],  # L x [S, H, D]
    ) -> None: ...


@dataclass(frozen=True)
class Seam:
    """A named call of a stage: its parameters are what a slot's implementation must take."""

    name: str
    stage: Stage
    protocol: type[Any]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The keyword-only parameter names, in order."""
        return _keywords(self.protocol.__call__)

    def mismatches(self, call: Callable[..., Any]) -> list[str]:
        """How a callable's signature departs from this seam's; empty when it fits."""
        try:
            signature = inspect.signature(call)
        except (TypeError, ValueError):
            return [f"{call!r} has no signature"]
        wanted, found = self.parameters, _keywords(call)
        reasons = [f"lacks {name!r}" for name in wanted if name not in found]
        reasons += [f"has {name!r}, which the seam does not pass" for name in found if name not in wanted]
        for parameter in signature.parameters.values():
            if parameter.name == "self":
                continue
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                reasons.append(f"{parameter.name!r} is {parameter.kind.description}, not keyword-only")
        return reasons


def _keywords(call: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(call).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


#: Every seam by name. A slot names one of these; several slots may serve the same one.
SEAMS: dict[str, Seam] = {
    seam.name: seam
    for seam in (
        Seam("draft_block", Stage.DRAFT, DraftBlock),
        Seam("greedy_accept", Stage.VERIFY_ACCEPT, GreedyAccept),
        Seam("sampled_accept", Stage.VERIFY_ACCEPT, SampledAccept),
        Seam("step_inputs", Stage.GLUE, StepInputs),
        Seam("context_kv", Stage.COMMIT, ContextKv),
    )
}
