"""Launch of `kv_staging`: checks the arguments and picks the grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sgl_mega_plugin.contract import PADDING_SLOT, SlotSetup
from sgl_mega_slots.commit.kv_staging.kernel import stage_commit
from sgl_mega_slots.common.checks import require_batch, require_setup, require_tensor, require_triton
from sgl_mega_slots.common.options import ENABLE_FP_FUSION


@dataclass(frozen=True)
class KvStagingLaunch:
    """Tile of the one launch: BLOCK_M staged rows by BLOCK_T columns a program."""

    block_m: int
    block_t: int
    num_warps: int = 4

    @classmethod
    def plan(cls, *, staged: int, rows: int) -> KvStagingLaunch:
        block_t = triton.next_power_of_2(rows)
        # 128 elements, one a thread; more rows go to more programs.
        return cls(block_m=min(triton.next_power_of_2(staged), max(1, 128 // block_t)), block_t=block_t)


class KvStaging:
    """`kv_staging` as one launch; holds no memory."""

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "kv_staging")
        self._setup = setup
        self._device = torch.device(setup.device).type

    def __call__(
        self,
        *,
        cache_locs: Tensor,
        positions: Tensor,
        commit_lens: Tensor,
        out_cache_locs: Tensor,
        out_positions: Tensor,
        out_commit_lens: Tensor,
    ) -> None:
        """See :class:`sgl_mega_plugin.contract.KvStaging`.

        Raises:
            ValueError: an argument's shape, dtype, device or stride is not the seam's.
        """
        batch, rows, staged = cache_locs.shape[0], self._setup.gamma + 1, out_commit_lens.shape[0]
        require_batch("cache_locs", batch, self._setup.max_batch)
        require_setup("cache_locs", cache_locs.shape[1], rows, "T")
        if staged < batch:
            raise ValueError(f"out_commit_lens: M {staged}; must be at least B, {batch}")
        for name, value, shape, dtype in (
            ("cache_locs", cache_locs, (batch, rows), torch.int64),
            ("positions", positions, (batch, rows), torch.int64),
            ("commit_lens", commit_lens, (batch,), torch.int32),
            ("out_cache_locs", out_cache_locs, (staged, rows), torch.int64),
            ("out_positions", out_positions, (staged, rows), torch.int64),
            ("out_commit_lens", out_commit_lens, (staged,), torch.int32),
        ):
            require_tensor(name, value, shape=shape, dtypes=(dtype,), device=self._device)

        launch = KvStagingLaunch.plan(staged=staged, rows=rows)
        stage_commit[(triton.cdiv(staged, launch.block_m),)](
            cache_locs,
            cache_locs.stride(0),
            positions,
            positions.stride(0),
            commit_lens,
            out_cache_locs,
            out_cache_locs.stride(0),
            out_positions,
            out_positions.stride(0),
            out_commit_lens,
            batch,
            staged,
            rows,
            PADDING=PADDING_SLOT,
            BLOCK_M=launch.block_m,
            BLOCK_T=launch.block_t,
            num_warps=launch.num_warps,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
