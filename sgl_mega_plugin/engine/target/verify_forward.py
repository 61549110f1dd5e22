"""What SGLang calls in place of the target's forward: a slot, for the verify steps that it covers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.engine.slot_forward import SlotForward
from sgl_mega_plugin.engine.target.dense_model import taps_of, weights_of

#: What stays SGLang's on a server whose verify forward a slot runs.
NOT_COVERED = (
    "larger batches, prefill, idle forwards, plain decode, token trees and custom masks, rows of different numbers, "
    "embeddings as inputs"
)


@dataclass
class VerifyForward(SlotForward):
    """A ``BuiltMegakernel`` for the target: ``requests`` of T = ``tokens`` rows at most, N = B * T rows a step.

    ``slot`` is a :class:`sgl_mega_plugin.contract.TargetForward`.
    """

    def summary(self) -> str:
        return f"slot {self.slot_name!r} runs target verify of 1 to {self.requests} requests, {self.tokens} rows each"

    def read_weights(self) -> Mapping[str, Any]:
        return vars(weights_of(self.model))

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

        weights = self.bound(step.view.kv_pool.pool)
        taps, norm = self._taps(forward_batch), weights["final_norm"]
        logits = norm.new_empty(step.rows, weights["lm_head_weight"].shape[0])
        tapped = norm.new_empty(step.rows, len(taps) * norm.shape[0]) if taps else None
        outputs = {"taps": taps, "out_tapped": tapped, "out_hidden": None, "out_logits": logits}
        self.call(weights, input_ids, positions, forward_batch, outputs)
        return LogitsProcessorOutput(
            next_token_logits=self.model.logits_processor._copy_logits_to_buffer(logits, forward_batch),
            hidden_states=tapped,
        )

    def _taps(self, forward_batch: Any) -> tuple[int, ...]:
        """Layers whose input the draft reads of this batch; SGLang names them after the build."""
        if not forward_batch.capture_hidden_mode.need_capture():
            return ()
        taps = taps_of(self.model)
        if not taps:
            self.refuse(["hidden states are asked for and no layer is tapped: the seam has them beside logits only so"])
        return taps
