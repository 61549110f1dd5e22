"""The specs that SGLang imports when it serves one of the families: one for targets, one for drafts.

The target's spec decides before weights load whether the plan stands, puts it in the log, and covers verify steps
where a slot of the seam ``target_forward`` is on; the draft's brings the slots of ``draft_forward`` and
``draft_block`` into its graph.
``max_rows`` is 0 in both, since SGLang takes more as a promise to build something: a build states its own widths.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sgl_mega_plugin.contract import Active, Backend, Plan, SlotSetup
from sgl_mega_plugin.contract.errors import SlotError
from sgl_mega_plugin.engine import entry, families, host, planning, version
from sgl_mega_plugin.engine.api import BuildContext, Feature, MegakernelSpec, Numerics, NumericsKind, Requirements
from sgl_mega_plugin.engine.draft import block_forward, sampler
from sgl_mega_plugin.engine.draft.reasons import DRAFT_FORWARD
from sgl_mega_plugin.engine.fold import install
from sgl_mega_plugin.engine.fold.reasons import folds
from sgl_mega_plugin.engine.log import watch
from sgl_mega_plugin.engine.log.read import PREFIX, off_line, on_line
from sgl_mega_plugin.engine.target.model_checks import model_reasons as target_model_reasons
from sgl_mega_plugin.engine.target.reasons import TARGET_FORWARD
from sgl_mega_plugin.engine.target.verify_forward import NOT_COVERED, VerifyForward
from sgl_mega_plugin.plan import engine_environment
from sgl_mega_plugin.registry import load_implementation
from sgl_mega_plugin.switch import MASTER_VARIABLES, master_switch

logger = logging.getLogger(__name__)

ISAS = frozenset({"sm_90", "sm_100", "sm_103", "sm_120"})
ALGORITHM = "DSPARK"
#: Largest relative error that a slot of a model's forward may state. Without such a slot the forward is SGLang's.
FORWARD_TOLERANCE = 2.0**-5


@dataclass(frozen=True)
class Built:
    """What a build returns: no step of its own, for a draft perhaps a sampler."""

    text: str
    draft_sampler: sampler.DraftSampler | None = None
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
    """Why the loaded draft cannot run the slots that the user named; empty when it can, or none is named."""
    plan = _worker_plan()
    checks = ((_block_slot(plan), block_forward.model_reasons), (_draft_slot(plan), sampler.model_reasons))
    named = [(slot, reasons) for slot, reasons in checks if slot is not None and slot.named]
    return [f"slot {slot.name!r}: {reason}" for slot, reasons in named for reason in reasons(model)]


def target_forward_refusals(model: Any, hf_config: Any) -> list[str]:
    """Why the loaded target cannot run the slot of its forward that the user named; empty when it can, or none is."""
    slot = _forward_slot(_worker_plan())
    if slot is None or not slot.named:
        return []
    return [f"slot {slot.name!r}: {reason}" for reason in target_model_reasons(model)]


def build_target(model: Any, hf_config: Any, ctx: BuildContext) -> Built | VerifyForward:
    """Log the plan, once a server, have SGLang fold its steps, and put a slot in place of the verify forward.

    Without a slot of the seam ``target_forward`` the target's forward stays as it is.
    """
    plan = _worker_plan()
    if _is_first_rank():
        for line in plan_lines(plan, mastered=master_switch(os.environ)):
            logger.info("%s%s", PREFIX, line)
        watch.install(plan)
    if folds(plan):
        install.install(plan)
    slot = _forward_slot(plan)
    if slot is None:
        return Built(text=f"slots on: {_names(plan) or 'none'}")
    if _left_out(slot, target_model_reasons(model)):
        return Built(text=f"slot {slot.name!r} does not fit the target")
    return _verify_forward(model, slot, plan.host.max_batch, ctx)


def _left_out(slot: Active, reasons: list[str]) -> bool:
    """Whether a slot does not fit the loaded model; then the log says why. One that was named has been refused."""
    if reasons:
        logger.info("sgl-mega-plugin: slot %r is left out: %s", slot.name, "; ".join(reasons))
    return bool(reasons)


def _verify_forward(model: Any, slot: Active, max_batch: int | None, ctx: BuildContext) -> VerifyForward:
    """The slot built for this server's verify steps; ``max_batch``: most requests that run at a time."""
    requests = _requests(slot, max_batch)
    setup = SlotSetup(
        backend=Backend.KERNEL,
        device=str(model.model.norm.weight.device),
        max_batch=requests,
        gamma=ctx.tokens_per_request - 1,
        vocab_size=model.logits_processor.vocab_size,
    )
    built = VerifyForward(
        model=model,
        slot=load_implementation(slot.provided)(setup),
        slot_name=slot.name,
        tokens=ctx.tokens_per_request,
        requests=requests,
    )
    logger.info("sgl-mega-plugin: %s; SGLang's: %s", built.summary(), NOT_COVERED)
    return built


