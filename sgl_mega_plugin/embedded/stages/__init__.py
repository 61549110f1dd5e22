"""The embedded engine's own stages: what runs where no slot does.

Plain torch, an operator at a time, as an engine without fused kernels does it. This is the
baseline that slots are compared with, so it shares no code with any slot. Each function has
the signature and the meaning of its seam in ``contract.seams``.
"""

from sgl_mega_plugin.embedded.stages.commit import context_kv, history_commit, kv_staging, staged_kv
from sgl_mega_plugin.embedded.stages.draft import draft_block
from sgl_mega_plugin.embedded.stages.forward import draft_forward, target_forward
from sgl_mega_plugin.embedded.stages.glue import attention_metadata, relay, step_inputs, step_params
from sgl_mega_plugin.embedded.stages.head import draft_logits, target_argmax
from sgl_mega_plugin.embedded.stages.verify_accept import greedy_accept, sampled_accept, sampling_cutoffs

__all__ = [
    "attention_metadata",
    "context_kv",
    "draft_block",
    "draft_forward",
    "draft_logits",
    "greedy_accept",
    "history_commit",
    "kv_staging",
    "relay",
    "sampled_accept",
    "sampling_cutoffs",
    "staged_kv",
    "step_inputs",
    "step_params",
    "target_argmax",
    "target_forward",
]
