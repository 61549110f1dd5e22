"""What the fold hooks in SGLang, as data: printed by ``doctor``, listed in docs/engine-hooks.md, checked by a test.

Imports neither torch nor SGLang.
"""

from __future__ import annotations

from sgl_mega_plugin.contract import Record


class Hook(Record):
    """One place of SGLang where the plugin's code runs though the megakernel API does not call it."""

    target: str  # dotted path in SGLang, or the attribute of an object made by it
    does: str
    proof: str  # how a start shows that the place runs ours


_WORKER = "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2"

HOOKS = (
    Hook(
        target=_WORKER,
        does="the name is bound to a subclass made at run time, while the target's spec is built",
        proof="its methods have the parameters of this release; the draft's build finds the subclass at work",
    ),
    Hook(
        target=f"{_WORKER}.init_attention_backends",
        does="builds the draft's sampler early, and the epilogue for the verify graph",
        proof="SGLang calls it in each start, before it captures",
    ),
    Hook(
        target=f"{_WORKER}._verify_epilogue, ._verify_executor.verify_epilogue, ._sampling_accept_graph",
        does="hold our epilogue, in the place that SGLang leaves empty for every model but DeepSeek-V4.1",
        proof="a test compares every name that SGLang reads of them with ours",
    ),
    Hook(
        target="ModelRunner.capture_tail_hooks of the target",
        does="records accept, relay and commit behind the forward in each verify graph",
        proof="the start stops if a captured batch size has no epilogue",
    ),
    Hook(
        target="torch.cuda.CUDAGraph",
        does="keeps the graphs that SGLang captures, so that a steady step can be one launch of them all",
        proof="replaced only while SGLang captures; a graph that was not kept cannot be joined, and the start stops",
    ),
    Hook(
        target=f"{_WORKER}._proposer.propose",
        does="notes whether the draft's own graph drew the block",
        proof="a sampled step is folded only after it has",
    ),
    Hook(
        target=f"{_WORKER}._forward_decode",
        does="decides on host state whether a step is folded, and whether it is a steady step",
        proof="the log's first-step lines",
    ),
)
