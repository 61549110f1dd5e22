"""Whether a server's settings let a slot run the draft's forward. Imports neither torch nor SGLang."""

from __future__ import annotations

from sgl_mega_plugin.engine import families
from sgl_mega_plugin.engine.host import Launch
from sgl_mega_plugin.engine.target.reasons import decoder_reasons

DRAFT_FORWARD = "draft_forward"


def draft_forward_reasons(launch: Launch) -> list[str]:
    """Why no slot can run the draft's forward under these settings; empty when one can."""
    reasons = []
    if launch.draft_error is not None:
        reasons.append(launch.draft_error)
    elif not set(launch.draft_architectures) & set(families.DRAFTS):
        reasons.append(f"draft architecture {list(launch.draft_architectures)} is none of {list(families.DRAFTS)}")
    if not launch.embed_in_graph:
        reasons.append("SGLANG_DSPARK_EMBED_IN_GRAPH is off, which takes the embedding out of the draft's forward")
    return reasons + decoder_reasons(launch)
