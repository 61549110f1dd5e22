"""The specs that SGLang imports when it serves one of the families: one for targets, one for drafts.

Neither covers a step yet (``max_rows`` 0): the target's spec decides before weights load whether the plan
stands and puts it in the log, the draft's brings the slot of the seam ``draft_block`` into the draft's graph.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sgl_mega_plugin.contract import Active, Plan
from sgl_mega_plugin.contract.errors import SlotError
from sgl_mega_plugin.engine import draft_sampler, entry, families, host, planning, version
from sgl_mega_plugin.engine.api import BuildContext, Feature, MegakernelSpec, Numerics, NumericsKind, Requirements
from sgl_mega_plugin.engine.fold import install
from sgl_mega_plugin.engine.fold.reasons import folds
from sgl_mega_plugin.engine.log import watch
from sgl_mega_plugin.engine.log.read import PREFIX, off_line, on_line
from sgl_mega_plugin.plan import engine_environment
from sgl_mega_plugin.registry import load_implementation
from sgl_mega_plugin.switch import MASTER_VARIABLES, master_switch

logger = logging.getLogger(__name__)

ISAS = frozenset({"sm_90", "sm_100", "sm_103", "sm_120"})
ALGORITHM = "DSPARK"


@dataclass(frozen=True)
class Built:
    """What a build returns: no step of its own, for a draft perhaps a sampler."""

    text: str
    draft_sampler: draft_sampler.DraftSampler | None = None
    widths: tuple[int, ...] = ()

    def summary(self) -> str:
        return self.text

    def plan(self, input_ids: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        """No step is covered, whatever the batch."""

    def forward(self, step: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's own forward. SGLang calls this for planned steps only, and there are none."""
        return original(*args, **kwargs)


def config_disable_reasons(cfg: Any, hf_config: Any) -> list[str]:
    """Why this server cannot start; empty when it can.

    SGLang calls this once, with the flag, before weights load and before it starts its workers.
    So here the engine's switches are set as the plan says: the workers inherit the environment, and
    nothing has read them yet.
    """
    reasons = version.reasons() + entry.failures
    if reasons:
        return reasons  # what else is wrong cannot be told on an installation that is not understood
    launch = host.from_settings(cfg, hf_config)
    reasons += _model_type_reasons(launch)
    reasons += [entry.conflicts[name] for name in launch.draft_architectures if name in entry.conflicts]
    if launch.algorithm != ALGORITHM:
        reasons.append(
            f"speculative algorithm {launch.algorithm!r} is not {ALGORITHM!r}: sgl-mega-plugin shortens DSpark steps; "
            f"add --speculative-algorithm {ALGORITHM} and --speculative-draft-model-path, or leave the flag out"
        )
    try:
        plan = planning.plan_for(launch, os.environ)
    except SlotError as error:
        return [*reasons, str(error)]
    reasons += plan.refusals()
    if not reasons:
        os.environ.update(engine_environment(plan, os.environ))
    return reasons


def _model_type_reasons(launch: host.Launch) -> list[str]:
    """Why a model of this type has no spec though its architecture has one; empty when it has."""
    return [
        f"model type {launch.host.model_type!r} of {name!r} is not served, only {' or '.join(map(repr, served))}: "
        "leave the flag out"
        for name, served in families.BUNDLED_TARGETS.items()
        if name in launch.target_architectures and launch.host.model_type not in served
    ]


def draft_model_reasons(model: Any, hf_config: Any) -> list[str]:
    """Why the loaded draft cannot run the slot that the user named; empty when it can, or none is named."""
    slot = _draft_slot(_worker_plan())
    if slot is None or not slot.named:
        return []
    return [f"slot {slot.name!r}: {reason}" for reason in draft_sampler.model_reasons(model)]


