"""Launch of `accept_tail`: checks the arguments, holds the partials, picks the grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_slots.common.checks import require_triton
from sgl_mega_slots.common.options import ENABLE_FP_FUSION
from sgl_mega_slots.verify_accept.accept_tail.kernel import accept_request, row_partials
from sgl_mega_slots.verify_accept.arguments import require_accept


@dataclass(frozen=True)
class AcceptTailLaunch:
    """Sizes of both launches, from V and T alone."""

    block_v: int  # ids a program of the first launch reads
    splits: int
    block_t: int
    block_s: int
    num_warps: int

    @classmethod
    def plan(cls, *, rows: int, vocab: int, block_v: int) -> AcceptTailLaunch:
        splits = triton.cdiv(vocab, block_v)
        return cls(
            block_v=block_v,
            splits=splits,
            block_t=triton.next_power_of_2(rows),
            block_s=triton.next_power_of_2(splits),
            num_warps=max(1, min(4, block_v // 1024)),
        )


# 8 KiB of bf16 a program: four 16-byte loads a thread. Small in the interpreter, so that a small V has splits.
_BLOCK_V = {Backend.KERNEL: 4096, Backend.INTERPRETER: 32}


class AcceptTail:
    """`greedy_accept` as two launches; built once, then capturable."""

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "accept_tail")
        self._setup = setup
        self._rows = setup.gamma + 1
        self.launch = AcceptTailLaunch.plan(rows=self._rows, vocab=setup.vocab_size, block_v=_BLOCK_V[setup.backend])
        partials = setup.max_batch * self._rows * self.launch.splits
        self._values = torch.empty(partials, dtype=torch.float32, device=setup.device)
        self._ids = torch.empty(partials, dtype=torch.int32, device=setup.device)

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
        """See :class:`sgl_mega_plugin.contract.GreedyAccept`.

        Raises:
            ValueError: an argument's shape, dtype, device or stride is not the seam's.
        """
        batch = require_accept(
            self._setup,
            candidates=candidates,
            target_logits=target_logits,
            seq_lens=seq_lens,
            verify_lens=verify_lens,
            out_correct_lens=out_correct_lens,
            out_bonus_tokens=out_bonus_tokens,
            out_commit_lens=out_commit_lens,
            out_new_seq_lens=out_new_seq_lens,
            out_tokens=out_tokens,
        )
        rows, vocab, launch = self._rows, self._setup.vocab_size, self.launch

        row_partials[(batch * rows, launch.splits)](
            target_logits,
            target_logits.stride(0),
            verify_lens,
            self._values,
            self._ids,
            rows,
            vocab,
            launch.splits,
            BLOCK_V=launch.block_v,
            num_warps=launch.num_warps,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
        accept_request[(batch,)](
            candidates,
            candidates.stride(0),
            seq_lens,
            verify_lens,
            self._values,
            self._ids,
            out_correct_lens,
            out_bonus_tokens,
            out_commit_lens,
            out_new_seq_lens,
            out_tokens,
            out_tokens.stride(0),
            rows,
            launch.splits,
            BLOCK_T=launch.block_t,
            BLOCK_S=launch.block_s,
            num_warps=1,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
