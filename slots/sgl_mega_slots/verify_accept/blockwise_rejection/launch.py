"""Launches of `blockwise_rejection`: checks the arguments, holds the partials, picks the grids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_slots.common.checks import FLOAT_DTYPES, require_tensor, require_triton
from sgl_mega_slots.common.keys import signed_words
from sgl_mega_slots.common.options import ENABLE_FP_FUSION
from sgl_mega_slots.verify_accept.arguments import require_accept
from sgl_mega_slots.verify_accept.blockwise_rejection.kernel import decide_and_draw, finish, row_partials

# Ids a program of the first launch reads of both rows, and of the second. Small in the interpreter, so that a
# small V has several programs.
_BLOCK_V = {Backend.KERNEL: 4096, Backend.INTERPRETER: 32}
_BLOCK_N = {Backend.KERNEL: 1024, Backend.INTERPRETER: 16}
#: Programs of the second launch that fill an H200 (132 SMs of 16 programs); past it, larger blocks decide less often.
_ENOUGH = 2048


@dataclass(frozen=True)
class BlockwiseRejectionLaunch:
    """Sizes of the three launches, from B, T and V alone."""

    block_v: int
    splits: int
    block_n: int
    blocks: int
    block_t: int
    block_s: int
    block_p: int
    num_warps: int

    @classmethod
    def plan(cls, *, backend: Backend, batch: int, rows: int, vocab: int) -> BlockwiseRejectionLaunch:
        block_v, block_n = _BLOCK_V[backend], _BLOCK_N[backend]
        while batch * triton.cdiv(vocab, block_n) > _ENOUGH and block_n < block_v:
            block_n *= 2
        splits, blocks = triton.cdiv(vocab, block_v), triton.cdiv(vocab, block_n)
        return cls(
            block_v=block_v,
            splits=splits,
            block_n=block_n,
            blocks=blocks,
            block_t=triton.next_power_of_2(rows),
            block_s=triton.next_power_of_2(splits),
            block_p=triton.next_power_of_2(blocks),
            num_warps=4,
        )


class BlockwiseRejection:
    """`sampled_accept` as three launches; built once, then capturable."""

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "blockwise_rejection")
        self._setup = setup
        self._device = torch.device(setup.device).type
        self._rows = rows = setup.gamma + 1
        batch, vocab, device = setup.max_batch, setup.vocab_size, setup.device
        splits = triton.cdiv(vocab, _BLOCK_V[setup.backend])
        blocks = triton.cdiv(vocab, _BLOCK_N[setup.backend])
        self._masses = torch.empty(4, batch * rows * splits, dtype=torch.float32, device=device)
        self._ids = torch.empty(batch * rows * splits, dtype=torch.int32, device=device)
        self._stood = torch.empty(batch, dtype=torch.int32, device=device)
        self._last = torch.empty(batch, dtype=torch.int64, device=device)
        self._values = torch.empty(2, batch * blocks, dtype=torch.float32, device=device)
        self._value_ids = torch.empty(2, batch * blocks, dtype=torch.int32, device=device)

    def __call__(
        self,
        *,
        candidates: Tensor,
        target_logits: Tensor,
        draft_logits: Tensor | None,
        target_temperatures: Tensor,
        draft_temperatures: Tensor,
        seq_lens: Tensor,
        verify_lens: Tensor,
        noise_key: int,
        noise_offset: Tensor,
        out_correct_lens: Tensor,
        out_bonus_tokens: Tensor,
        out_commit_lens: Tensor,
        out_new_seq_lens: Tensor,
        out_tokens: Tensor,
    ) -> None:
        """See :class:`sgl_mega_plugin.contract.SampledAccept`.

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
        rows, vocab = self._rows, self._setup.vocab_size
        for name, value, shape, dtype in (
            ("target_temperatures", target_temperatures, (batch,), torch.float32),
            ("draft_temperatures", draft_temperatures, (batch,), torch.float32),
            ("noise_offset", noise_offset, (1,), torch.int64),
        ):
            require_tensor(name, value, shape=shape, dtypes=(dtype,), device=self._device)
        draft_vocab = self._draft_vocab(draft_logits, batch)

        launch = BlockwiseRejectionLaunch.plan(backend=self._setup.backend, batch=batch, rows=rows, vocab=vocab)
        drafted = target_logits if draft_logits is None else draft_logits
        strides = (0, 0) if draft_logits is None else draft_logits.stride()[:2]
        row_partials[(batch * rows, launch.splits)](
            target_logits,
            target_logits.stride(0),
            drafted,
            *strides,
            target_temperatures,
            draft_temperatures,
            verify_lens,
            *self._masses,
            self._ids,
            rows,
            vocab,
            draft_vocab,
            launch.splits,
            HAS_DRAFT=draft_logits is not None,
            BLOCK_V=launch.block_v,
            num_warps=launch.num_warps,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
        decide_and_draw[(batch, launch.blocks)](
            candidates,
            candidates.stride(0),
            target_logits,
            target_logits.stride(0),
            drafted,
            *strides,
            target_temperatures,
            draft_temperatures,
            verify_lens,
            noise_offset,
            *self._masses,
            self._ids,
            self._stood,
            self._last,
            self._values,
            self._value_ids,
            self._values.stride(0),
            *signed_words(noise_key),
            rows,
            vocab,
            draft_vocab,
            launch.splits,
            launch.blocks,
            HAS_DRAFT=draft_logits is not None,
            BLOCK_T=launch.block_t,
            BLOCK_S=launch.block_s,
            BLOCK_N=launch.block_n,
            num_warps=launch.num_warps,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
        finish[(batch,)](
            candidates,
            candidates.stride(0),
            seq_lens,
            verify_lens,
            self._stood,
            self._last,
            self._values,
            self._value_ids,
            self._values.stride(0),
            out_correct_lens,
            out_bonus_tokens,
            out_commit_lens,
            out_new_seq_lens,
            out_tokens,
            out_tokens.stride(0),
            rows,
            launch.blocks,
            BLOCK_T=launch.block_t,
            BLOCK_P=launch.block_p,
            num_warps=1,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )

    def _draft_vocab(self, draft_logits: Tensor | None, batch: int) -> int:
        """Ids that the draft knows, V without draft logits."""
        if draft_logits is None:
            return self._setup.vocab_size
        known = draft_logits.shape[-1]
        if not 1 <= known <= self._setup.vocab_size:
            raise ValueError(f"draft_logits: {known} ids; must be 1 to V, {self._setup.vocab_size}")
        shape = (batch, self._setup.gamma, known)
        require_tensor("draft_logits", draft_logits, shape=shape, dtypes=FLOAT_DTYPES, device=self._device)
        return known
