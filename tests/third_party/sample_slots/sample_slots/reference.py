"""Greedy accept in plain torch, a request at a time: slow, and obviously right."""

from torch import Tensor


def greedy_accept(
    *,
    candidates: Tensor,
    target_logits: Tensor | None,
    target_tokens: Tensor | None,
    seq_lens: Tensor,
    verify_lens: Tensor,
    simulated_correct: Tensor | None,
    out_correct_lens: Tensor,
    out_bonus_tokens: Tensor,
    out_commit_lens: Tensor,
    out_new_seq_lens: Tensor,
    out_tokens: Tensor,
) -> None:
    out_tokens.zero_()
    vocab = 1 << 31 if target_logits is None else target_logits.shape[1]
    for request, drafts in enumerate(candidates.tolist()):
        length, rows = int(verify_lens[request]), len(drafts)
        if target_logits is not None:
            winners = [winner(row) for row in target_logits[request * rows : request * rows + length]]
        else:
            winners = [token if 0 <= token < vocab else 0 for token in target_tokens[request, :length].tolist()]
        correct = 0
        while correct + 1 < length and drafts[correct + 1] == winners[correct]:
            correct += 1
        bonus = winners[correct : correct + 1]
        if simulated_correct is not None:
            correct = max(min(int(simulated_correct), length - 1), 0)
        accepted = [draft if 0 <= draft < vocab else 0 for draft in drafts[1 : correct + 1]]
        commit = accepted + bonus if length else []
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
