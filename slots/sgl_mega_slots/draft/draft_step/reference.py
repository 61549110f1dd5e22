"""`draft_forward` in plain torch: the decoder of `target_step`'s reference, whose rows see all of their request's."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sgl_mega_slots.target.target_step.reference import decoder_step, write
from sgl_mega_slots.target.target_step.weights import call_of


def draft_forward(
    *,
    input_ids: Tensor,
    positions: Tensor,
    cache_locs: Tensor,
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    embedding: Tensor,
    input_norms: Sequence[Tensor],
    qkv_weights: Sequence[Tensor],
    qkv_scales: Sequence[Tensor] | None,
    qkv_biases: Sequence[Tensor] | None,
    q_norms: Sequence[Tensor] | None,
    k_norms: Sequence[Tensor] | None,
    output_weights: Sequence[Tensor],
    output_scales: Sequence[Tensor] | None,
    mlp_norms: Sequence[Tensor],
    gate_up_weights: Sequence[Tensor],
    gate_up_scales: Sequence[Tensor] | None,
    down_weights: Sequence[Tensor],
    down_scales: Sequence[Tensor] | None,
    final_norm: Tensor,
    cos_sin: Tensor,
    eps: float,
    out_keys: Sequence[Tensor],
    out_values: Sequence[Tensor],
    out_hidden: Tensor,
) -> None:
    """See :class:`sgl_mega_plugin.contract.DraftForward`."""
    call = call_of(dict(locals()))
    write(call, decoder_step(call.shape, call.weights, call.cache, call.inputs, causal=False))
