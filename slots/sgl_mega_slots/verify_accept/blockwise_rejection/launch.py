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
from sgl_mega_slots.verify_accept.arguments import require_accept, require_logits
from sgl_mega_slots.verify_accept.blockwise_rejection.kernel import draw_last_token, masses_and_decision, simulate
from sgl_mega_slots.verify_accept.sizes import filling, is_apart, parts_of

#: Least ids a program of the first launch reads of both rows, and of the second. Small in the interpreter, so that a
#: small V has several programs.
_BLOCK_V = {Backend.KERNEL: 4096, Backend.INTERPRETER: 32}
_BLOCK_N = {Backend.KERNEL: 1024, Backend.INTERPRETER: 16}
#: Where the GPU is full, a program reads up to so many times more.
_LARGER = 2
#: Ids and warps of the masses' programs where masses and decision are launches of their own.
_APART_V, _APART_WARPS = {Backend.KERNEL: 4096, Backend.INTERPRETER: 32}, 4
#: Warps of a decision alone.
_WARPS_OF_DECISION = 8


@dataclass(frozen=True)
class BlockwiseRejectionLaunch:
    """Sizes of both launches, from B, T and V alone."""

    block_v: int
    splits: int
    block_n: int
    blocks: int
    block_t: int
    block_s: int
    block_p: int
    warps_v: int
    warps_n: int
    parts: tuple[tuple[bool, bool], ...]  # launches of the first kernel: (masses, decides)

    @classmethod
    def plan(cls, *, backend: Backend, batch: int, rows: int, vocab: int) -> BlockwiseRejectionLaunch:
        apart = is_apart(backend, batch * rows)
        return cls.of(
            _APART_V[backend] if apart else filling(_BLOCK_V[backend], _LARGER, batch * rows, vocab),
            filling(_BLOCK_N[backend], _LARGER, batch, vocab),
            rows=rows,
            vocab=vocab,
            warps_v=_APART_WARPS if apart else 0,
            apart=apart,
        )

    @classmethod
    def of(
        cls,
        block_v: int,
        block_n: int,
        *,
        rows: int,
        vocab: int,
        warps_v: int = 0,
        warps_n: int = 0,
        apart: bool = False,
    ) -> BlockwiseRejectionLaunch:
        """The launches whose programs read that many ids; warps so that a thread has 32 and 8 of them."""
        splits, blocks = triton.cdiv(vocab, block_v), triton.cdiv(vocab, block_n)
        return cls(
            block_v=block_v,
            splits=splits,
            block_n=block_n,
            blocks=blocks,
            block_t=triton.next_power_of_2(rows),
            block_s=triton.next_power_of_2(splits),
            block_p=triton.next_power_of_2(blocks),
            warps_v=warps_v or max(1, min(8, block_v // 1024)),
            warps_n=warps_n or max(1, min(8, block_n // 256)),
            parts=parts_of(apart=apart),
        )


class BlockwiseRejection:
    """`sampled_accept` as two launches, three for many rows, one under simulation; built once, then capturable."""

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "blockwise_rejection")
        self._setup = setup
        self._device = torch.device(setup.device).type
        self._rows = rows = setup.gamma + 1
        self.plan = BlockwiseRejectionLaunch.plan
        batch, vocab, device = setup.max_batch, setup.vocab_size, setup.device
        splits = triton.cdiv(vocab, min(_BLOCK_V[setup.backend], _APART_V[setup.backend]))
        blocks = triton.cdiv(vocab, _BLOCK_N[setup.backend])
        self._masses = torch.empty(4, batch * rows * splits, dtype=torch.float32, device=device).unbind()
        self._ids = torch.empty(batch * rows * splits, dtype=torch.int32, device=device)
        self._drawn = torch.empty(batch, 3, dtype=torch.int32, device=device)
        self._forms = torch.empty(batch, 4, dtype=torch.float32, device=device)
        self._values = torch.empty(batch * blocks, dtype=torch.float32, device=device)
        self._value_ids = torch.empty(batch * blocks, dtype=torch.int32, device=device)
        self._decided, self._arrived = torch.zeros(2, batch, dtype=torch.int32, device=device).unbind()

    def __call__(
        self,
        *,
        candidates: Tensor,
        target_logits: Tensor,
        draft_logits: Tensor | None,
        target_temperatures: Tensor,
        draft_temperatures: Tensor,
        target_cutoffs: Tensor | None,
        seq_lens: Tensor,
        verify_lens: Tensor,
        noise_key: int,
        noise_offset: Tensor,
        simulated_correct: Tensor | None,
        simulated_seed: Tensor | None,
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
            seq_lens=seq_lens,
            verify_lens=verify_lens,
            simulated_correct=simulated_correct,
            out_correct_lens=out_correct_lens,
            out_bonus_tokens=out_bonus_tokens,
            out_commit_lens=out_commit_lens,
            out_new_seq_lens=out_new_seq_lens,
            out_tokens=out_tokens,
        )
        require_logits(self._setup, target_logits, batch)
        if (simulated_correct is None) != (simulated_seed is None):
            raise ValueError("simulated_correct, simulated_seed: both or neither must be given")
        for name, value, size, dtype in (
            ("target_temperatures", target_temperatures, batch, torch.float32),
            ("draft_temperatures", draft_temperatures, batch, torch.float32),
            ("target_cutoffs", target_cutoffs, batch * self._rows, torch.float32),
            ("noise_offset", noise_offset, 1, torch.int64),
            ("simulated_seed", simulated_seed, 1, torch.int32),
        ):
            if value is not None:
                require_tensor(name, value, shape=(size,), dtypes=(dtype,), device=self._device)
        draft_vocab = self._draft_vocab(draft_logits, batch)
        rows, vocab = self._rows, self._setup.vocab_size
        launch = self.plan(backend=self._setup.backend, batch=batch, rows=rows, vocab=vocab)
        has_cutoffs = target_cutoffs is not None
        cutoffs = target_temperatures if target_cutoffs is None else target_cutoffs
        outputs = (out_correct_lens, out_bonus_tokens, out_commit_lens, out_new_seq_lens, out_tokens)
        if simulated_correct is not None:
            simulate[(batch, launch.blocks)](
                candidates,
                candidates.stride(0),
                target_logits,
                target_logits.stride(0),
                target_temperatures,
                cutoffs,
                seq_lens,
                verify_lens,
                simulated_correct,
                simulated_seed,
                self._values,
                self._value_ids,
                self._arrived,
                *outputs,
                out_tokens.stride(0),
                rows,
                vocab,
                launch.blocks,
                HAS_CUTOFFS=has_cutoffs,
                BLOCK_T=launch.block_t,
                BLOCK_N=launch.block_n,
                BLOCK_P=launch.block_p,
                num_warps=launch.warps_n,
                enable_fp_fusion=ENABLE_FP_FUSION,
            )
            return
        drafted = target_logits if draft_logits is None else draft_logits
        strides = (0, 0) if draft_logits is None else draft_logits.stride()[:2]
        key = signed_words(noise_key)
        for masses, decides in launch.parts:
            masses_and_decision[(batch * rows, launch.splits) if masses else (batch, 1)](
                candidates,
                candidates.stride(0),
                target_logits,
                target_logits.stride(0),
                drafted,
                *strides,
                target_temperatures,
                draft_temperatures,
                cutoffs,
                seq_lens,
                verify_lens,
                noise_offset,
                *self._masses,
                self._ids,
                self._decided,
                self._drawn,
                self._forms,
                *outputs,
                out_tokens.stride(0),
                *key,
                rows,
                vocab,
                draft_vocab,
                launch.splits,
                HAS_DRAFT=draft_logits is not None,
                HAS_CUTOFFS=has_cutoffs,
                MASSES=masses,
                DECIDES=decides,
                BLOCK_V=launch.block_v,
                BLOCK_T=launch.block_t,
                BLOCK_S=launch.block_s,
                num_warps=launch.warps_v if masses else _WARPS_OF_DECISION,
                enable_fp_fusion=ENABLE_FP_FUSION,
            )
        draw_last_token[(batch, launch.blocks)](
            target_logits,
            target_logits.stride(0),
            drafted,
            *strides,
            target_temperatures,
            draft_temperatures,
            cutoffs,
            noise_offset,
            self._drawn,
            self._forms,
            self._values,
            self._value_ids,
            self._arrived,
            out_bonus_tokens,
            out_tokens,
            out_tokens.stride(0),
            *key,
            rows,
            vocab,
            draft_vocab,
            launch.blocks,
            HAS_DRAFT=draft_logits is not None,
            HAS_CUTOFFS=has_cutoffs,
            INTERPRETED=self._setup.backend is Backend.INTERPRETER,
            BLOCK_N=launch.block_n,
            BLOCK_P=launch.block_p,
            num_warps=launch.warps_n,
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
