"""Launch of `histories`: checks the arguments and picks the grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sgl_mega_plugin.contract import SlotSetup
from sgl_mega_slots.commit.histories.kernel import append_committed
from sgl_mega_slots.common.checks import INDEX_DTYPES, require_batch, require_setup, require_tensor, require_triton
from sgl_mega_slots.common.options import ENABLE_FP_FUSION

_MOST_IDS = 4096  # of a row: a program holds it in registers


@dataclass(frozen=True)
class HistoriesLaunch:
    """Tile of the one launch: BLOCK_B requests by BLOCK_N ids a program."""

    block_b: int
    block_n: int
    num_warps: int = 4

    @classmethod
    def plan(cls, *, batch: int, ids: int) -> HistoriesLaunch:
        if not 1 <= ids <= _MOST_IDS:
            raise ValueError(f"out_histories: N {ids}; must be 1 to {_MOST_IDS}")
        block_n = triton.next_power_of_2(ids)
        # 128 elements, one a thread; more requests go to more programs.
        return cls(block_b=min(triton.next_power_of_2(batch), max(1, 128 // block_n)), block_n=block_n)


class Histories:
    """`history_commit` as one launch; holds no memory."""

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "histories")
        self._setup = setup
        self._device = torch.device(setup.device).type

    def __call__(self, *, tokens: Tensor, req_pool_indices: Tensor, commit_lens: Tensor, out_histories: Tensor) -> None:
        """See :class:`sgl_mega_plugin.contract.HistoryCommit`.

        Raises:
            ValueError: an argument's shape, dtype, device or stride is not the seam's.
        """
        batch, rows = tokens.shape[0], self._setup.gamma + 1
        require_batch("tokens", batch, self._setup.max_batch)
        require_setup("tokens", tokens.shape[1], rows, "T")
        pool_rows, ids = out_histories.shape
        for name, value, shape, dtypes in (
            ("tokens", tokens, (batch, rows), (torch.int64,)),
            ("req_pool_indices", req_pool_indices, (batch,), INDEX_DTYPES),
            ("commit_lens", commit_lens, (batch,), (torch.int32,)),
            ("out_histories", out_histories, (pool_rows, ids), INDEX_DTYPES),
        ):
            require_tensor(name, value, shape=shape, dtypes=dtypes, device=self._device)

        launch = HistoriesLaunch.plan(batch=batch, ids=ids)
        append_committed[(triton.cdiv(batch, launch.block_b),)](
            tokens,
            tokens.stride(0),
            req_pool_indices,
            commit_lens,
            out_histories,
            out_histories.stride(0),
            batch,
            rows,
            pool_rows,
            ids,
            BLOCK_B=launch.block_b,
            BLOCK_N=launch.block_n,
            num_warps=launch.num_warps,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
