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

from sgl_mega_plugin.contract.seams.commit import ContextKv
from sgl_mega_plugin.contract.seams.draft import DraftBlock
from sgl_mega_plugin.contract.seams.glue import StepInputs
from sgl_mega_plugin.contract.seams.seam import Seam
from sgl_mega_plugin.contract.seams.verify_accept import GreedyAccept, SampledAccept
from sgl_mega_plugin.contract.stage import Stage

__all__ = [
    "PADDING_SLOT",
    "SEAMS",
    "ContextKv",
    "DraftBlock",
    "GreedyAccept",
    "SampledAccept",
    "Seam",
    "StepInputs",
]

#: KV slot that no request owns; padding rows and positions past a request's row use it.
PADDING_SLOT = 0

#: Every seam by name. A slot names one of these; several slots may serve the same one.
SEAMS: dict[str, Seam] = {
    seam.name: seam
    for seam in (
        Seam("draft_block", Stage.DRAFT, DraftBlock),
        Seam("greedy_accept", Stage.VERIFY_ACCEPT, GreedyAccept),
        Seam("sampled_accept", Stage.VERIFY_ACCEPT, SampledAccept),
        Seam("step_inputs", Stage.GLUE, StepInputs),
        Seam("context_kv", Stage.COMMIT, ContextKv),
    )
}
