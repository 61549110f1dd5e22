"""Launch of `step_inputs`: checks the arguments and picks the grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sgl_mega_plugin.contract import PADDING_SLOT, SlotSetup
from sgl_mega_slots.common.checks import INDEX_DTYPES, require_batch, require_setup, require_tensor, require_triton
from sgl_mega_slots.common.options import ENABLE_FP_FUSION
from sgl_mega_slots.glue.step_inputs.kernel import fill_step_inputs


@dataclass(frozen=True)
class StepInputsLaunch:
    """Tile of the one launch: BLOCK_B requests by BLOCK_T columns a program."""

    block_b: int
    block_t: int
    num_warps: int = 4

    @classmethod
    def plan(cls, *, batch: int, rows: int) -> StepInputsLaunch:
        block_t = triton.next_power_of_2(rows)
        # 128 elements, one a thread; more requests go to more programs.
        return cls(block_b=min(triton.next_power_of_2(batch), max(1, 128 // block_t)), block_t=block_t)


class StepInputs:
    """`step_inputs` as one launch; holds no memory, so it is capturable from its second call on."""

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "step_inputs")
        self._setup = setup
        self._device = torch.device(setup.device).type
        self.launch = StepInputsLaunch.plan(batch=setup.max_batch, rows=setup.gamma + 1)

    def __call__(
        self,
        *,
        req_pool_indices: Tensor,
        req_to_token: Tensor,
        seq_lens: Tensor,
        verify_lens: Tensor,
        anchor_tokens: Tensor,
        relay_lens: Tensor | None,
        relay_tokens: Tensor | None,
        mask_token: int,
        max_positions: int,
        out_positions: Tensor,
        out_cache_locs: Tensor,
        out_draft_ids: Tensor,
        out_seq_lens: Tensor | None,
        out_anchor_tokens: Tensor | None,
    ) -> None:
        """See :class:`sgl_mega_plugin.contract.StepInputs`.

        Raises:
            ValueError: an argument's shape, dtype, device or stride is not the seam's, or one relay is given alone.
        """
        batch, rows, launch = out_positions.shape[0], self._setup.gamma + 1, self.launch
        require_batch("out_positions", batch, self._setup.max_batch)
        require_setup("out_positions", out_positions.shape[1], rows, "T")
        if max_positions < 1:
            raise ValueError(f"max_positions: {max_positions}; must be at least 1")
        if (relay_lens is None) is not (relay_tokens is None):
            given = "relay_lens" if relay_tokens is None else "relay_tokens"
            raise ValueError(f"{given}: given alone; pass both relays or neither")
        pool_rows, columns = req_to_token.shape
        for name, value, shape, dtypes in (
            ("req_pool_indices", req_pool_indices, (batch,), INDEX_DTYPES),
            ("req_to_token", req_to_token, (pool_rows, columns), (torch.int32,)),
            ("seq_lens", seq_lens, (batch,), INDEX_DTYPES),
            ("verify_lens", verify_lens, (batch,), (torch.int32,)),
            ("anchor_tokens", anchor_tokens, (batch,), (torch.int64,)),
            ("out_positions", out_positions, (batch, rows), (torch.int64,)),
            ("out_cache_locs", out_cache_locs, (batch, rows), (torch.int64,)),
            ("out_draft_ids", out_draft_ids, (batch, rows - 1), (torch.int64,)),
        ):
            require_tensor(name, value, shape=shape, dtypes=dtypes, device=self._device)
        for name, optional, count in (
            ("relay_lens", relay_lens, pool_rows),
            ("relay_tokens", relay_tokens, pool_rows),
            ("out_seq_lens", out_seq_lens, batch),
            ("out_anchor_tokens", out_anchor_tokens, batch),
        ):
            if optional is not None:
                require_tensor(name, optional, shape=(count,), dtypes=(torch.int64,), device=self._device)

        fill_step_inputs[(triton.cdiv(batch, launch.block_b),)](
            req_pool_indices,
            req_to_token,
            req_to_token.stride(0),
            seq_lens,
            verify_lens,
            anchor_tokens,
            relay_lens,
            relay_tokens,
            mask_token,
            max_positions,
            out_positions,
            out_positions.stride(0),
            out_cache_locs,
            out_cache_locs.stride(0),
            out_draft_ids,
            out_draft_ids.stride(0),
            out_seq_lens,
            out_anchor_tokens,
            batch,
            rows,
            pool_rows,
            columns,
            PADDING=PADDING_SLOT,
            BLOCK_B=launch.block_b,
            BLOCK_T=launch.block_t,
            num_warps=launch.num_warps,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
