"""Checks of `markov`'s arguments, and what the mixer's shape says of its head. Used by ``launch``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_mega_plugin.contract import SlotSetup
from sgl_mega_slots.common.checks import FLOAT_DTYPES, require_batch, require_setup, require_tensor


@dataclass(frozen=True)
class Mixer:
    """A gated head or an RNN: which it is, and at which columns of its weight the inputs stand."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    recurrent: bool
    hidden_column: int
    token_column: int


def check_arguments(
    setup: SlotSetup,
    *,
    base_logits: Tensor,
    anchor_tokens: Tensor,
    markov_w1: Tensor,
    markov_w2: Tensor,
    draft_hidden: Tensor | None,
    mixer_weight: Tensor | None,
    mixer_bias: Tensor | None,
    temperatures: Tensor,
    noise_offset: Tensor,
    out_draft_tokens: Tensor,
    out_step_logits: Tensor | None,
    out_features: Tensor | None,
) -> Mixer | None:
    """The head's mixer, if it has one; raises ValueError for an argument that is not the seam's."""
    if base_logits.dim() != 3:
        raise ValueError(f"base_logits: shape {tuple(base_logits.shape)}; must be [B, G, V]")
    batch, gamma, vocab = base_logits.shape
    require_batch("base_logits", batch, setup.max_batch)
    require_setup("base_logits", gamma, setup.gamma, "G")
    require_setup("base_logits", vocab, setup.vocab_size, "V")
    device, rank = torch.device(setup.device).type, markov_w1.shape[-1]
    weights = (markov_w1.dtype,)
    step_dtypes = (torch.promote_types(base_logits.dtype, markov_w1.dtype), torch.float32)
    rows: list[tuple[str, Tensor | None, tuple[int, ...], tuple[torch.dtype, ...]]] = [
        ("base_logits", base_logits, (batch, gamma, vocab), FLOAT_DTYPES),
        ("markov_w1", markov_w1, (vocab, rank), FLOAT_DTYPES),
        ("markov_w2", markov_w2, (vocab, rank), weights),
        ("temperatures", temperatures, (batch,), (torch.float32,)),
        ("noise_offset", noise_offset, (1,), (torch.int64,)),
        ("out_draft_tokens", out_draft_tokens, (batch, gamma), (torch.int64,)),
        ("out_step_logits", out_step_logits, (batch, gamma, vocab), step_dtypes),
        ("out_features", out_features, (batch, gamma, rank), weights),
    ]
    for name, value, shape, dtypes in rows:
        if value is not None:
            require_tensor(name, value, shape=shape, dtypes=dtypes, device=device)
    if anchor_tokens.shape != (batch,):
        raise ValueError(f"anchor_tokens: shape {tuple(anchor_tokens.shape)}; must be {(batch,)}")
    # Any stride will do: SGLang's anchors are a column of the draft's inputs.
    require_tensor("anchor_tokens", anchor_tokens[:, None], shape=(batch, 1), dtypes=(torch.int64,), device=device)
    return _mixer(draft_hidden, mixer_weight, mixer_bias, (batch, gamma), markov_w1, device)


def _mixer(
    hidden: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    block: tuple[int, int],
    markov_w1: Tensor,
    device: str,
) -> Mixer | None:
    if hidden is None or weight is None:
        for name, value in (("draft_hidden", hidden), ("mixer_weight", weight), ("mixer_bias", bias)):
            if value is not None:
                raise ValueError(
                    f"{name}: given without the rest of a mixer; a head takes hidden and weight, or neither"
                )
        return None
    rank, width = markov_w1.shape[1], hidden.shape[-1]
    recurrent = weight.shape[0] == 3 * rank
    outputs, inputs = (3 * rank, 2 * rank + width) if recurrent else (rank, rank + width)
    if weight.shape != (outputs, inputs):
        raise ValueError(
            f"mixer_weight: shape {tuple(weight.shape)}; must be [R, H + R] {(rank, rank + width)} of a gated head "
            f"or [3R, 2R + H] {(3 * rank, 2 * rank + width)} of an RNN"
        )
    dtypes = (markov_w1.dtype,)
    require_tensor("draft_hidden", hidden, shape=(*block, width), dtypes=dtypes, device=device)
    require_tensor("mixer_weight", weight, shape=(outputs, inputs), dtypes=dtypes, device=device)
    if bias is not None:
        require_tensor("mixer_bias", bias, shape=(outputs,), dtypes=dtypes, device=device)
    return Mixer(
        hidden=hidden,
        weight=weight,
        bias=bias,
        recurrent=recurrent,
        hidden_column=2 * rank if recurrent else 0,
        token_column=rank if recurrent else width,
    )
