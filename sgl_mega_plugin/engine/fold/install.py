"""Puts the folding worker where SGLang looks for its DSpark worker, and proves that SGLang took it.

Called while the target's spec is built, which is in the process and before the call that creates the worker. What
is replaced is one name of one module; it is replaced only if everything that ``worker`` reads is there.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from sgl_mega_plugin.contract import Plan
from sgl_mega_plugin.engine.fold.worker import Proof, worker_class

MODULE = "sglang.srt.speculative.dspark_components.dspark_worker_v2"
NAME = "DSparkWorkerV2"
#: Methods of SGLang's worker that the subclass overrides, with the parameters it passes on or relies on.
OVERRIDDEN: dict[str, tuple[str, ...]] = {
    "init_attention_backends": (),
    "init_cuda_graphs": (),
    "_maybe_build_draft_sampler": (),
    "_forward_decode": ("batch", "on_publish", "grammar_barrier", "coordination_plan"),
    "_sampling_graph_eligible": ("batch", "proposal_folded", "sampling_info", "simulate_bonus_sampling_info"),
}
#: What SGLang's worker calls or reads on its epilogue; ours has each.
EPILOGUE_NAMES = frozenset(
    {
        "begin_sim_bonus",
        "begin_static_step",
        "begin_step",
        "capture_hook",
        "deferred_commit",
        "folds_commit",
        "folds_engram_commit",
        "future_relay",
        "note_static_verify",
        "read_accept",
        "read_block_accept_lens",
        "simulate_fold",
    }
)

_proof: Proof | None = None


def install(plan: Plan) -> None:
    """Replace the worker's class in its module. Calling it again replaces it anew, never twice over.

    Raises:
        RuntimeError: SGLang's worker is not as this release's is.
    """
    global _proof
    module = importlib.import_module(MODULE)
    base = getattr(module, NAME)
    base = getattr(base, "_sgl_mega_base", base)
    reasons = signature_reasons(base)
    if reasons:
        raise RuntimeError(f"sgl-mega-plugin cannot fold steps into {MODULE}.{NAME}: {'; '.join(reasons)}")
    _proof = Proof()
    replacement = worker_class(base, plan, _proof)
    replacement._sgl_mega_base = base  # type: ignore[attr-defined]
    setattr(module, NAME, replacement)


def prove() -> None:
    """While the draft's spec is built: raise RuntimeError unless the worker that builds it is ours."""
    if _proof is not None and not _proof.constructed:
        raise RuntimeError(
            f"sgl-mega-plugin replaced {MODULE}.{NAME}, but SGLang made another worker: a copy of the class was taken "
            f"before the plugin ran. Leave the accept and commit slots out of SGLANG_NVIDIA_MEGAKERNEL_SLOTS"
        )


def signature_reasons(base: Any) -> list[str]:
    """How SGLang's worker differs from what the fold was written for; empty where it does not."""
    reasons = []
    for name, wanted_parameters in OVERRIDDEN.items():
        method = getattr(base, name, None)
        if method is None:
            reasons.append(f"it has no {name}()")
            continue
        found = tuple(inspect.signature(method).parameters)[1:]
        if found != wanted_parameters:
            reasons.append(f"{name}() takes {list(found)}, not {list(wanted_parameters)}")
    return reasons
