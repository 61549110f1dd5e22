"""Whether a server's settings let a slot run the draft's forward. Imports neither torch nor SGLang."""

from __future__ import annotations

from sgl_mega_plugin.engine import families
from sgl_mega_plugin.engine.host import Launch
from sgl_mega_plugin.engine.target.reasons import decoder_reasons

DRAFT_FORWARD = "draft_forward"


def architecture_reasons(launch: Launch, served: tuple[str, ...]) -> list[str]:
    """Why the draft is none of these architectures, or which it is cannot be read; empty when it is one."""
    if launch.draft_error is not None:
        return [launch.draft_error]
    if not set(launch.draft_architectures) & set(served):
        return [f"draft architecture {list(launch.draft_architectures)} is none of {list(served)}"]
    return []


def draft_forward_reasons(launch: Launch) -> list[str]:
    """Why no slot can run the draft's forward under these settings; empty when one can."""
    reasons = architecture_reasons(launch, families.DRAFTS)
    if not launch.embed_in_graph:
        reasons.append("SGLANG_DSPARK_EMBED_IN_GRAPH is off, which takes the embedding out of the draft's forward")
    return reasons + decoder_reasons(launch)
