"""SGLang's DSpark worker with the fold: a subclass that adds one epilogue and decides a step's part in it.

The subclass is made at run time, for the base is SGLang's. It overrides four methods and reads the worker's parts by
the names that ``install`` has checked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from sgl_mega_plugin.contract import Backend, Plan, SlotSetup
from sgl_mega_plugin.engine.fold.draft_kv import NONE, bundle_of, draft_kv
from sgl_mega_plugin.engine.fold.eligible import is_greedy_step, serves_step, wants_nothing_else
from sgl_mega_plugin.engine.fold.epilogue import Calls, DraftSide, Noise, VerifyEpilogue
from sgl_mega_plugin.engine.fold.one_graph import keeping_graphs
from sgl_mega_plugin.engine.fold.reasons import SEAMS, STEP_INPUTS
from sgl_mega_plugin.engine.fold.steady import SteadyStep, steady_reasons
from sgl_mega_plugin.registry import load_implementation

logger = logging.getLogger(__name__)


@dataclass
class Proof:
    """What shows at start that SGLang runs our worker: set by it, read by the draft's build."""

    constructed: bool = False


def worker_class(base: type, plan: Plan, proof: Proof) -> type:
    """A subclass of SGLang's ``DSparkWorkerV2`` whose steps are folded as the plan says."""

    class FoldedDSparkWorker(base):  # type: ignore[misc]
        """See the module."""

        _sgl_mega_epilogue: VerifyEpilogue | None = None
        _sgl_mega_steady: SteadyStep | None = None
        _sgl_mega_sampler: Any = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            proof.constructed = True
            self._sgl_mega_kept = ExitStack()
            super().__init__(*args, **kwargs)

        def init_attention_backends(self) -> None:
            super().init_attention_backends()
            reasons = worker_reasons(self)
            if reasons:
                _leave_out(plan, reasons)
                return
            attach(self, plan)
            # Both runners capture between here and the end of init_cuda_graphs.
            self._sgl_mega_kept.enter_context(keeping_graphs())

        def _maybe_build_draft_sampler(self) -> Any:
            if self._sgl_mega_sampler is None:
                self._sgl_mega_sampler = super()._maybe_build_draft_sampler()
            return self._sgl_mega_sampler

        def init_cuda_graphs(self) -> None:
            super().init_cuda_graphs()
            self._sgl_mega_kept.close()
            epilogue = self._sgl_mega_epilogue
            if epilogue is not None:
                check_captured(self, epilogue)
                self._sgl_mega_steady = _steady(self, epilogue, plan)

        def _forward_decode(
            self, batch: Any, on_publish: Any, grammar_barrier: Any = None, coordination_plan: Any = None
        ) -> Any:
            epilogue, steady = self._sgl_mega_epilogue, self._sgl_mega_steady
            if epilogue is None or batch.forward_mode.is_idle() or batch.spec_info is None:
                return super()._forward_decode(batch, on_publish, grammar_barrier, coordination_plan)
            simulated, filters = self._simulated_correct_len is not None, epilogue.filters
            epilogue.sampled_step = epilogue.serves_sampled and serves_step(
                batch, simulated=simulated, filtered=filters is not None
            )
            if filters is not None:
                filters.stage(batch.sampling_info, len(batch.seq_lens))
            if steady is not None and coordination_plan is None and steady.serves(len(batch.seq_lens)):
                greedy = is_greedy_step(batch)
                if (greedy or epilogue.sampled_step) and wants_nothing_else(batch):
                    return steady.run(batch, on_publish, greedy=greedy)
            return super()._forward_decode(batch, on_publish, grammar_barrier, coordination_plan)

        def _sampling_graph_eligible(self, **kwargs: Any) -> bool:
            epilogue = self._sgl_mega_epilogue
            return super()._sampling_graph_eligible(**kwargs) if epilogue is None else epilogue.sampled_armed

    return FoldedDSparkWorker


