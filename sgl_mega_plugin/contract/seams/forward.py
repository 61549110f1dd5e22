"""Seams of forwards: a step of a dense decoder as one call. Letters as in the package's docstring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class TargetForward(Protocol):
    """Layers, last norm and LM head of a dense decoder in the style of Llama, Qwen2 and Qwen3.

    B requests of T rows: N = B * T, and row b * T + t is token t of request b. E is the hidden size, F the
    intermediate size, A the query heads.

    The residual x starts as the embedding's rows. A layer adds to it the output projection of its attention, then
    the down projection of ``silu(gate) * up``; each reads x normalised: times ``1 / sqrt(mean(x**2) + eps)`` and the
    norm's weight. Queries and keys are normalised so per head where ``q_norms`` is given, then rotated by the row of
    ``cos_sin`` at their position, pairs (i, i + D/2). Query head a reads KV head a // (A / H). Row t of request b
    attends to its ``seq_lens[b]`` committed tokens, whose keys and values lie at
    ``req_to_token[req_pool_indices[b]]``, and to rows 0 to t of the step; scores are divided by sqrt(D).

    Weights are bf16, or the four matrices of every layer fp8 (e4m3) with fp32 scales: a weight is its value times the
    scale of its row, or of its block of 128 rows and 128 columns, which start at multiples of 128. All matrices of a
    call are of one kind, and their values are numbers. What a matrix is multiplied with is not quantised.

    All of it in fp32 but the outputs; what else an implementation rounds, its numerics say. It may round the
    residual stream to bf16 for the matrices that read it, the heads before attention, the attention's output and
    the MLP's product. ``out_tapped`` holds x before each layer of ``taps`` side by side, L being the last one's
    output; ``out_hidden`` the last x normalised. Rows of ``out_keys`` and ``out_values`` at ``cache_locs`` get the
    step's keys, as attention reads them, and values; a row at the padding slot or below it writes nothing. In an fp8
    cache they are rounded to bf16 and then to e4m3, within its range, and attention reads the step's own so too. What
    attention reads of a cache are numbers: an e4m3 NaN may be read as one.
    """

    def __call__(
        self,
        *,
        input_ids: Tensor,  # [N] int64 in [0, V)
        positions: Tensor,  # [N] int64 in [0, P)
        cache_locs: Tensor,  # [N] int64 below S
        seq_lens: Tensor,  # [B] int64, without this step's rows, at most C
        req_pool_indices: Tensor,  # [B] int64 in [0, Q)
        req_to_token: Tensor,  # [Q, C] int32
        embedding: Tensor,  # [V, E] bf16, as all weights are but the four matrices with scales, float8_e4m3fn
        input_norms: Sequence[Tensor],  # L x [E]
        qkv_weights: Sequence[Tensor],  # L x [(A + 2 H) * D, E], queries, keys, values
        qkv_scales: Sequence[Tensor] | None,  # L x [outputs] or [outputs / 128, E / 128], rounded up; all four or none
        qkv_biases: Sequence[Tensor] | None,  # L x [(A + 2 H) * D]
        q_norms: Sequence[Tensor] | None,  # L x [D]; both or neither
        k_norms: Sequence[Tensor] | None,  # L x [D]
        output_weights: Sequence[Tensor],  # L x [E, A * D]
        output_scales: Sequence[Tensor] | None,  # L x [E] or [E / 128, A * D / 128]
        mlp_norms: Sequence[Tensor],  # L x [E]
        gate_up_weights: Sequence[Tensor],  # L x [2 F, E], gates first
        gate_up_scales: Sequence[Tensor] | None,  # L x [2 F] or [2 F / 128, E / 128]
        down_weights: Sequence[Tensor],  # L x [E, F]
        down_scales: Sequence[Tensor] | None,  # L x [E] or [E / 128, F / 128]
        final_norm: Tensor,  # [E]
        lm_head_weight: Tensor,  # [V, E]
        cos_sin: Tensor,  # [P, D] fp32: cosines of D/2 frequencies, then sines
        eps: float,  # above 0
        taps: Sequence[int],  # in [0, L]
        out_keys: Sequence[Tensor],  # L x [S, H, D] bf16 or float8_e4m3fn, all alike
        out_values: Sequence[Tensor],  # L x [S, H, D] as the keys
        out_tapped: Tensor | None,  # [N, taps * E] bf16; None without taps
        out_hidden: Tensor | None,  # [N, E] bf16; this or the logits
        out_logits: Tensor | None,  # [N, V] bf16
    ) -> None: ...


class DraftForward(Protocol):
    """Layers and last norm of a dense draft, over the block that it drafts next.

    W rows a request, an anchor and mask tokens: N = B * W. The decoder of :class:`TargetForward` with one difference:
    rows of a block see each other, so each row attends to the ``seq_lens[b]`` committed tokens and to all W rows of its
    request. There is no LM head: the block's tokens come from ``out_hidden``, the last x normalised. Keys and values of
    the block are written too, at places that the next commit writes again.
    """

    def __call__(
        self,
        *,
        input_ids: Tensor,  # [N] int64 in [0, V)
        positions: Tensor,  # [N] int64 in [0, P)
        cache_locs: Tensor,  # [N] int64 below S
        seq_lens: Tensor,  # [B] int64, without this block's rows, at most C
        req_pool_indices: Tensor,  # [B] int64 in [0, Q)
        req_to_token: Tensor,  # [Q, C] int32
        embedding: Tensor,  # [V, E] bf16, as all weights are but the four matrices with scales, float8_e4m3fn
        input_norms: Sequence[Tensor],  # L x [E]
        qkv_weights: Sequence[Tensor],  # L x [(A + 2 H) * D, E], queries, keys, values
        qkv_scales: Sequence[Tensor] | None,  # L x [outputs] or [outputs / 128, E / 128], rounded up; all four or none
        qkv_biases: Sequence[Tensor] | None,  # L x [(A + 2 H) * D]
        q_norms: Sequence[Tensor] | None,  # L x [D]; both or neither
        k_norms: Sequence[Tensor] | None,  # L x [D]
        output_weights: Sequence[Tensor],  # L x [E, A * D]
        output_scales: Sequence[Tensor] | None,  # L x [E] or [E / 128, A * D / 128]
        mlp_norms: Sequence[Tensor],  # L x [E]
        gate_up_weights: Sequence[Tensor],  # L x [2 F, E], gates first
        gate_up_scales: Sequence[Tensor] | None,  # L x [2 F] or [2 F / 128, E / 128]
        down_weights: Sequence[Tensor],  # L x [E, F]
        down_scales: Sequence[Tensor] | None,  # L x [E] or [E / 128, F / 128]
        final_norm: Tensor,  # [E]
        cos_sin: Tensor,  # [P, D] fp32: cosines of D/2 frequencies, then sines
        eps: float,  # above 0
        out_keys: Sequence[Tensor],  # L x [S, H, D] bf16 or float8_e4m3fn, all alike
        out_values: Sequence[Tensor],  # L x [S, H, D] as the keys
        out_hidden: Tensor,  # [N, E] bf16
    ) -> None: ...
