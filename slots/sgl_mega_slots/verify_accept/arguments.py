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
    seq_lens: Tensor,
    verify_lens: Tensor,
    simulated_correct: Tensor | None,
    out_correct_lens: Tensor,
    out_bonus_tokens: Tensor,
    out_commit_lens: Tensor,
    out_new_seq_lens: Tensor,
    out_tokens: Tensor,
) -> int:
    """Return B; raises ValueError for the first argument whose shape, dtype, device or stride is not the seam's."""
    batch, rows = candidates.shape[0], setup.gamma + 1
    require_batch("candidates", batch, setup.max_batch)
    require_setup("candidates", candidates.shape[1], rows, "T")
    device = torch.device(setup.device).type
    for name, value, shape, dtypes in (
        ("candidates", candidates, (batch, rows), (torch.int64,)),
        ("seq_lens", seq_lens, (batch,), INDEX_DTYPES),
        ("verify_lens", verify_lens, (batch,), (torch.int32,)),
        ("out_correct_lens", out_correct_lens, (batch,), (torch.int32,)),
        ("out_bonus_tokens", out_bonus_tokens, (batch,), (torch.int64,)),
        ("out_commit_lens", out_commit_lens, (batch,), (torch.int32,)),
        ("out_new_seq_lens", out_new_seq_lens, (batch,), (seq_lens.dtype,)),
        ("out_tokens", out_tokens, (batch, rows), (torch.int64,)),
    ):
        require_tensor(name, value, shape=shape, dtypes=dtypes, device=device)
    if simulated_correct is not None:
        require_tensor("simulated_correct", simulated_correct, shape=(1,), dtypes=INDEX_DTYPES, device=device)
    return batch


def require_logits(setup: SlotSetup, target_logits: Tensor, batch: int) -> None:
    """Raise ValueError unless the target's logits are [B * T, V] of the setup."""
    require_setup("target_logits", target_logits.shape[-1], setup.vocab_size, "V")
    shape = (batch * (setup.gamma + 1), setup.vocab_size)
    device = torch.device(setup.device).type
    require_tensor("target_logits", target_logits, shape=shape, dtypes=FLOAT_DTYPES, device=device)
