"""Launch of `params_once`: checks the arguments and picks the grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sgl_mega_plugin.contract import SlotSetup
from sgl_mega_slots.common.checks import FLOAT_DTYPES, INDEX_DTYPES, require_batch, require_tensor, require_triton
from sgl_mega_slots.common.options import ENABLE_FP_FUSION
from sgl_mega_slots.glue.params_once.kernel import stage_params

_SMALLEST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class StepParamsLaunch:
    """Tile of the one launch: BLOCK_B requests a program, one a thread."""

    block_b: int
    num_warps: int

    @classmethod
    def plan(cls, *, batch: int) -> StepParamsLaunch:
        block_b = min(128, max(32, triton.next_power_of_2(batch)))
        return cls(block_b=block_b, num_warps=block_b // 32)


class StepParams:
    """`params_once` as one launch; holds no memory, so it is capturable from its second call on."""

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "params_once")
        self._setup = setup
        self._device = torch.device(setup.device).type
        self.launch = StepParamsLaunch.plan(batch=setup.max_batch)

    def __call__(
        self,
        *,
        temperatures: Tensor,
        top_ks: Tensor,
        verify_lens: Tensor | None,
        out_temperatures: Tensor,
        out_greedy: Tensor,
        out_step_temperatures: Tensor,
    ) -> None:
        """See :class:`sgl_mega_plugin.contract.StepParams`.

        Raises:
            ValueError: an argument's shape, dtype, device or stride is not the seam's.
        """
        batch, given, launch = out_temperatures.shape[0], top_ks.shape[0], self.launch
        require_batch("out_temperatures", batch, self._setup.max_batch)
        if given > batch:
            raise ValueError(f"top_ks: n {given}; must be at most B, {batch}")
        for name, value, shape, dtypes in (
            ("temperatures", temperatures, (given, 1)[: max(1, temperatures.dim())], (*FLOAT_DTYPES, torch.float64)),
            ("top_ks", top_ks, (given,), INDEX_DTYPES),
            ("verify_lens", verify_lens, (batch,), (torch.int32,)),
            ("out_temperatures", out_temperatures, (batch,), (torch.float32,)),
            ("out_greedy", out_greedy, (batch,), (torch.bool,)),
            ("out_step_temperatures", out_step_temperatures, (batch,), (torch.float32,)),
        ):
            if value is not None:
                require_tensor(name, value, shape=shape, dtypes=dtypes, device=self._device)

        stage_params[(triton.cdiv(batch, launch.block_b),)](
            temperatures,
            temperatures.stride(0),
            top_ks,
            verify_lens,
            out_temperatures,
            out_greedy,
            out_step_temperatures,
            given,
            batch,
            SMALLEST=_SMALLEST_TEMPERATURE,
            BLOCK_B=launch.block_b,
            num_warps=launch.num_warps,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
