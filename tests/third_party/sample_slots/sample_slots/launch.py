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
        batch = len(candidates)
        if target_tokens is not None:
            target, wanted, vocab = target_tokens, (batch, self._rows), 1 << 31
        elif target_logits is not None:
            target, wanted, vocab = target_logits, (batch * self._rows, self._vocab), self._vocab
        else:
            raise ValueError("target_logits, target_tokens: one of them must be given")
        if tuple(target.shape) != wanted or target.stride(1) != 1:
            raise ValueError(
                f"target: shape {tuple(target.shape)}, strides {target.stride()}; "
                f"must be {wanted} with a contiguous last axis"
            )
        scan_accept[(batch,)](
            candidates,
            candidates.stride(0),
            target,
            target.stride(0),
            seq_lens,
            verify_lens,
            seq_lens if simulated_correct is None else simulated_correct,
            out_correct_lens,
            out_bonus_tokens,
            out_commit_lens,
            out_new_seq_lens,
            out_tokens,
            out_tokens.stride(0),
            vocab,
            HAS_TOKENS=target_tokens is not None,
            SIMULATED=simulated_correct is not None,
            T=self._rows,
            TILES=self._tiles,
            BLOCK_V=BLOCK_V,
        )