def worker_reasons(worker: Any) -> list[str]:
    """Why this worker's steps cannot be folded; empty when they can. Settings alone are in ``reasons``."""
    if not worker._hosts_draft:
        return ["this rank has no draft"]
    reasons = []
    if worker._verify_epilogue is not None:
        reasons.append("SGLang has an epilogue of its own for this model")
    if worker._verify_planner.mode_value != "static":
        reasons.append(f"verify mode is {worker._verify_planner.mode_value!r}, not 'static'")
    if not worker._decode_graph_allowed:
        reasons.append("decode CUDA graphs are off")
    if worker._draft_is_moe:
        reasons.append("the draft is a mixture of experts, whose context KV has another layout")
    if worker._need_mamba_verify_commit:
        reasons.append("the target keeps recurrent states, which a step commits besides")
    if reasons:
        return reasons
    for name, runner in (("target", worker.model_runner), ("draft", worker.draft_model_runner)):
        if runner.kv_index_translator.reads_are_translated:
            reasons.append(f"the {name}'s KV pool has virtual slots, so cache locations differ between the pools")
    if bundle_of(worker.draft_model, worker.draft_model_runner.token_to_kv_pool) is None:
        reasons.append(NONE)
    return reasons


def attach(worker: Any, plan: Plan) -> None:
    """Build the epilogue and put it where SGLang's worker, its executor and the target's runner look for one."""
    from sglang.srt.speculative.spec_utils import draft_pp_context

    with draft_pp_context(), worker._draft_context():
        sampler = worker._maybe_build_draft_sampler()
    if sampler is None:
        _leave_out(plan, ["SGLang keeps the draft's proposal out of the draft's graph"])
        return
    epilogue = _epilogue(worker, plan, sampler)
    worker._sgl_mega_epilogue = worker._verify_epilogue = worker._sampling_accept_graph = epilogue
    worker._verify_executor.verify_epilogue = epilogue
    worker.model_runner.capture_tail_hooks.append(epilogue.capture_hook)
    worker._proposer.propose = _noting(worker._proposer.propose, epilogue)


def check_captured(worker: Any, epilogue: VerifyEpilogue) -> None:
    """Raise RuntimeError unless every captured verify graph has the epilogue in it."""
    runner = worker.model_runner.decode_cuda_graph_runner
    wanted = set(runner.capture_bs) if runner is not None else set()
    if wanted - epilogue.captured:
        raise RuntimeError(
            f"sgl-mega-plugin: the verify graphs of batch sizes {sorted(wanted - epilogue.captured)} were captured "
            f"without accept and commit; leave their slots out of SGLANG_NVIDIA_MEGAKERNEL_SLOTS"
        )
    logger.info("sgl-mega-plugin: accept, relay and commit are in the verify graphs of batch sizes %s", sorted(wanted))


def _steady(worker: Any, epilogue: VerifyEpilogue, plan: Plan) -> SteadyStep | None:
    """Steady steps of this worker, captured; None, with the reason in the log, where it can have none."""
    reasons = [] if plan.serving(STEP_INPUTS) else [f"no slot of seam {STEP_INPUTS!r} is on"]
    reasons = reasons or steady_reasons(worker)
    if reasons:
        logger.info("sgl-mega-plugin: steps keep their host part: %s", "; ".join(reasons))
        return None
    sampler = worker._sgl_mega_sampler
    steady = SteadyStep(worker, epilogue, sampler, _built(plan, STEP_INPUTS, _setup(worker, sampler)))
    steady.capture()
    logger.info("sgl-mega-plugin: steady steps of batch sizes %s are one graph launch", list(steady.sizes))
    return steady


def _setup(worker: Any, sampler: Any) -> SlotSetup:
    return SlotSetup(
        backend=Backend.KERNEL,
        device=str(sampler.out.device),
        max_batch=sampler.max_bs,
        gamma=worker.verify_num_draft_tokens - 1,
        vocab_size=int(worker.draft_model.lm_head.org_vocab_size),
    )


