"""Which seams the fold calls under a server's settings, and why it cannot. Imports neither torch nor SGLang."""

from __future__ import annotations

from sgl_mega_plugin.contract import Feature, Plan
from sgl_mega_plugin.engine import families
from sgl_mega_plugin.engine.host import Launch

#: The accepts that the fold knows, the one it prefers first: it serves greedy and sampled rows alike.
ACCEPTS = ("sampled_accept", "greedy_accept")
COMMIT = "context_kv"
RELAY = "relay"
STEP_INPUTS = "step_inputs"
CUTOFFS = "sampling_cutoffs"
#: Why a fold's slot does not run alone.
INCOMPLETE = (
    "accept and commit go into the verify graph together: the list needs a slot of seam 'context_kv' and one of "
    f"{' or '.join(map(repr, ACCEPTS))}"
)
_BUNDLED = (
    "the target is {!r}: its layers keep more than keys and values, and SGLang commits that in an epilogue of its own, "
    "which its switches control"
)
#: Every seam at which a folded step calls a slot.
SEAMS = (*ACCEPTS, CUTOFFS, COMMIT, RELAY, STEP_INPUTS)

_FEATURES = {
    Feature.TENSOR_PARALLEL: "tensor parallelism is in use, and ranks would have to agree on what was accepted",
    Feature.DP_ATTENTION: "data-parallel attention is in use, which runs idle forwards",
    Feature.PIPELINE_PARALLEL: "pipeline parallelism is in use",
    Feature.RAGGED_VERIFY: "ragged verify is in use: its rows are no multiple of the block",
    Feature.LORA: "LoRA is in use",
}


def fold_reasons(launch: Launch) -> list[str]:
    """Why no step can be folded under these settings; empty when steps can be."""
    reasons = [why for feature, why in _FEATURES.items() if feature in launch.host.features]
    reasons += [_BUNDLED.format(name) for name in launch.target_architectures if name in families.BUNDLED_TARGETS]
    if not launch.decode_graphs:
        reasons.append("decode CUDA graphs are off, and the fold lives in the verify graph")
    return reasons


def folds(plan: Plan) -> bool:
    """Whether the plan has the slots that a folded step cannot do without: an accept, and the commit."""
    return bool(plan.serving(COMMIT)) and any(plan.serving(seam) for seam in ACCEPTS)
