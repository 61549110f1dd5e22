"""The launch of `scan_accept`: built once for the sizes of a server, then called every step."""

import triton
from torch import Tensor

from sample_slots.kernel import scan_accept
from sgl_mega_plugin.contract import SlotSetup

BLOCK_V = 4096


class ScanAccept:
    """Greedy accept in one launch. It keeps nothing between calls."""

    def __init__(self, setup: SlotSetup) -> None:
        self._vocab = setup.vocab_size
        self._rows = setup.gamma + 1
        self._tiles = triton.cdiv(setup.vocab_size, BLOCK_V)

    def __call__(
        self,
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
        batch = len(candidates)
        wanted = (batch * self._rows, self._vocab)
        if tuple(target_logits.shape) != wanted or target_logits.stride(1) != 1:
            raise ValueError(
                f"target_logits: shape {tuple(target_logits.shape)}, strides {target_logits.stride()}; "
                f"must be {wanted} with a contiguous last axis"
            )
        scan_accept[(batch,)](
            candidates,
            candidates.stride(0),
            target_logits,
            target_logits.stride(0),
            seq_lens,
            verify_lens,
            out_correct_lens,
            out_bonus_tokens,
            out_commit_lens,
            out_new_seq_lens,
            out_tokens,
            out_tokens.stride(0),
            self._vocab,
            T=self._rows,
            TILES=self._tiles,
            BLOCK_V=BLOCK_V,
        )
