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
    Backend,
    ContextKv,
    DraftBlock,
    GreedyAccept,
    Plan,
    Provided,
    SampledAccept,
    SlotSetup,
    StepInputs,
)
from sgl_mega_plugin.embedded import stages


@dataclass(frozen=True)
class Stages:
    """One callable a seam, and the slots among them: (seam, slot name) pairs."""

    draft_block: DraftBlock
    greedy_accept: GreedyAccept
    sampled_accept: SampledAccept
    step_inputs: StepInputs
    context_kv: ContextKv
    slots: tuple[tuple[str, str], ...] = ()


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
    calls: dict[str, Any] = {}
    slots = []
    for seam in SEAMS:
        serving = plan.serving(seam)
        if serving:
            calls[seam] = _load(serving[0].provided, setup)
            slots.append((seam, serving[0].name))
        else:
            calls[seam] = getattr(stages, seam)
    return Stages(**calls, slots=tuple(slots))


def _load(provided: Provided, setup: SlotSetup) -> Any:
    if setup.backend is Backend.REFERENCE:
        return registry.load_reference(provided)
    return registry.load_implementation(provided)(setup)
