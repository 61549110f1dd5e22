"""The embedded engine's own stages: what runs where no slot does.

Plain torch, an operator at a time, as an engine without fused kernels does it. This is the
baseline that slots are compared with, so it shares no code with any slot. Each function has
the signature and the meaning of its seam in ``contract.seams``.
"""

from sgl_mega_plugin.embedded.stages.commit import context_kv
from sgl_mega_plugin.embedded.stages.draft import draft_block
from sgl_mega_plugin.embedded.stages.glue import step_inputs
from sgl_mega_plugin.embedded.stages.verify_accept import greedy_accept, sampled_accept

__all__ = ["context_kv", "draft_block", "greedy_accept", "sampled_accept", "step_inputs"]
