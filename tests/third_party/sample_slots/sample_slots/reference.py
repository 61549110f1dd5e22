"""Greedy accept in plain torch, a request at a time: slow, and obviously right."""

from torch import Tensor


def greedy_accept(
    *,
    candidates: Tensor,
    target_logits: Tensor,
    seq_lens: Tensor,
    verify_lens: Tensor,
    out_correct_lens: Tensor,
    out_bonus_tokens: Tensor,
    out_commit_lens: Tensor,
    out_new_seq_lens: Tensor,
    out_tokens: Tensor,
) -> None:
    out_tokens.zero_()
    for request, drafts in enumerate(candidates.tolist()):
        length, rows = int(verify_lens[request]), len(drafts)
        winners = [winner(row) for row in target_logits[request * rows : request * rows + length]]
        correct = 0
        while correct + 1 < length and drafts[correct + 1] == winners[correct]:
            correct += 1
        commit = winners[: correct + 1]  # an accepted draft is the winner before it
        out_correct_lens[request] = correct
        out_bonus_tokens[request] = commit[-1] if commit else 0
        out_commit_lens[request] = len(commit)
        out_new_seq_lens[request] = int(seq_lens[request]) + len(commit)
        for column, token in enumerate(commit):
            out_tokens[request, column] = token


def winner(row: Tensor) -> int:
    """The lowest id with the greatest logit; NaN never wins, and a row of nothing has id 0."""
    known = row[~row.isnan()]
    best = known.max() if len(known) else row.new_tensor(-float("inf"))
    return int((row == best).nonzero()[0]) if best > -float("inf") else 0
