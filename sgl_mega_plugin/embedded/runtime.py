"""From a plan to the calls of a step: for each seam a slot's implementation, or the engine's own stage.

The only place where the embedded engine meets slots. ``decode`` calls what this returns and never
learns who serves a seam; people do, through :attr:`Stages.slots`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_mega_plugin import registry
from sgl_mega_plugin.contract import (
    SEAMS,
    AttentionMetadata,
    Backend,
    ContextKv,
    DraftBlock,
    DraftForward,
    DraftLogits,
    GreedyAccept,
    HistoryCommit,
    KvStaging,
    Plan,
    Provided,
    Relay,
    SampledAccept,
    SamplingCutoffs,
    SlotSetup,
    StagedKv,
    StepInputs,
    StepParams,
    TargetArgmax,
    TargetForward,
)
from sgl_mega_plugin.embedded import UNCALLED, stages

#: The seams of a deferred commit. A slot at either brings it about; the other may be the engine's own.
DEFERRED = ("kv_staging", "staged_kv")


@dataclass(frozen=True)
class Stages:
    """One callable a seam; the slots among them, (seam, slot name) pairs; slots of the plan that are not called."""

    draft_forward: DraftForward
    draft_block: DraftBlock
    draft_logits: DraftLogits
    greedy_accept: GreedyAccept
    sampled_accept: SampledAccept
    sampling_cutoffs: SamplingCutoffs
    step_inputs: StepInputs
    attention_metadata: AttentionMetadata
    relay: Relay
    step_params: StepParams
    context_kv: ContextKv
    kv_staging: KvStaging
    staged_kv: StagedKv
    history_commit: HistoryCommit
    target_forward: TargetForward
    target_argmax: TargetArgmax
    slots: tuple[tuple[str, str], ...] = ()
    idle: tuple[tuple[str, str], ...] = ()  # (slot name, reason)

    def serves(self, seam: str) -> bool:
        """Whether a slot serves a seam, not the engine's own stage."""
        return any(seam == served for served, _ in self.slots)

    @property
    def deferred(self) -> bool:
        """Whether a commit is staged and written by the next draft, in the place of ``context_kv``."""
        return any(map(self.serves, DEFERRED))


def engine_stages() -> Stages:
    """Every stage by the embedded engine itself: slots off."""
    return Stages(**{seam: getattr(stages, seam) for seam in SEAMS})


def plan_stages(plan: Plan | None, setup: SlotSetup) -> Stages:
    """The first active slot of each seam, built with ``setup``; the engine's own stage where there is none.

    A named slot that cannot run, and a plan made for another runtime or backend, raise ``ValueError``.
    """
    if plan is None:
        return engine_stages()
    refusals = plan.refusals()
    if refusals:
        raise ValueError("the plan does not stand: " + "; ".join(refusals))
    if plan.host.runtime != "embedded" or plan.host.backend is not setup.backend:
        raise ValueError(
            f"a plan for runtime {plan.host.runtime!r} and backend {plan.host.backend.value!r} cannot serve "
            f"the embedded engine with backend {setup.backend.value!r}; make the plan for this host"
        )
    called = {seam: plan.serving(seam) for seam in SEAMS if plan.serving(seam)}
    closed = [f"slot {called[seam][0].name!r}: {reason}" for seam, reason in UNCALLED.items() if seam in called]
    if closed:
        raise ValueError("the plan was made for a host that calls more seams: " + "; ".join(closed))
    idle = [
        (other.name, f"slot {first.name!r} serves the same seam and comes before it")
        for first, *others in called.values()
        for other in others
    ]
    if any(seam in called for seam in DEFERRED):
        at_once = called.pop("context_kv", ())
        idle += [(slot.name, "the commit is deferred, so nothing is written at once") for slot in at_once]
    calls = {
        seam: _load(called[seam][0].provided, setup) if seam in called else getattr(stages, seam) for seam in SEAMS
    }
    return Stages(**calls, slots=tuple((seam, called[seam][0].name) for seam in called), idle=tuple(idle))


def _load(provided: Provided, setup: SlotSetup) -> Any:
    if setup.backend is Backend.REFERENCE:
        return registry.load_reference(provided)
    return registry.load_implementation(provided)(setup)