def build_target(model: Any, hf_config: Any, ctx: BuildContext) -> Built:
    """Log the plan, once a server, and have SGLang fold its steps. The target's forward stays as it is."""
    plan = _worker_plan()
    if _is_first_rank():
        for line in plan_lines(plan, mastered=master_switch(os.environ)):
            logger.info("%s%s", PREFIX, line)
        watch.install(plan)
    if folds(plan):
        install.install(plan)
    return Built(text=f"slots on: {_names(plan) or 'none'}")


def build_draft(model: Any, hf_config: Any, ctx: BuildContext) -> Built:
    """The slot of the seam ``draft_block`` as a draft sampler, where the plan has one and the draft fits."""
    install.prove()
    plan = _worker_plan()
    slot = _draft_slot(plan)
    if slot is None:
        return Built(text="no slot drafts")
    reasons = draft_sampler.model_reasons(model)
    if reasons:
        logger.info("sgl-mega-plugin: slot %r is left out: %s", slot.name, "; ".join(reasons))
        return Built(text=f"slot {slot.name!r} does not fit the draft")
    sampler = draft_sampler.DraftSampler(
        model=model,
        slot_name=slot.name,
        implementation=load_implementation(slot.provided),
        named=slot.named,
        max_batch=slot.provided.slot.requires.max_batch,
        head=_head_slot(plan),
    )
    return Built(text=f"slot {slot.name!r} drafts", draft_sampler=sampler)


def plan_lines(plan: Plan, *, mastered: bool) -> list[str]:
    """The plan in words: every active slot, then what is left out though it was to be expected, with its reasons.

    That is a default slot, one of the engine's that the list removes, and with the master switch on (``mastered``)
    each of its sixteen.
    """
    lines = [on_line(entry.name, entry.because) for entry in plan.active]
    expected = set(MASTER_VARIABLES) if mastered else set()
    expected |= {variable for variable, value in plan.engine_variables.items() if value == "0"}
    lines += [
        off_line(entry.name, entry.reasons)
        for entry in plan.inactive
        if entry.provided.slot.default or entry.provided.slot.engine_switch in expected
    ]
    return lines or ["no slot is on"]


def _worker_plan() -> Plan:
    return planning.plan_for(host.from_worker(), os.environ)


def _draft_slot(plan: Plan) -> Active | None:
    """The slot that drafts: the preferred one of its seam."""
    return next(iter(plan.serving(planning.DRAFT_BLOCK)), None)


def _head_slot(plan: Plan) -> draft_sampler.HeadSlot | None:
    """The slot of the draft's base logits."""
    slot = next(iter(plan.serving(planning.DRAFT_LOGITS)), None)
    return None if slot is None else draft_sampler.HeadSlot(slot.name, load_implementation(slot.provided), slot.named)


def _names(plan: Plan) -> str:
    return ", ".join(entry.name for entry in plan.active)


def _is_first_rank() -> bool:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank) == 0


_REQUIRES = Requirements(
    isas=ISAS,
    tp_sizes=frozenset(),  # any: what a slot cannot do under tensor parallelism, the plan leaves out
    dtypes=frozenset({"bfloat16", "float16"}),
)

TARGET = MegakernelSpec(
    name="sgl-mega-plugin target",
    requires=_REQUIRES,
    features=frozenset({Feature.SPECULATIVE_DECODING}),
    numerics=Numerics(kind=NumericsKind.BITWISE),  # the target's forward is SGLang's own
    max_rows=0,
    build=build_target,
    api_version=version.API_VERSION,
    config_disable_reasons=config_disable_reasons,
)

DRAFT = MegakernelSpec(
    name="sgl-mega-plugin draft",
    requires=_REQUIRES,
    features=frozenset({Feature.SPECULATIVE_DECODING}),
    numerics=Numerics(kind=NumericsKind.BITWISE),  # of the draft's forward; a slot states its own
    max_rows=0,
    build=build_draft,
    api_version=version.API_VERSION,
    model_disable_reasons=draft_model_reasons,
)