def _requests(slot: Active, max_batch: int | None) -> int:
    """Most requests that a slot serves here; ``max_batch``: most that run at a time."""
    sizes = (slot.provided.slot.requires.max_batch, max_batch)
    return min((size for size in sizes if size is not None), default=1)


def build_draft(model: Any, hf_config: Any, ctx: BuildContext) -> Built | block_forward.BlockForward:
    """The slot of the seam ``draft_forward`` in place of the draft's forward, and that of ``draft_block`` as a draft
    sampler, where the plan has them and the draft fits.
    """
    install.prove()
    plan = _worker_plan()
    drafts, runs = _draft_slot(plan), _block_slot(plan)
    drawn = None if drafts is None or _left_out(drafts, sampler.model_reasons(model)) else _sampler(model, drafts, plan)
    if runs is not None and not _left_out(runs, block_forward.model_reasons(model)):
        return _block_forward(model, runs, plan.host.max_batch, drawn, ctx)
    if drafts is None:
        return Built(text="no slot drafts")
    text = f"slot {drafts.name!r} " + ("drafts" if drawn is not None else "does not fit the draft")
    return Built(text=text, draft_sampler=drawn)


def _sampler(model: Any, slot: Active, plan: Plan) -> sampler.DraftSampler:
    return sampler.DraftSampler(
        model=model,
        slot_name=slot.name,
        implementation=load_implementation(slot.provided),
        named=slot.named,
        max_batch=slot.provided.slot.requires.max_batch,
        head=_head_slot(plan),
    )


def _block_forward(
    model: Any, slot: Active, max_batch: int | None, drawn: sampler.DraftSampler | None, ctx: BuildContext
) -> block_forward.BlockForward:
    """The slot built for this server's blocks: a row for each token that is drafted, and perhaps one for the anchor.

    How many tokens that is, the server says; the draft's configuration may say otherwise.
    """
    requests, gamma = _requests(slot, max_batch), ctx.tokens_per_request - 1
    setup = SlotSetup(
        backend=Backend.KERNEL,
        device=str(model.norm.weight.device),
        max_batch=requests,
        gamma=gamma,
        vocab_size=model.markov_head.vocab_size,
    )
    built = block_forward.BlockForward(
        model=model,
        slot=load_implementation(slot.provided)(setup),
        slot_name=slot.name,
        tokens=gamma if model.sample_from_anchor else gamma + 1,
        requests=requests,
        draft_sampler=drawn,
    )
    logger.info("sgl-mega-plugin: %s; SGLang's: larger batches, embeddings as inputs", built.summary())
    return built


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


def _block_slot(plan: Plan) -> Active | None:
    """The slot that runs the draft's forward."""
    return next(iter(plan.serving(DRAFT_FORWARD)), None)


def _forward_slot(plan: Plan) -> Active | None:
    """The slot that runs the target's verify forward."""
    return next(iter(plan.serving(TARGET_FORWARD)), None)


def _head_slot(plan: Plan) -> sampler.HeadSlot | None:
    """The slot of the draft's base logits."""
    slot = next(iter(plan.serving(planning.DRAFT_LOGITS)), None)
    return None if slot is None else sampler.HeadSlot(slot.name, load_implementation(slot.provided), slot.named)


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
    numerics=Numerics(kind=NumericsKind.TOLERANCE, tolerances={TARGET_FORWARD: FORWARD_TOLERANCE}),
    max_rows=0,
    build=build_target,
    api_version=version.API_VERSION,
    model_disable_reasons=target_forward_refusals,
    config_disable_reasons=config_disable_reasons,
)

DRAFT = MegakernelSpec(
    name="sgl-mega-plugin draft",
    requires=_REQUIRES,
    features=frozenset({Feature.SPECULATIVE_DECODING}),
    numerics=Numerics(kind=NumericsKind.TOLERANCE, tolerances={DRAFT_FORWARD: FORWARD_TOLERANCE}),
    max_rows=0,
    build=build_draft,
    api_version=version.API_VERSION,
    model_disable_reasons=draft_model_reasons,
)
