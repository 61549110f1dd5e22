"""What SGLang calls in place of a dense draft's forward: one slot of the seam ``draft_forward`` for a block.

The draft's model is a stack of layers behind the target's embedding, which SGLang attaches after the build; its
forward is a ``TARGET_VERIFY`` of the block in which rows see each other. It ends with the last norm: the draft's
sampler makes tokens of that. Built by ``specs``, called as ``target.verify_forward`` says, inside the draft's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import DraftForward
from sgl_mega_plugin.engine.api import Step
from sgl_mega_plugin.engine.draft.sampler import DraftSampler
from sgl_mega_plugin.engine.target import model_checks
from sgl_mega_plugin.engine.target.dense_model import each_layer
from sgl_mega_plugin.engine.target.kv_pool import caches_of, pool_reasons
from sgl_mega_plugin.engine.target.verify_forward import covered_step


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
    found: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        for reason in (*model_checks.layer_reasons(layer, index, layers[0], eps, block=True), *_extras(layer)):
            found.setdefault(reason, []).append(index)
    reasons = [f"{reason} ({model_checks.where(at, len(layers))})" for reason, at in found.items()]
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
class BlockForward:
    """A ``BuiltMegakernel`` for the draft: blocks of W = ``tokens`` rows of at most ``requests`` requests, N = B * W
    rows a step, and the sampler of ``sampler``.
    """

    model: Any
    slot: DraftForward
    slot_name: str
    tokens: int
    requests: int
    draft_sampler: DraftSampler | None
    _weights: dict[str, Any] | None = None
    _pool: Any = None  # the KV pool that was found to fit

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows of the covered steps."""
        return tuple(self.tokens * requests for requests in range(1, self.requests + 1))

    def summary(self) -> str:
        sampler = "" if self.draft_sampler is None else f", and {self.draft_sampler.slot_name!r} drafts"
        return f"slot {self.slot_name!r} runs blocks of 1 to {self.requests} requests, {self.tokens} rows each{sampler}"

    def plan(self, input_ids: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Step | None:
        """The step where it is covered, else None; read from the host's side of the batch alone."""
        if any(value is not None and value is not False for value in (*args, *kwargs.values())):
            return None  # embeddings as inputs
        return covered_step(input_ids, forward_batch, tokens=self.tokens, requests=self.requests)

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

        Args:
            step: the plan's step with SGLang's view of the running forward.
            original: the model's own forward; never called here.
            input_ids: [N] int64.
            positions: [N] int64.
            forward_batch: SGLang's batch; its ``seq_lens`` leave the block out.

        Returns:
            SGLang's ``LogitsProcessorOutput`` without logits; hidden states [N, E] bf16, new memory: in a capture
            the graph's.

        Raises:
            RuntimeError: the KV pool, the embedding or the model's hooks do not go into the seam.
        """
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.model_executor.forward_context import get_req_to_token_pool

        weights, pool = self._bound(step.view.kv_pool.pool), step.view.kv_pool.pool
        keys, values = caches_of(pool, len(self.model.layers))
        hidden = weights["final_norm"].new_empty(step.rows, weights["final_norm"].shape[0])
        self.slot(
            input_ids=input_ids,
            positions=positions,
            cache_locs=forward_batch.out_cache_loc,
            seq_lens=forward_batch.seq_lens,
            req_pool_indices=forward_batch.req_pool_indices,
            req_to_token=get_req_to_token_pool().req_to_token,
            **weights,
            out_keys=keys,
            out_values=values,
            out_hidden=hidden,
        )
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)

    def _bound(self, pool: Any) -> dict[str, Any]:
        """The draft's weights by the seam's names, read when a KV pool is met for the first time, which has to fit."""
        from sglang.srt.model_executor.forward_context import get_attn_backend

        if self._weights is None or pool is not self._pool:
            reasons = pool_reasons(pool, get_attn_backend()) + model_checks.hook_reasons(self.model)
            reasons += model_checks.embedding_reasons("the target's embedding", self.model.embed_tokens)
            if reasons:
                raise RuntimeError(
                    f"slot {self.slot_name!r} cannot run here: {'; '.join(reasons)}. Leave it out of "
                    "SGLANG_NVIDIA_MEGAKERNEL_SLOTS"
                )
            self._weights, self._pool = _weights_of(self.model), pool
        return self._weights


def _weights_of(model: Any) -> dict[str, Any]:
    """The draft's own memory, or views of it, by the seam's names."""
    vocab = int(model.embed_tokens.org_vocab_size)
    return each_layer(list(model.layers)) | {
        "embedding": model.embed_tokens.weight[:vocab],
        "final_norm": model.norm.weight,
        "eps": float(model.norm.variance_epsilon),
    }
