"""The draft block on SGLang's draft sampler: base logits from the model, tokens from a slot.

SGLang's ``DsparkDraftSampler`` calls the factory once, before it captures the draft's graphs, and then,
for each batch size it captures or warms up, the step that the factory's ``steps`` returns. A step
replaces SGLang's own Markov block: it writes the tokens and the sampled rows' step logits where SGLang
keeps them and advances the noise counter once. Built by ``specs``; what settings alone rule out is in ``planning``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_plugin.contract.seams import DraftBlock, DraftLogits
from sgl_mega_plugin.engine.draft.head import DraftHead, draft_logits_reasons

logger = logging.getLogger(__name__)

#: Rows up to which the head's slot is asked: past them SGLang's matrix product is faster (bench of ``draft_logits``).
HEAD_ROWS = 64

#: The draft's hidden states [B * G, H] and anchors [B] -> tokens [B, G] and confidence features.
Step = Callable[[Tensor, Tensor], tuple[Tensor, Any]]


def model_reasons(model: Any) -> list[str]:
    """Why no slot can draft with this loaded model; empty when one can."""
    from sglang.srt.models.dspark import GatedMarkovHead, RNNHead, VanillaMarkov

    head = model.markov_head
    if type(head) not in (VanillaMarkov, GatedMarkovHead, RNNHead, _bundled_head()):
        return [f"the draft's Markov head is a {type(head).__name__}, and the seam has no formula for it"]
    weights = {"markov_w1": head.markov_w1.weight, "markov_w2": head.markov_w2.weight}
    if (mixer := mixer_of(head)) is not None:
        weights["mixer"] = mixer.weight
    dtypes = {name: weight.dtype for name, weight in weights.items()}
    if len(set(dtypes.values())) > 1:
        return [f"the Markov weights differ in dtype: {', '.join(f'{n} {d}' for n, d in dtypes.items())}"]
    return []


def _bundled_head() -> type | None:
    """The head of drafts that are bundled with DeepSeek-V4.1, where SGLang has loaded one: a vanilla head whose step
    logits are fp32. Its module is not imported for others.
    """
    module = sys.modules.get("sglang.srt.models.deepseek_v4_dspark")
    return getattr(module, "DSparkV4MarkovHead", None)


def mixer_of(head: Any) -> Any:
    """The linear layer of a gated head or an RNN, whose inputs stand in the seam's order; None for a vanilla head."""
    return getattr(head, "gate_proj", None) or getattr(head, "joint_proj", None)


def head_reasons(model: Any, step_logits: Tensor | None) -> list[str]:
    """Why no slot can draft with the LM head that SGLang attached after the build; empty when one can."""
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    head, lm_head = model.markov_head, model.lm_head
    if head.vocab_shard is not None:
        return ["the Markov head is split over ranks (SGLANG_DSPARK_OPT_MARKOV_W2_TP_SHARD)"]
    if should_apply_lm_head_quant_method(lm_head, lm_head.quant_method):
        return ["the LM head is quantized, so that the dtype of the base logits is not known beforehand"]
    reasons = []
    if int(lm_head.org_vocab_size) != head.vocab_size:
        reasons.append(f"the LM head has {lm_head.org_vocab_size} tokens, the Markov head {head.vocab_size}")
    step_dtype = head.step_logits_dtype(lm_head.weight.dtype)
    if step_logits is not None and step_logits.dtype != step_dtype:
        reasons.append(f"SGLang keeps step logits in {step_logits.dtype}, a step computes them in {step_dtype}")
    return reasons


def _as_steps_read(base_logits: Tensor, head: Any, step_logits: Tensor | None) -> Tensor:
    """Base logits in a dtype in which the seam's steps have SGLang's: step logits that are kept say it themselves."""
    wanted: torch.dtype = head.step_logits_dtype(base_logits.dtype)
    if step_logits is not None or torch.promote_types(base_logits.dtype, head.markov_w1.weight.dtype) == wanted:
        return base_logits
    return base_logits.to(wanted)


@dataclass(frozen=True)
class HeadSlot:
    """The slot of the seam ``draft_logits``."""

    name: str
    implementation: Callable[[SlotSetup], DraftLogits]
    named: bool


