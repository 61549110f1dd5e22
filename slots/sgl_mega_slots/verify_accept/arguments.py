"""The checks that every accept makes of the arguments its seams share. Called by the launches of this stage."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_plugin.contract import SlotSetup
from sgl_mega_slots.common.checks import FLOAT_DTYPES, INDEX_DTYPES, require_batch, require_setup, require_tensor


def require_accept(
    setup: SlotSetup,
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
) -> int:
    """Return B; raises ValueError for the first argument whose shape, dtype, device or stride is not the seam's."""
    batch, rows, vocab = candidates.shape[0], setup.gamma + 1, setup.vocab_size
    require_batch("candidates", batch, setup.max_batch)
    require_setup("candidates", candidates.shape[1], rows, "T")
    require_setup("target_logits", target_logits.shape[-1], vocab, "V")
    device = torch.device(setup.device).type
    for name, value, shape, dtypes in (
        ("candidates", candidates, (batch, rows), (torch.int64,)),
        ("target_logits", target_logits, (batch * rows, vocab), FLOAT_DTYPES),
        ("seq_lens", seq_lens, (batch,), INDEX_DTYPES),
        ("verify_lens", verify_lens, (batch,), (torch.int32,)),
        ("out_correct_lens", out_correct_lens, (batch,), (torch.int32,)),
        ("out_bonus_tokens", out_bonus_tokens, (batch,), (torch.int64,)),
        ("out_commit_lens", out_commit_lens, (batch,), (torch.int32,)),
        ("out_new_seq_lens", out_new_seq_lens, (batch,), (seq_lens.dtype,)),
        ("out_tokens", out_tokens, (batch, rows), (torch.int64,)),
    ):
        require_tensor(name, value, shape=shape, dtypes=dtypes, device=device)
    return batch
