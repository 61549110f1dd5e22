"""The plan of a SGLang server: which seams this binding calls under its settings, then the plan.

Made by ``specs`` before weights load and again in each model worker, from the same settings. A slot whose seam
SGLang does not call here is left out with the reason, or refused if the user named it.
Imports neither torch nor SGLang, so that ``doctor`` can use :data:`UNCALLED`.
"""

from __future__ import annotations

from collections.abc import Mapping

from sgl_mega_plugin.contract import SEAMS, Feature, Host, Plan
from sgl_mega_plugin.engine import families
from sgl_mega_plugin.engine.draft.reasons import DRAFT_FORWARD, architecture_reasons, draft_forward_reasons
from sgl_mega_plugin.engine.fold import reasons as fold
from sgl_mega_plugin.engine.host import Launch
from sgl_mega_plugin.engine.target.reasons import TARGET_FORWARD, target_forward_reasons
from sgl_mega_plugin.plan import make_plan
from sgl_mega_plugin.registry import Registry

#: The seam that the megakernel API lets a plugin take over, by ``BuiltMegakernel.draft_sampler``.
DRAFT_BLOCK = "draft_block"
#: The seam that our draft sampler calls for the base logits of a block.
DRAFT_LOGITS = "draft_logits"
_HEAD_ALONE = "a slot computes base logits only where a slot of seam 'draft_block' drafts from them"
#: Values of ``markov_head_type`` whose formula that seam has.
MARKOV_HEADS = ("vanilla", "gated", "rnn")

_BUNDLED_LOGITS = (
    "the draft is bundled with its target: its streams are collapsed and normalised in front of the LM head, and the "
    "seam has no formula for that"
)

#: Seams at which a server calls a slot.
CALLED = (DRAFT_FORWARD, DRAFT_BLOCK, DRAFT_LOGITS, *fold.SEAMS, TARGET_FORWARD)
#: Seams at which SGLang runs batches larger than the slot's largest itself. For ``Host.shared_seams``.
SHARED = frozenset({DRAFT_FORWARD, TARGET_FORWARD})
#: Seams at which no SGLang server calls a slot yet, with the reason. For ``Host.closed_seams``.
UNCALLED: dict[str, str] = {
    name: f"no SGLang server calls a slot at seam {name!r} yet; the embedded engine does"
    for name in SEAMS
    if name not in CALLED
}


def plan_for(launch: Launch, environ: Mapping[str, str]) -> Plan:
    """The plan of a server. Raises :class:`SlotError` for values of the environment that cannot be read."""
    closed, registry = closed_seams(launch), Registry.discover()
    plan = make_plan(registry=registry, environ=environ, host=_host(launch, closed))
    alone: dict[str, str] = {}  # seams whose slots need another's, which is not on
    if not fold.folds(plan):
        alone |= dict.fromkeys(fold.SEAMS, fold.INCOMPLETE)
    if not plan.serving(DRAFT_BLOCK):
        alone[DRAFT_LOGITS] = _HEAD_ALONE
    if not alone:
        return plan
    return make_plan(registry=registry, environ=environ, host=_host(launch, alone | closed))


def closed_seams(launch: Launch) -> dict[str, str]:
    """Seams at which this server calls no slot, each with every reason."""
    closed = dict(UNCALLED)
    drafting = ((DRAFT_BLOCK, DRAFT_LOGITS), draft_block_reasons(launch))
    logits = ((DRAFT_LOGITS,), [_BUNDLED_LOGITS] if _is_bundled(launch) else [])
    forwards = (
        ((DRAFT_FORWARD,), draft_forward_reasons(launch)),
        ((TARGET_FORWARD,), target_forward_reasons(launch)),
    )
    for seams, reasons in (drafting, logits, (fold.SEAMS, fold.fold_reasons(launch)), *forwards):
        if reasons:
            closed |= {seam: "; ".join(reasons) for seam in seams if seam not in UNCALLED}
    return closed


def _is_bundled(launch: Launch) -> bool:
    return bool(set(launch.draft_architectures) & set(families.BUNDLED_DRAFTS.values()))


def _host(launch: Launch, closed: Mapping[str, str]) -> Host:
    return launch.host.model_copy(update={"closed_seams": dict(closed), "shared_seams": SHARED})


def draft_block_reasons(launch: Launch) -> list[str]:
    """Why no slot can draft under these settings; empty when one can."""
    reasons = architecture_reasons(launch, families.ALL_DRAFTS)
    if not reasons and launch.markov_head not in MARKOV_HEADS:
        reasons.append(f"the draft's Markov head is {launch.markov_head!r}; the seam has those of {list(MARKOV_HEADS)}")
    if Feature.TENSOR_PARALLEL in launch.host.features:
        reasons.append("tensor parallelism is in use, and base logits of a split vocabulary are not served yet")
    if not launch.decode_graphs:
        reasons.append("decode CUDA graphs are off, and SGLang calls a draft sampler in the draft's graph only")
    if not launch.folded_proposal:
        reasons.append("SGLANG_DSPARK_FOLDED_PROPOSAL is off, which takes the draft sampler out of the draft's graph")
    if launch.host.dtype == "float16" and not launch.greedy_draft:
        reasons.append("dtype 'float16' is in use: SGLang keeps step logits in float32 there, the seam in float16")
    return reasons
