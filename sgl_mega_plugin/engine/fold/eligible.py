"""Which steps the fold may serve: decided on host state, alike on every rank.

What a slot cannot reproduce, the whole step leaves to SGLang. The rules are SGLang's own: ``fold_eligible`` and
``_sampling_graph_eligible`` in its DSpark worker.
"""

from __future__ import annotations

from typing import Any


def serves_step(batch: Any, *, simulated: bool, filtered: bool) -> bool:
    """Whether a batch with sampled rows can be accepted in the verify graph.

    Args:
        batch: SGLang's ``ScheduleBatch`` of a decode step.
        simulated: SGLang simulates acceptance, which accepts greedily whatever the requests ask for.
        filtered: a slot serves top-k, top-p and min-p.
    """
    info = batch.sampling_info
    if info is None or info.is_all_greedy or not _logits_stand(batch):
        return False
    return simulated or filtered or all(_unfiltered(request.sampling_params) for request in batch.reqs)


def is_greedy_step(batch: Any) -> bool:
    """Whether every row takes the argmax of logits that stand as they are."""
    info = batch.sampling_info
    return (info is None or bool(info.is_all_greedy)) and _logits_stand(batch)


def wants_nothing_else(batch: Any) -> bool:
    """Whether a step's tokens and lengths are all that the scheduler reads of it."""
    info = batch.sampling_info
    return not (
        batch.return_logprob
        or batch.return_hidden_states
        or (info is not None and info.sampling_mask_batch_indices is not None)
    )


def _logits_stand(batch: Any) -> bool:
    """Whether neither a grammar nor a bias, penalty or processor changes the logits."""
    from sglang.srt.speculative.dspark_components.dspark_verify import verify_logits_adjustments_are_noop

    return not batch.has_grammar and bool(verify_logits_adjustments_are_noop(batch.sampling_info))


def _unfiltered(params: Any) -> bool:
    """Whether a request keeps every token: greedy (top_k 1, nothing else matters), or no filter at all."""
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    if params.top_k <= 1:
        return True
    return bool(params.top_k >= TOP_K_ALL and params.top_p == 1.0 and params.min_p <= 0)
