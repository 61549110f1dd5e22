"""What SGLang calls in place of the target's forward: one slot for the verify steps that it covers.

SGLang's dispatch asks :meth:`VerifyForward.plan` at every forward of the target and runs :meth:`VerifyForward.forward`
where it gets a step, in the same place as the model's own forward: inside the capture of a verify graph, before the
tail hooks of that capture, or eagerly. What the plan declines is SGLang's, whole. Built by ``specs``.

The slot reads the scheduler's request table while it runs. SGLang tells the scheduler earlier, when attention metadata
is prepared, that the step's reads are done, and then the scheduler may write rows of requests that ended and columns
behind a live request's tokens. The slot reads committed columns, so only rows of ended requests can change under it;
their results are dropped, and no row of a step depends on another request's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import TargetForward
from sgl_mega_plugin.engine.api import Step
from sgl_mega_plugin.engine.target.dense_model import DecoderWeights, taps_of, weights_of
from sgl_mega_plugin.engine.target.kv_pool import caches_of, pool_reasons
from sgl_mega_plugin.engine.target.model_checks import hook_reasons

MODE = "target_verify"
#: What stays SGLang's on a server whose verify forward a slot runs.
NOT_COVERED = (
    "larger batches, prefill, idle forwards, plain decode, token trees and custom masks, rows of different numbers, "
    "embeddings as inputs"
)


def covered_step(input_ids: Any, forward_batch: Any, *, tokens: int, requests: int) -> Step | None:
    """A forward over a block of ``tokens`` rows of each of at most so many requests as a step; None for any other."""
    if not forward_batch.forward_mode.is_target_verify() or forward_batch.replace_embeds is not None:
        return None
    block, found = forward_batch.spec_info, forward_batch.batch_size
    if not 1 <= found <= requests or input_ids.shape[0] != found * tokens:
        return None
    if block is None or block.draft_token_num != tokens or block.topk > 1:
        return None
    if block.custom_mask is not None or block.ragged_verify_layout is not None:
        return None
    return Step(mode=MODE, rows=found * tokens)


@dataclass
class VerifyForward:
    """A ``BuiltMegakernel`` for the target: ``requests`` of T = ``tokens`` rows at most, N = B * T rows a step."""

    model: Any
    slot: TargetForward
    slot_name: str
    tokens: int
    requests: int
    draft_sampler: None = None
    _weights: DecoderWeights | None = None
    _pool: Any = None  # the KV pool that was found to fit

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows of the covered steps."""
        return tuple(self.tokens * requests for requests in range(1, self.requests + 1))

    def summary(self) -> str:
        return f"slot {self.slot_name!r} runs target verify of 1 to {self.requests} requests, {self.tokens} rows each"

    def plan(self, input_ids: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Step | None:
        """The step where it is covered, else None; read from the host's side of the batch alone."""
        if any(value is not None and value is not False for value in (*args, *kwargs.values())):
            return None  # embeddings as inputs, or results that are no logits
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
        """Logits and tapped hidden states of a planned step, as the model's own forward returns them.

        Args:
            step: the plan's step with SGLang's view of the running forward.
            original: the model's own forward; never called here.
            input_ids: [N] int64.
            positions: [N] int64.
            forward_batch: SGLang's batch; its ``seq_lens`` leave this step's tokens out.

        Returns:
            SGLang's ``LogitsProcessorOutput``: logits [N, V] fp32, in the batch's buffer where it has one, and hidden
            states [N, taps * E] bf16 where the batch asks for them. What is not the batch's is new memory: in a
            capture the graph's.

        Raises:
            RuntimeError: the KV pool, the taps or the model's hooks do not go into the seam.
        """
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.model_executor.forward_context import get_req_to_token_pool

        weights, pool = self._bound(step.view.kv_pool.pool), step.view.kv_pool.pool
        taps = self._taps(forward_batch)
        keys, values = caches_of(pool, len(weights.qkv_weights))
        rows, hidden = step.rows, weights.final_norm.shape[0]
        logits = weights.final_norm.new_empty(rows, weights.lm_head_weight.shape[0])
        tapped = weights.final_norm.new_empty(rows, len(taps) * hidden) if taps else None
        self.slot(
            input_ids=input_ids,
            positions=positions,
            cache_locs=forward_batch.out_cache_loc,
            seq_lens=forward_batch.seq_lens,
            req_pool_indices=forward_batch.req_pool_indices,
            req_to_token=get_req_to_token_pool().req_to_token,
            **vars(weights),
            taps=taps,
            out_keys=keys,
            out_values=values,
            out_tapped=tapped,
            out_hidden=None,
            out_logits=logits,
        )
        return LogitsProcessorOutput(
            next_token_logits=self.model.logits_processor._copy_logits_to_buffer(logits, forward_batch),
            hidden_states=tapped,
        )

    def _bound(self, pool: Any) -> DecoderWeights:
        """The model's weights, read when a KV pool is met for the first time, which has to fit."""
        from sglang.srt.model_executor.forward_context import get_attn_backend

        if self._weights is None or pool is not self._pool:
            self._refuse(pool_reasons(pool, get_attn_backend()) + hook_reasons(self.model))
            self._weights, self._pool = weights_of(self.model), pool
        return self._weights

    def _taps(self, forward_batch: Any) -> tuple[int, ...]:
        """Layers whose input the draft reads of this batch; SGLang names them after the build."""
        if not forward_batch.capture_hidden_mode.need_capture():
            return ()
        taps = taps_of(self.model)
        if not taps:
            self._refuse(
                ["hidden states are asked for and no layer is tapped: the seam has them beside logits only so"]
            )
        return taps

    def _refuse(self, reasons: list[str]) -> None:
        if reasons:
            raise RuntimeError(
                f"slot {self.slot_name!r} cannot run here: {'; '.join(reasons)}. Leave it out of "
                "SGLANG_NVIDIA_MEGAKERNEL_SLOTS"
            )
