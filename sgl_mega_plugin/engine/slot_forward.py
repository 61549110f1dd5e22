"""A slot in the place of a model's forward, as SGLang calls it: what a target's and a draft's have in common.

SGLang's dispatch asks :meth:`SlotForward.plan` at every forward of the model and runs ``forward`` where it gets a step,
in the same place as the model's own forward: inside the capture of a graph, before the tail hooks of that capture, or
eagerly. What the plan declines is SGLang's, whole. ``target.verify_forward`` and ``draft.block_forward`` build on it.

The slot reads the scheduler's request table while it runs. SGLang tells the scheduler earlier, when attention metadata
is prepared, that the step's reads are done, and then the scheduler may write rows of requests that ended and columns
behind a live request's tokens. The slot reads committed columns, so only rows of ended requests can change under it;
their results are dropped, and no row of a step depends on another request's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sgl_mega_plugin.engine.api import Step
from sgl_mega_plugin.engine.target.kv_pool import caches_of, pool_reasons
from sgl_mega_plugin.engine.target.model_checks import hook_reasons

MODE = "target_verify"


@dataclass
class SlotForward:
    """A ``BuiltMegakernel`` but for its ``forward``: steps of at most ``requests`` requests of ``tokens`` rows each."""

    model: Any
    slot: Callable[..., None]
    slot_name: str
    tokens: int
    requests: int
    draft_sampler: Any = None
    _weights: Mapping[str, Any] | None = None
    _pool: Any = None  # the KV pool that was found to fit

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows of the covered steps."""
        return tuple(self.tokens * requests for requests in range(1, self.requests + 1))

    def plan(self, input_ids: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Step | None:
        """The step where it is covered, else None; read from the host's side of the batch alone."""
        if any(value is not None and value is not False for value in (*args, *kwargs.values())):
            return None  # embeddings as inputs, or results that the slot does not give
        if not forward_batch.forward_mode.is_target_verify() or forward_batch.replace_embeds is not None:
            return None
        block, requests = forward_batch.spec_info, forward_batch.batch_size
        if not 1 <= requests <= self.requests or input_ids.shape[0] != requests * self.tokens:
            return None
        if block is None or block.draft_token_num != self.tokens or block.topk > 1:
            return None
        if block.custom_mask is not None or block.ragged_verify_layout is not None:
            return None
        return Step(mode=MODE, rows=requests * self.tokens)

    def read_weights(self) -> Mapping[str, Any]:
        """The model's weights by the seam's names."""
        raise NotImplementedError

    def late_reasons(self) -> list[str]:
        """What about the model does not go into the seam and was not there to be seen at the build."""
        return []

    def bound(self, pool: Any) -> Mapping[str, Any]:
        """The weights, read when a KV pool is met for the first time, which has to fit.

        Raises:
            RuntimeError: it does not, or the model has hooks or late reasons.
        """
        from sglang.srt.model_executor.forward_context import get_attn_backend

        if self._weights is None or pool is not self._pool:
            self.refuse(pool_reasons(pool, get_attn_backend()) + hook_reasons(self.model) + self.late_reasons())
            self._weights, self._pool = self.read_weights(), pool
        return self._weights

    def call(
        self,
        weights: Mapping[str, Any],
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        outputs: Mapping[str, Any],
    ) -> None:
        """The slot on a step's inputs, the weights and the pool that are bound, and these outputs."""
        from sglang.srt.model_executor.forward_context import get_req_to_token_pool

        keys, values = caches_of(self._pool, len(weights["qkv_weights"]))
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
            **outputs,
        )

    def refuse(self, reasons: list[str]) -> None:
        """Raise RuntimeError if there are any."""
        if reasons:
            raise RuntimeError(
                f"slot {self.slot_name!r} cannot run here: {'; '.join(reasons)}. Leave it out of "
                "SGLANG_NVIDIA_MEGAKERNEL_SLOTS"
            )
