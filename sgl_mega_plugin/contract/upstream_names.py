"""Slot names of NVIDIA's DeepSeek-V4.1 kernel set, so that a copied slot list gets a clear answer.

Only the names and their default or opt-in state are public; ``about`` reads the name and
claims nothing beyond it. A name that a slot here provides resolves to that slot instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sgl_mega_plugin.contract.slot import Record


class UpstreamName(Record):
    """One name of that kernel set."""

    name: str
    about: str  # what the name suggests
    default: bool = True  # there; False is opt-in

    def describe(self) -> str:
        """One sentence part for an error message or a table."""
        state = "on by default there" if self.default else "opt-in there"
        return f"a slot of NVIDIA's DeepSeek-V4.1 kernel set ({state}; by its name: {self.about})"


_DEFAULT = {
    "hop_a": "first hop of an exchange between GPUs",
    "moe": "mixture-of-experts layer",
    "gate": "expert gate",
    "attn": "attention",
    "embed": "token embedding",
    "two_shot": "two-shot all-reduce",
    "markov": "Markov correction of the draft block",
    "draft_lm_head": "the draft's vocabulary projection",
    "aux_mean_stats": "mean statistics of auxiliary hidden states",
    "gate_wide": "expert gate, wide variant",
    "shared_ll": "shared expert, low-latency variant",
    "hop_a_batch2": "first hop of an exchange, batch of two",
    "engram": "n-gram memory lookup",
    "attn_qkv_a": "first QKV projection of attention",
    "attn_qkv_a_bf16": "first QKV projection of attention in bf16",
    "index_q_mxfp8_in": "indexer query with MXFP8 input",
    "attn_indexer": "sparse-attention indexer",
    "hc_prenorm": "norm before hyper-connections",
    "hop_b": "second hop of an exchange between GPUs",
    "hop_b_wide": "second hop of an exchange, wide variant",
    "early_trigger": "earlier trigger of a dependent launch",
    "hop_b_start_trigger": "trigger at the start of the second hop",
    "draft": "the draft model's step",
    "draft_moe": "mixture-of-experts layer of the draft",
    "draft_gate": "expert gate of the draft",
    "draft_tail": "tail of the draft's step",
    "draft_post": "what follows a layer of the draft",
    "draft_seam": "joint between parts of the draft's step",
    "draft_attn": "attention of the draft",
    "draft_qfront": "front of the draft's query path",
    "draft_wo_a": "first output projection of the draft's attention",
    "draft_swapab": "draft GEMM with its operands swapped",
    "draft_qkv_a": "first QKV projection of the draft",
    "draft_prenorm": "norm before a layer of the draft",
    "draft_qkv_a_ll": "first QKV projection of the draft, low-latency variant",
    "draft_wo_b_ll": "second output projection of the draft, low-latency variant",
    "sched_ahead": "scheduling ahead of the step",
    "req_pos_once": "request positions computed once a step",
    "kv_before_wait": "KV work before a dependency wait",
}
_OPT_IN = {
    "target_lm_head": "the target's vocabulary projection",
    "hop_b_quad_trigger": "fourfold trigger in the second hop",
    "lm_head_pinned_tactic": "vocabulary projection with a fixed GEMM tactic",
}

#: The 42 names in their published order.
UPSTREAM_NAMES: Mapping[str, UpstreamName] = MappingProxyType(
    {name: UpstreamName(name=name, about=about) for name, about in _DEFAULT.items()}
    | {name: UpstreamName(name=name, about=about, default=False) for name, about in _OPT_IN.items()}
)
