"""What SGLang calls in place of a dense draft's forward: one slot of the seam ``draft_forward`` for a block.

The draft's model is a stack of layers behind the target's embedding, which SGLang attaches after the build; its
forward is a ``TARGET_VERIFY`` of the block in which rows see each other. It ends with the last norm: the draft's
sampler makes tokens of that. Built by ``specs``, called inside the draft's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.engine.slot_forward import SlotForward
from sgl_mega_plugin.engine.target import model_checks
from sgl_mega_plugin.engine.target.dense_model import each_layer


def model_reasons(model: Any) -> list[str]:
    """Why a loaded draft does not go into the seam, every reason in words; empty when it does.

    Its embedding is looked at with the first forward: SGLang attaches the target's later.
    """
    from sglang.srt.models.dflash import DFlashAttention, DFlashDecoderLayer, DFlashDraftModel, DFlashMLP
    from sglang.srt.models.dspark import DSparkDraftMixin

    own = type(model).forward is DFlashDraftModel.forward
    if not own or getattr(type(model), "forward_embed", None) is not DSparkDraftMixin.forward_embed:
        return [f"the draft is a {type(model).__name__}, and only the forward of DSparkDraftModel is read"]
    layers = list(model.layers)
    for index, layer in enumerate(layers):
        for part, kind in ((layer, DFlashDecoderLayer), (layer.self_attn, DFlashAttention), (layer.mlp, DFlashMLP)):
            if type(part) is not kind:
                return [f"layer {index} has a {type(part).__name__} where the draft of the seam has a {kind.__name__}"]
    eps = getattr(model.norm, "variance_epsilon", None)
    reasons = model_checks.by_layer(
        [
            [*model_checks.layer_reasons(layer, index, layers[0], eps, block=True), *_extras(layer)]
            for index, layer in enumerate(layers)
        ]
    )
    return [*reasons, *model_checks.norm_reasons("the last norm", model.norm, eps)]


def _extras(layer: Any) -> Iterator[str]:
    """What a draft's layer may do besides a decoder's."""
    if layer.attention_conv is not None or layer.mlp_conv is not None:
        yield "convolutions run over the block"
    if layer.self_attn.v_scale is not None:
        yield f"values are scaled by {layer.self_attn.v_scale}"
    if layer.self_attn.attention_sink_bias is not None:
        yield "attention has sinks"


@dataclass
class BlockForward(SlotForward):
    """A ``BuiltMegakernel`` for the draft: blocks of W = ``tokens`` rows of at most ``requests`` requests, N = B * W
    rows a step, beside the sampler of ``sampler``.

    ``slot`` is a :class:`sgl_mega_plugin.contract.DraftForward`.
    """

    def summary(self) -> str:
        sampler = "" if self.draft_sampler is None else f", and {self.draft_sampler.slot_name!r} drafts"
        return f"slot {self.slot_name!r} runs blocks of 1 to {self.requests} requests, {self.tokens} rows each{sampler}"

    def read_weights(self) -> Mapping[str, Any]:
        vocab = int(self.model.embed_tokens.org_vocab_size)
        return each_layer(list(self.model.layers)) | {
            "embedding": self.model.embed_tokens.weight[:vocab],
            "final_norm": self.model.norm.weight,
            "eps": float(self.model.norm.variance_epsilon),
        }

    def late_reasons(self) -> list[str]:
        return model_checks.embedding_reasons("the target's embedding", self.model.embed_tokens)

    @torch.no_grad()
    def forward(
        self,
        step: Any,
        original: Callable[..., Any],
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The block's last hidden states, as the model's own forward returns them.

        Takes what ``VerifyForward.forward`` takes; ``forward_batch.seq_lens`` leave the block out.

        Returns:
            SGLang's ``LogitsProcessorOutput`` without logits; hidden states [N, E] bf16, new memory: in a capture
            the graph's.

        Raises:
            RuntimeError: the KV pool, the embedding or the model's hooks do not go into the seam.
        """
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        weights = self.bound(step.view.kv_pool.pool)
        norm = weights["final_norm"]
        hidden = norm.new_empty(step.rows, norm.shape[0])
        self.call(weights, input_ids, positions, forward_batch, {"out_hidden": hidden})
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)
