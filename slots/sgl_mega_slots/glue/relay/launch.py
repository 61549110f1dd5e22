"""Launch of `relay`: checks the arguments and picks the grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sgl_mega_plugin.contract import SlotSetup
from sgl_mega_slots.common.checks import INDEX_DTYPES, require_batch, require_tensor, require_triton
from sgl_mega_slots.common.options import ENABLE_FP_FUSION
from sgl_mega_slots.glue.relay.kernel import hand_over


@dataclass(frozen=True)
class RelayLaunch:
    """Tile of the one launch: BLOCK_B requests a program, one a thread."""

    block_b: int
    num_warps: int

    @classmethod
    def plan(cls, *, batch: int) -> RelayLaunch:
        block_b = min(128, max(32, triton.next_power_of_2(batch)))
        return cls(block_b=block_b, num_warps=block_b // 32)


class Relay:
    """`relay` as one launch; holds no memory, so it is capturable from its second call on."""

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "relay")
        self._setup = setup
        self._device = torch.device(setup.device).type
        self.launch = RelayLaunch.plan(batch=setup.max_batch)

    def __call__(
        self,
        *,
        req_pool_indices: Tensor,
        verify_lens: Tensor,
        new_seq_lens: Tensor,
        bonus_tokens: Tensor,
        out_relay_lens: Tensor,
        out_relay_tokens: Tensor,
        out_next_seq_lens: Tensor | None,
        out_next_anchors: Tensor | None,
    ) -> None:
        """See :class:`sgl_mega_plugin.contract.Relay`.

        Raises:
            ValueError: an argument's shape, dtype, device or stride is not the seam's.
        """
        batch, pool_rows, launch = req_pool_indices.shape[0], out_relay_lens.shape[0], self.launch
        require_batch("req_pool_indices", batch, self._setup.max_batch)
        for name, value, count, dtypes in (
            ("req_pool_indices", req_pool_indices, batch, INDEX_DTYPES),
            ("verify_lens", verify_lens, batch, (torch.int32,)),
            ("new_seq_lens", new_seq_lens, batch, INDEX_DTYPES),
            ("bonus_tokens", bonus_tokens, batch, (torch.int64,)),
            ("out_relay_lens", out_relay_lens, pool_rows, (torch.int64,)),
            ("out_relay_tokens", out_relay_tokens, pool_rows, (torch.int64,)),
            ("out_next_seq_lens", out_next_seq_lens, batch, (new_seq_lens.dtype,)),
            ("out_next_anchors", out_next_anchors, batch, (torch.int64,)),
        ):
            if value is not None:
                require_tensor(name, value, shape=(count,), dtypes=dtypes, device=self._device)

        hand_over[(triton.cdiv(batch, launch.block_b),)](
            req_pool_indices,
            verify_lens,
            new_seq_lens,
            bonus_tokens,
            out_relay_lens,
            out_relay_tokens,
            out_next_seq_lens,
            out_next_anchors,
            batch,
            pool_rows,
            BLOCK_B=launch.block_b,
            num_warps=launch.num_warps,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
