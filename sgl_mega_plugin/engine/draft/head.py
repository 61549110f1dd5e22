"""Base logits of SGLang's draft model through a slot at the seam ``draft_logits``.

What ``DSparkDraftMixin.compute_base_logits`` does on one rank with a head that is a plain matrix: divide, multiply,
crop to the vocabulary. Called by ``sampler`` in that method's place, inside the draft's graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from sgl_mega_plugin.contract import Backend, DraftLogits, SlotSetup

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draft_logits_reasons(model: Any) -> list[str]:
    """Why no slot can serve this draft's base logits, its LM head attached; empty when one can."""
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
    from sglang.srt.models.dspark import DSparkDraftMixin

    if getattr(type(model), "compute_base_logits", None) is not DSparkDraftMixin.compute_base_logits:
        return [f"{type(model).__name__} has a compute_base_logits of its own"]
    lm_head = model.lm_head
    if lm_head is None:
        return ["no LM head is attached to the draft"]
    if should_apply_lm_head_quant_method(lm_head, lm_head.quant_method):
        return ["the LM head is quantized"]
    weight, vocab = lm_head.weight, int(lm_head.org_vocab_size)
    if weight.dim() != 2 or weight.dtype not in _DTYPES or weight.stride(-1) != 1:
        return [
            f"the LM head's weight has shape {tuple(weight.shape)}, dtype {weight.dtype}, strides {weight.stride()}; a "
            "slot takes [W, H] in float32, bfloat16 or float16 with contiguous rows"
        ]
    reasons = []
    if model.markov_head.vocab_shard is not None or weight.shape[0] < vocab:
        reasons.append(f"the vocabulary is split over ranks: the LM head has {weight.shape[0]} of {vocab} rows here")
    return reasons


@dataclass(frozen=True)
class DraftHead:
    """A slot on the draft's hidden states and the LM head that SGLang attached to it."""

    model: Any
    slot: DraftLogits
    gamma: int

    @classmethod
    def build(
        cls,
        model: Any,
        implementation: Callable[[SlotSetup], DraftLogits],
        *,
        device: str,
        max_batch: int,
        gamma: int,
    ) -> Self:
        """Build the slot for this model; :func:`draft_logits_reasons` has found nothing against it."""
        setup = SlotSetup(
            backend=Backend.KERNEL,
            device=device,
            max_batch=max_batch,
            gamma=gamma,
            vocab_size=int(model.lm_head.org_vocab_size),
        )
        return cls(model, implementation(setup), gamma)

    def base_logits(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [B * G, H] -> logits [B, G, V] in the weight's dtype, and the confidence head's features.

        The logits are new memory, as SGLang's own are: in a capture it is the graph's, which its batch sizes share.
        """
        lm_head = self.model.lm_head
        hidden = hidden_states.view(-1, self.gamma, hidden_states.shape[-1])
        vocab = int(lm_head.org_vocab_size)
        logits = hidden.new_empty(*hidden.shape[:2], vocab, dtype=lm_head.weight.dtype)
        self.slot(
            hidden=hidden,
            lm_head_weight=lm_head.weight,
            divisor=float(self.model.logits_mup_width_multiplier or 1.0),
            vocab_size=vocab,
            out_logits=logits,
            out_tokens=None,
        )
        return logits, hidden_states