def _noting(propose: Callable[..., Any], epilogue: VerifyEpilogue) -> Callable[..., Any]:
    """``propose`` that tells the epilogue whether the draft's graph drew this block."""

    def proposing(**kwargs: Any) -> Any:
        proposal = propose(**kwargs)
        epilogue.proposal_folded = proposal.folded
        return proposal

    return proposing


def _epilogue(worker: Any, plan: Plan, sampler: Any) -> VerifyEpilogue:
    from sglang.kernels.ops.speculative.dspark.blockwise_rejection import make_rejection_noise
    from sglang.srt.managers.overlap_utils import FutureRelayBuffers, offer_future_relay_buffers
    from sglang.srt.speculative.dspark_components.dspark_verify import AcceptOuts

    noise = make_rejection_noise(worker.target_worker.random_seed, worker.device)
    setup = _setup(worker, sampler)

    def relay_buffers() -> Any:
        table = worker.model_runner.req_to_token_pool.req_to_token
        buffers = FutureRelayBuffers(req_pool_size=len(table), device=worker.device)
        offer_future_relay_buffers(buffers)
        return buffers

    return VerifyEpilogue(
        calls=_calls(worker, plan, sampler, setup),
        draft=DraftSide(
            step_logits=None if sampler.greedy_draft else sampler.step_logits,
            temperatures=sampler.params.step_temperatures,
        ),
        draft_kv=draft_kv(worker.draft_model, worker.draft_model_runner.token_to_kv_pool),
        noise=Noise(key=noise.key, offset=noise.counter),
        max_batch=setup.max_batch,
        rows=setup.gamma + 1,
        device=setup.device,
        accept_outs=AcceptOuts,
        relay_buffers=relay_buffers,
        simulated_correct_len=worker._simulated_correct_len,
    )


def _calls(worker: Any, plan: Plan, sampler: Any, setup: SlotSetup) -> Calls:
    """The sampled accept where it can serve and acceptance is real; else the greedy one."""
    why = _sampled_reason(worker, sampler)
    samples = why is None and bool(plan.serving("sampled_accept"))
    if why is not None:
        logger.info("sgl-mega-plugin: steps with sampled rows are not accepted by rejection sampling here: %s", why)
    accept = _built(plan, "sampled_accept" if samples else "greedy_accept", setup)
    if accept is None:
        raise RuntimeError(f"sgl-mega-plugin: no slot on accepts greedily, and {why}; add 'accept_tail' to the list")
    return Calls(
        accept=accept,
        samples=samples,
        context_kv=_built(plan, "context_kv", setup),
        relay=_built(plan, "relay", setup),
        cutoffs=_built(plan, "sampling_cutoffs", setup) if samples else None,
    )


def _sampled_reason(worker: Any, sampler: Any) -> str | None:
    """Why sampled rows cannot be accepted in the graph, or None."""
    if worker._simulated_correct_len is not None:
        return "acceptance is simulated, and SGLang accepts greedily then"
    if not sampler.greedy_draft and sampler.step_logits is None:
        return "no slot drafts, and SGLang's sampler keeps its step logits only once its own graph is captured"
    if worker._verify_executor._block_verification:
        return "block verification is in use, which accepts by another rule"
    return None


def _built(plan: Plan, seam: str, setup: SlotSetup) -> Any:
    serving = plan.serving(seam)
    return load_implementation(serving[0].provided)(setup) if serving else None


def _leave_out(plan: Plan, reasons: list[str]) -> None:
    """Log why nothing is folded; refuse if the user named one of the fold's slots."""
    entries = [entry for seam in SEAMS for entry in plan.serving(seam)]
    named = [entry.name for entry in entries if entry.named]
    if named:
        raise RuntimeError(f"slots {named} cannot run here: {'; '.join(reasons)}")
    logger.info("sgl-mega-plugin: slots %s are left out: %s", [entry.name for entry in entries], "; ".join(reasons))
