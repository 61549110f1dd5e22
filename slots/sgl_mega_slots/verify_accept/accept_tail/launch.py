"""Launches of `accept_tail`: checks the arguments, holds the partials, picks the grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_slots.common.checks import require_tensor, require_triton
from sgl_mega_slots.common.options import ENABLE_FP_FUSION
from sgl_mega_slots.verify_accept.accept_tail.kernel import accept_from_logits, accept_from_tokens
from sgl_mega_slots.verify_accept.arguments import require_accept, require_logits
from sgl_mega_slots.verify_accept.sizes import filling, is_apart, parts_of

#: Least ids a program reads. Small in the interpreter, so that a small V has splits.
_BLOCK_V = {Backend.KERNEL: 4096, Backend.INTERPRETER: 32}
#: Where the GPU is full, a program reads up to so many times more.
_LARGER = 2
#: Warps of a decision alone.
_WARPS_OF_DECISION = 1


@dataclass(frozen=True)
class AcceptTailLaunch:
    """Sizes of the launches from logits, from B, T and V alone."""

    block_v: int
    splits: int
    block_t: int
    block_s: int
    num_warps: int
    parts: tuple[tuple[bool, bool], ...]  # launches: (winners, decides)

    @classmethod
    def plan(cls, *, backend: Backend, batch: int, rows: int, vocab: int) -> AcceptTailLaunch:
        block_v = filling(_BLOCK_V[backend], _LARGER, batch * rows, vocab)
        warps, apart = max(1, min(8, block_v // 1024)), is_apart(backend, batch * rows)
        return cls.of(block_v, rows=rows, vocab=vocab, num_warps=warps, apart=apart)

    @classmethod
    def of(cls, block_v: int, *, rows: int, vocab: int, num_warps: int, apart: bool = False) -> AcceptTailLaunch:
        """The launches in which a program reads ``block_v`` ids."""
        splits = triton.cdiv(vocab, block_v)
        block_t, block_s = triton.next_power_of_2(rows), triton.next_power_of_2(splits)
        return cls(block_v, splits, block_t, block_s, num_warps, parts_of(apart=apart))


class AcceptTail:
    """`greedy_accept` as one launch, two for many rows of logits; built once, then capturable."""

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "accept_tail")
        self._setup = setup
        self._rows = setup.gamma + 1
        self.plan = AcceptTailLaunch.plan
        splits = triton.cdiv(setup.vocab_size, _BLOCK_V[setup.backend])
        partials = setup.max_batch * self._rows * splits
        self._values = torch.empty(partials, dtype=torch.float32, device=setup.device)
        self._ids = torch.empty(partials, dtype=torch.int32, device=setup.device)
        self._arrived = torch.zeros(setup.max_batch, dtype=torch.int32, device=setup.device)

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
        """See :class:`sgl_mega_plugin.contract.GreedyAccept`.

        Raises:
            ValueError: an argument's shape, dtype, device or stride is not the seam's.
        """
        batch = require_accept(
            self._setup,
            candidates=candidates,
            seq_lens=seq_lens,
            verify_lens=verify_lens,
            simulated_correct=simulated_correct,
            out_correct_lens=out_correct_lens,
            out_bonus_tokens=out_bonus_tokens,
            out_commit_lens=out_commit_lens,
            out_new_seq_lens=out_new_seq_lens,
            out_tokens=out_tokens,
        )
        lengths = (seq_lens, verify_lens, seq_lens if simulated_correct is None else simulated_correct)
        outputs = (out_correct_lens, out_bonus_tokens, out_commit_lens, out_new_seq_lens, out_tokens)
        simulated = simulated_correct is not None
        if target_logits is not None and target_tokens is None:
            self._from_logits(batch, candidates, target_logits, lengths, outputs, simulated)
        elif target_tokens is not None and target_logits is None:
            self._from_tokens(batch, candidates, target_tokens, lengths, outputs, simulated)
        else:
            raise ValueError("target_logits, target_tokens: exactly one of them must be given")

    def _from_logits(
        self,
        batch: int,
        candidates: Tensor,
        logits: Tensor,
        lengths: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        simulated: bool,
    ) -> None:
        require_logits(self._setup, logits, batch)
        rows, vocab = self._rows, self._setup.vocab_size
        launch = self.plan(backend=self._setup.backend, batch=batch, rows=rows, vocab=vocab)
        for winners, decides in launch.parts:
            accept_from_logits[(batch * rows, launch.splits) if winners else (batch, 1)](
                candidates,
                candidates.stride(0),
                logits,
                logits.stride(0),
                *lengths,
                self._values,
                self._ids,
                self._arrived,
                *outputs,
                outputs[-1].stride(0),
                rows,
                vocab,
                launch.splits,
                SIMULATED=simulated,
                WINNERS=winners,
                DECIDES=decides,
                BLOCK_V=launch.block_v,
                BLOCK_T=launch.block_t,
                BLOCK_S=launch.block_s,
                num_warps=launch.num_warps if winners else _WARPS_OF_DECISION,
                enable_fp_fusion=ENABLE_FP_FUSION,
            )

    def _from_tokens(
        self,
        batch: int,
        candidates: Tensor,
        tokens: Tensor,
        lengths: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        simulated: bool,
    ) -> None:
        device = torch.device(self._setup.device).type
        require_tensor("target_tokens", tokens, shape=(batch, self._rows), dtypes=(torch.int64,), device=device)
        accept_from_tokens[(batch,)](
            candidates,
            candidates.stride(0),
            tokens,
            tokens.stride(0),
            *lengths,
            *outputs,
            outputs[-1].stride(0),
            self._rows,
            SIMULATED=simulated,
            BLOCK_T=triton.next_power_of_2(self._rows),
            num_warps=1,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
