"""Launch of `context_kv`: checks the arguments and picks the grid.

The layers' buffers reach the kernel as a tuple of pointers, so there is no table of addresses to
allocate, to fill before a capture or to keep up to date.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sgl_mega_plugin.contract import PADDING_SLOT, SlotSetup
from sgl_mega_slots.commit.context_kv.kernel import write_context_kv
from sgl_mega_slots.common.checks import FLOAT_DTYPES, require_batch, require_setup, require_tensor, require_triton
from sgl_mega_slots.common.options import ENABLE_FP_FUSION

_LARGEST_TILE = 4096  # elements of half a row's heads that a program holds in registers


@dataclass(frozen=True)
class ContextKvLaunch:
    """Tile of the one launch: every head by half a head's size a program."""

    block_h: int
    block_d: int
    num_warps: int

    @classmethod
    def plan(cls, *, heads: int, head_size: int) -> ContextKvLaunch:
        block_h, block_d = triton.next_power_of_2(heads), triton.next_power_of_2(head_size // 2)
        if block_h * block_d > _LARGEST_TILE:
            raise ValueError(
                f"projected_kv: H {heads} by D {head_size}; half of it must fit {_LARGEST_TILE} elements a program"
            )
        return cls(block_h=block_h, block_d=block_d, num_warps=max(1, min(4, block_h * block_d // 128)))


class ContextKv:
    """`context_kv` as one launch over rows and layers; holds no memory."""

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "context_kv")
        self._setup = setup
        self._device = torch.device(setup.device).type

    def __call__(
        self,
        *,
        projected_kv: Tensor,
        k_norm_weights: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        cache_locs: Tensor,
        commit_lens: Tensor,
        eps: float,
        out_keys: Sequence[Tensor],
        out_values: Sequence[Tensor],
    ) -> None:
        """See :class:`sgl_mega_plugin.contract.ContextKv`. Every buffer has the same strides.

        Raises:
            ValueError: an argument's shape, dtype, device or stride is not the seam's.
        """
        batch, rows = positions.shape
        require_batch("positions", batch, self._setup.max_batch)
        require_setup("positions", rows, self._setup.gamma + 1, "T")
        if projected_kv.dim() != 5:
            raise ValueError(f"projected_kv: shape {tuple(projected_kv.shape)}; must be [B * T, L, 2, H, D]")
        _, layers, _, heads, size = projected_kv.shape
        if size % 2:
            raise ValueError(f"projected_kv: D {size}; must be even, for RoPE turns pairs")
        for name, value, shape, dtypes in (
            ("projected_kv", projected_kv, (batch * rows, layers, 2, heads, size), FLOAT_DTYPES),
            ("k_norm_weights", k_norm_weights, (layers, size), FLOAT_DTYPES),
            ("cos_sin", cos_sin, (cos_sin.shape[0], size), (torch.float32,)),
            ("positions", positions, (batch, rows), (torch.int64,)),
            ("cache_locs", cache_locs, (batch, rows), (torch.int64,)),
            ("commit_lens", commit_lens, (batch,), (torch.int32,)),
        ):
            require_tensor(name, value, shape=shape, dtypes=dtypes, device=self._device)
        buffers = self._check_buffers(projected_kv, out_keys, out_values)

        launch = ContextKvLaunch.plan(heads=heads, head_size=size)
        write_context_kv[(batch * rows, layers)](
            projected_kv,
            projected_kv.stride(0),
            projected_kv.stride(1),
            projected_kv.stride(2),
            projected_kv.stride(3),
            k_norm_weights,
            k_norm_weights.stride(0),
            cos_sin,
            cos_sin.stride(0),
            positions,
            positions.stride(0),
            cache_locs,
            cache_locs.stride(0),
            commit_lens,
            eps,
            tuple(out_keys),
            tuple(out_values),
            buffers.stride(0),
            buffers.stride(1),
            rows,
            cos_sin.shape[0],
            buffers.shape[0],
            H=heads,
            D=size,
            PADDING=PADDING_SLOT,
            BLOCK_H=launch.block_h,
            BLOCK_D=launch.block_d,
            num_warps=launch.num_warps,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )

    def _check_buffers(self, projected_kv: Tensor, out_keys: Sequence[Tensor], out_values: Sequence[Tensor]) -> Tensor:
        """The first of the buffers, whose shape and strides all of them share."""
        _, layers, _, heads, size = projected_kv.shape
        for name, buffers in (("out_keys", out_keys), ("out_values", out_values)):
            if len(buffers) != layers:
                raise ValueError(f"{name}: {len(buffers)} buffers; must be {layers}, one a layer of projected_kv")
            for layer, buffer in enumerate(buffers):
                label = f"{name}[{layer}]"
                shape = (out_keys[0].shape[0], heads, size)
                require_tensor(label, buffer, shape=shape, dtypes=(projected_kv.dtype,), device=self._device)
                if buffer.stride() != out_keys[0].stride():
                    raise ValueError(
                        f"{label}: strides {buffer.stride()}; must be {out_keys[0].stride()}, those of out_keys[0]"
                    )
        return out_keys[0]
