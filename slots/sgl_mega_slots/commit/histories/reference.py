"""`history_commit` in plain torch: the definition that the kernel is compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def history_commit(*, tokens: Tensor, req_pool_indices: Tensor, commit_lens: Tensor, out_histories: Tensor) -> None:
    """See :class:`sgl_mega_plugin.contract.HistoryCommit`.

    SGLang 0.5.23 has no bound on table rows and lengths, and skips padding by the verify lengths, not by a commit
    length of 0; the same rows are left alone.
    """
    pool_rows, ids = out_histories.shape
    rows = req_pool_indices.long()
    commit = commit_lens.long().clamp(max=tokens.shape[1])
    (kept,) = torch.where((commit > 0) & (rows >= 0) & (rows < pool_rows))
    row = rows[kept]
    both = torch.cat([out_histories[row], tokens[kept].to(out_histories.dtype)], dim=1)
    last = commit[kept, None] + torch.arange(ids, device=tokens.device)
    out_histories[row] = both.gather(1, last)
