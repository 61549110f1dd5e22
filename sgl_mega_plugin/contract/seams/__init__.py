"""Seams: the typed calls at which a slot replaces the engine.

An adapter (the SGLang binding, the embedded engine, the conformance kit) fills a seam's
arguments; a slot's kernel and its reference both take exactly these. Every argument is
keyword-only. ``out_*`` arguments are written in place; everything else is read only.

Axis letters, here and everywhere: B requests, G draft tokens a request, T = G + 1 verify
rows a request, V vocabulary, R Markov rank, L layers, H KV heads, D head size, P positions
of the RoPE table, S KV slots, Q rows of the request table, C its columns.

A row with ``verify_lens == 0`` is padding: it belongs to a graph larger than the batch.
What a seam leaves in a padding row is said below; it never points at memory of a request.
"""

from __future__ import annotations

from sgl_mega_plugin.contract.seams.commit import ContextKv, HistoryCommit, KvStaging, StagedKv
from sgl_mega_plugin.contract.seams.draft import DraftBlock
from sgl_mega_plugin.contract.seams.forward import DraftForward, TargetForward
from sgl_mega_plugin.contract.seams.glue import AttentionMetadata, Relay, StepInputs, StepParams
from sgl_mega_plugin.contract.seams.head import DraftLogits, TargetArgmax
from sgl_mega_plugin.contract.seams.seam import Seam
from sgl_mega_plugin.contract.seams.verify_accept import GreedyAccept, SampledAccept, SamplingCutoffs
from sgl_mega_plugin.contract.stage import Stage

__all__ = [
    "PADDING_SLOT",
    "SEAMS",
    "AttentionMetadata",
    "ContextKv",
    "DraftBlock",
    "DraftForward",
    "DraftLogits",
    "GreedyAccept",
    "HistoryCommit",
    "KvStaging",
    "Relay",
    "SampledAccept",
    "SamplingCutoffs",
    "Seam",
    "StagedKv",
    "StepInputs",
    "StepParams",
    "TargetArgmax",
    "TargetForward",
]

#: KV slot that no request owns; padding rows and positions past a request's row use it.
PADDING_SLOT = 0

#: Every seam by name. A slot names one of these; several slots may serve the same one.
SEAMS: dict[str, Seam] = {
    seam.name: seam
    for seam in (
        Seam("draft_forward", Stage.DRAFT, DraftForward),
        Seam("draft_block", Stage.DRAFT, DraftBlock),
        Seam("draft_logits", Stage.DRAFT, DraftLogits),
        Seam("greedy_accept", Stage.VERIFY_ACCEPT, GreedyAccept),
        Seam("sampled_accept", Stage.VERIFY_ACCEPT, SampledAccept),
        Seam("sampling_cutoffs", Stage.VERIFY_ACCEPT, SamplingCutoffs),
        Seam("step_inputs", Stage.GLUE, StepInputs),
        Seam("attention_metadata", Stage.GLUE, AttentionMetadata),
        Seam("relay", Stage.GLUE, Relay),
        Seam("step_params", Stage.GLUE, StepParams),
        Seam("context_kv", Stage.COMMIT, ContextKv),
        Seam("kv_staging", Stage.COMMIT, KvStaging),
        Seam("staged_kv", Stage.COMMIT, StagedKv),
        Seam("history_commit", Stage.COMMIT, HistoryCommit),
        Seam("target_forward", Stage.TARGET, TargetForward),
        Seam("target_argmax", Stage.TARGET, TargetArgmax),
    )
}
