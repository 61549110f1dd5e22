"""Launches of `sampling_cutoffs`: checks the arguments, holds maxima and lists, picks the grids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_slots.common.checks import FLOAT_DTYPES, require_batch, require_setup, require_tensor, require_triton
from sgl_mega_slots.common.options import ENABLE_FP_FUSION
from sgl_mega_slots.verify_accept.sampling_cutoffs.kernel import find_cutoff, group_maxima


@dataclass(frozen=True)
class SamplingCutoffsLaunch:
    """Sizes of both launches. Small in the interpreter, so that a small V takes every way."""

    size: int  # ids of a group
    groups: int  # of a row
    block_g: int  # groups a program of the first launch reads
    block_h: int  # groups that the second launch reads again at once
    listed: int  # logits that the list of a row holds
    pairs: int  # logits of a list up to which each is compared with each
    block_j: int
    block_x: int  # logits that a search reads at once
    steps: int  # of the search for the bound, one bit each
    warps_g: int
    warps_f: int

    @classmethod
    def plan(cls, *, backend: Backend, vocab: int) -> SamplingCutoffsLaunch:
        if backend is Backend.INTERPRETER:
            return cls(8, triton.cdiv(vocab, 8), 8, 4, 32, 8, 8, 64, 4, 1, 1)
        return cls.of(128, vocab=vocab)

    @classmethod
    def of(
        cls,
        size: int,
        *,
        vocab: int,
        block_g: int = 32,
        block_h: int = 32,
        listed: int = 4096,
        pairs: int = 512,
        block_j: int = 16,
        block_x: int = 4096,
        steps: int = 14,
        warps_g: int = 4,
        warps_f: int = 8,
    ) -> SamplingCutoffsLaunch:
        """The launches with groups of ``size`` ids."""
        groups = triton.cdiv(vocab, size)
        return cls(size, groups, block_g, block_h, listed, pairs, block_j, block_x, steps, warps_g, warps_f)


class SamplingCutoffs:
    """`sampling_cutoffs` as two launches; built once, then capturable."""

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "sampling_cutoffs")
        self._setup = setup
        self._device = torch.device(setup.device).type
        self._rows = setup.gamma + 1
        self.use(SamplingCutoffsLaunch.plan(backend=setup.backend, vocab=setup.vocab_size))

    def use(self, launch: SamplingCutoffsLaunch) -> None:
        """Take these sizes, with memory for them."""
        self.launch = launch
        rows, device = self._setup.max_batch * self._rows, self._setup.device
        self._maxima = torch.empty(rows * launch.groups, dtype=torch.float32, device=device)
        self._sums = torch.empty_like(self._maxima)
        self._hits = torch.empty(rows * launch.groups, dtype=torch.int32, device=device)
        self._list = torch.empty(rows * launch.listed, dtype=torch.float32, device=device)

    def __call__(
        self,
        *,
        target_logits: Tensor,
        temperatures: Tensor,
        top_ks: Tensor,
        top_ps: Tensor,
        min_ps: Tensor,
        verify_lens: Tensor,
        out_cutoffs: Tensor,
    ) -> None:
        """See :class:`sgl_mega_plugin.contract.SamplingCutoffs`.

        Raises:
            ValueError: an argument's shape, dtype, device or stride is not the seam's.
        """
        batch, rows, vocab, launch = len(verify_lens), self._rows, self._setup.vocab_size, self.launch
        require_batch("verify_lens", batch, self._setup.max_batch)
        require_setup("target_logits", target_logits.shape[-1], vocab, "V")
        for name, value, shape, dtypes in (
            ("target_logits", target_logits, (batch * rows, vocab), FLOAT_DTYPES),
            ("temperatures", temperatures, (batch,), (torch.float32,)),
            ("top_ks", top_ks, (batch,), (torch.int32,)),
            ("top_ps", top_ps, (batch,), (torch.float32,)),
            ("min_ps", min_ps, (batch,), (torch.float32,)),
            ("verify_lens", verify_lens, (batch,), (torch.int32,)),
            ("out_cutoffs", out_cutoffs, (batch * rows,), (torch.float32,)),
        ):
            require_tensor(name, value, shape=shape, dtypes=dtypes, device=self._device)

        inputs = (target_logits, target_logits.stride(0), temperatures, top_ks, top_ps, min_ps, verify_lens)
        group_maxima[(batch * rows, triton.cdiv(launch.groups, launch.block_g))](
            *inputs,
            self._maxima,
            self._sums,
            rows,
            vocab,
            launch.groups,
            BLOCK_G=launch.block_g,
            SIZE=launch.size,
            num_warps=launch.warps_g,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
        find_cutoff[(batch * rows,)](
            *inputs,
            self._maxima,
            self._sums,
            self._hits,
            self._list,
            out_cutoffs,
            rows,
            vocab,
            launch.groups,
            SIZE=launch.size,
            BLOCK_A=triton.next_power_of_2(launch.groups),
            BLOCK_H=launch.block_h,
            LIST=launch.listed,
            PAIRS=launch.pairs,
            BLOCK_J=launch.block_j,
            BLOCK_X=launch.block_x,
            STEPS=launch.steps,
            num_warps=launch.warps_f,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