@dataclass(frozen=True)
class DraftSampler:
    """A factory in the sense of ``BuiltMegakernel.draft_sampler``, for one slot."""

    model: Any
    slot_name: str
    implementation: Callable[[SlotSetup], DraftBlock]
    named: bool  # by the user: then what does not fit stops the server
    max_batch: int | None  # largest B the slot serves
    head: HeadSlot | None = None  # of the base logits

    def __call__(
        self,
        *,
        gamma: int,
        max_bs: int,
        greedy_draft: bool,
        noise: Any,
        draft_tokens: Tensor,
        step_logits: Tensor | None,
        step_temperatures: Tensor,
    ) -> Callable[[int], Step | None]:
        """Build the slot's steps.

        ``draft_tokens`` [max_bs * G] int64 and ``step_logits`` [max_bs, G, V] are SGLang's own buffers, written in
        place; ``step_temperatures`` [max_bs] fp32 is read by each step. Raises RuntimeError where a slot that
        the user named does not fit the model; one on by default leaves every batch size to SGLang instead.
        """
        reasons = head_reasons(self.model, None if greedy_draft else step_logits)
        if reasons:
            return self._decline(reasons)
        block = _Block(
            model=self.model,
            slot=self.implementation(
                SlotSetup(
                    backend=Backend.KERNEL,
                    device=str(draft_tokens.device),
                    max_batch=max_bs,
                    gamma=gamma,
                    vocab_size=self.model.markov_head.vocab_size,
                )
            ),
            gamma=gamma,
            noise=noise,
            tokens=draft_tokens.view(max_bs, gamma),
            step_logits=None if greedy_draft else step_logits,
            temperatures=torch.zeros_like(step_temperatures) if greedy_draft else step_temperatures,
            head=self._head(device=str(draft_tokens.device), max_batch=max_bs, gamma=gamma),
        )
        largest = max_bs if self.max_batch is None else min(max_bs, self.max_batch)
        logger.info("slot %r drafts batch sizes 1 to %d", self.slot_name, largest)
        return lambda bs: block.step if bs <= largest else None

    def _head(self, *, device: str, max_batch: int, gamma: int) -> DraftHead | None:
        """The slot that computes base logits, where one is on and fits."""
        if self.head is None:
            return None
        reasons = draft_logits_reasons(self.model)
        if reasons and self.head.named:
            raise RuntimeError(f"slot {self.head.name!r} cannot run here: {'; '.join(reasons)}")
        if reasons:
            logger.info("slot %r is left out: %s", self.head.name, "; ".join(reasons))
            return None
        largest = max(1, HEAD_ROWS // gamma)
        logger.info("slot %r computes base logits of batch sizes 1 to %d", self.head.name, min(largest, max_batch))
        return DraftHead.build(
            self.model, self.head.implementation, device=device, max_batch=min(largest, max_batch), gamma=gamma
        )

    def _decline(self, reasons: list[str]) -> Callable[[int], Step | None]:
        if self.named:
            raise RuntimeError(f"slot {self.slot_name!r} cannot run here: {'; '.join(reasons)}")
        logger.info("slot %r is left out: %s", self.slot_name, "; ".join(reasons))
        return lambda bs: None


@dataclass(frozen=True)
class _Block:
    """A slot on SGLang's buffers. A greedy draft has no step logits and temperatures of zero."""

    model: Any
    slot: DraftBlock
    gamma: int
    noise: Any  # .key, and .offset [1] int64
    tokens: Tensor
    step_logits: Tensor | None
    temperatures: Tensor
    head: DraftHead | None

    def step(self, hidden_states: Tensor, anchor_tokens: Tensor) -> tuple[Tensor, Any]:
        """Draft a block: hidden [B * G, H] and anchors [B] -> tokens [B, G], confidence features."""
        bs = anchor_tokens.shape[0]
        if self.head is not None and bs * self.gamma <= HEAD_ROWS:
            base_logits, confidence_features = self.head.base_logits(hidden_states)
        else:
            base_logits, confidence_features = self.model.compute_base_logits(hidden_states)
        tokens = self.tokens[:bs]
        head = self.model.markov_head
        mixer = mixer_of(head)
        self.slot(
            base_logits=_as_steps_read(base_logits, head, self.step_logits).view(bs, self.gamma, -1),
            anchor_tokens=anchor_tokens,
            markov_w1=head.markov_w1.weight[: head.vocab_size],
            markov_w2=head.markov_w2.weight,
            draft_hidden=None if mixer is None else hidden_states.view(bs, self.gamma, -1),
            mixer_weight=None if mixer is None else mixer.weight,
            mixer_bias=None if mixer is None else mixer.bias,
            temperatures=self.temperatures[:bs],
            noise_key=self.noise.key,
            noise_offset=self.noise.offset,
            out_draft_tokens=tokens,
            out_step_logits=None if self.step_logits is None else self.step_logits[:bs],
            out_features=None,  # SGLang's confidence head looks them up itself, once the block is drafted
        )
        if self.step_logits is not None:
            self.noise.offset.add_(1)
        return tokens, confidence_features
