"""Launches of the LM head: tiles and grid for a size, the programs' winners, both kernels."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_slots.common.checks import FLOAT_DTYPES, require_setup, require_tensor
from sgl_mega_slots.common.lm_head.kernel import head_rows, head_tokens
from sgl_mega_slots.common.options import ENABLE_FP_FUSION
from sgl_mega_slots.common.processors import Processors

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# Tiles are small in the interpreter, so that small sizes have several of each.
_BLOCK_V = {Backend.KERNEL: 128, Backend.INTERPRETER: 32}
_MOST_ROWS = {Backend.KERNEL: 128, Backend.INTERPRETER: 16}  # of a program; each block of rows reads the weight again
_DEPTH_BYTES = {Backend.KERNEL: 128, Backend.INTERPRETER: 32}  # of a row of a tile: 128 is TMA's widest swizzle
_MOST_STAGES = 8
# One program an SM, with all of its shared memory under way: on H200 that reads faster than two (4.5 TB/s of 4.56 at
# H 4,096). Up to these rows a tile twice as deep, past _ROWS_OF_WIDE one twice as wide.
_ROWS_OF_DEEP, _ROWS_OF_WIDE = 32, 64
_SHARED_OF_DEEP = 192 * 1024
_TILE_END_BYTES = 10 * 1024  # of a program's shared memory, for a tile's logits and winners, and the driver's own
#: Tiles are fetched by TMA where a weight's address and stride allow: one instruction a tile, not one a 16 bytes.
BY_DESCRIPTOR = True


@dataclass(frozen=True)
class HeadLaunch:
    """Tiles of the first launch, BLOCK_V ids by BLOCK_H of the depth against BLOCK_M rows, and both launches' grids."""

    block_m: int
    block_v: int
    block_h: int
    row_blocks: int
    programs: int  # along the vocabulary
    tiles: int  # a program
    block_p: int  # winners of a row, as the second launch reads them
    num_warps: int
    num_stages: int

    @classmethod
    def plan(
        cls,
        *,
        backend: Backend,
        rows: int,
        vocab: int,
        depth: int,
        hidden_bytes: int,
        weight_bytes: int,
        processors: Processors,
    ) -> HeadLaunch:
        """Sizes for ``rows`` hidden rows of ``depth`` H, elements of so many bytes each."""
        block_m = min(_MOST_ROWS[backend], max(16, triton.next_power_of_2(rows)))  # 16: a tensor-core tile
        large = processors.shared_bytes >= _SHARED_OF_DEEP
        block_v = _BLOCK_V[backend] * (2 if large and block_m > _ROWS_OF_WIDE else 1)
        block_v //= 2 if weight_bytes == 4 else 1  # fp32 runs outside the tensor cores
        depth_bytes = _DEPTH_BYTES[backend] * (2 if large and block_m <= _ROWS_OF_DEEP and weight_bytes == 2 else 1)
        block_h = min(depth_bytes // weight_bytes, max(16, triton.next_power_of_2(depth)))
        row_blocks = triton.cdiv(rows, block_m)
        tiles = triton.cdiv(vocab, block_v)
        programs = min(tiles, max(1, processors.count // row_blocks))
        converted = block_m * block_h * weight_bytes if hidden_bytes != weight_bytes else 0
        shared = processors.shared_bytes - _TILE_END_BYTES - converted
        return cls(
            block_m=block_m,
            block_v=block_v,
            block_h=block_h,
            row_blocks=row_blocks,
            programs=programs,
            tiles=triton.cdiv(tiles, programs),
            block_p=triton.next_power_of_2(programs),
            num_warps=4 if block_m <= _ROWS_OF_WIDE else 8,
            num_stages=max(
                2, min(_MOST_STAGES, shared // (block_h * (block_v * weight_bytes + block_m * hidden_bytes)))
            ),
        )


class LmHead:
    """The head for one slot: built once with room for every program's winners, then capturable.

    ``rows`` is how many rows of each request are wanted: G of a draft, T of a target.
    """

    def __init__(self, setup: SlotSetup, rows: int) -> None:
        self._setup, self._rows = setup, rows
        self._device = torch.device(setup.device).type
        self._processors = Processors.of(setup)
        winners = setup.max_batch * rows * self._processors.count
        self._values = torch.empty(winners, dtype=torch.float32, device=setup.device)
        self._ids = torch.empty(winners, dtype=torch.int32, device=setup.device)

    def check(self, hidden: Tensor, lm_head_weight: Tensor, divisor: float, vocab_size: int) -> None:
        """Raise ValueError unless what both slots take is the seam's; ``hidden`` [..., H]."""
        require_setup("vocab_size", vocab_size, self._setup.vocab_size, "V")
        require_tensor("hidden", hidden, shape=tuple(hidden.shape), dtypes=FLOAT_DTYPES, device=self._device)
        if lm_head_weight.dim() != 2 or lm_head_weight.shape[0] < vocab_size:
            raise ValueError(
                f"lm_head_weight: shape {tuple(lm_head_weight.shape)}; must be [W, H], W at least V, {vocab_size}"
            )
        shape = (lm_head_weight.shape[0], hidden.shape[-1])
        require_tensor("lm_head_weight", lm_head_weight, shape=shape, dtypes=FLOAT_DTYPES, device=self._device)
        if not 2.0**-126 <= divisor <= 2.0**126:
            raise ValueError(f"divisor: {divisor}; must be 2**-126 to 2**126, so that 1 / divisor is an fp32 number")

    def run(
        self,
        *,
        hidden: Tensor,
        strides: tuple[int, int],
        first: int,
        batch: int,
        lm_head_weight: Tensor,
        divisor: float,
        verify_lens: Tensor | None,
        out_logits: Tensor | None,
        out_tokens: Tensor | None,
    ) -> None:
        """One launch, and another where tokens are wanted. Row t of request b lies at ``b, first + t`` by ``strides``;
        ``out_logits`` [B, rows, V], ``out_tokens`` [B, rows]. Checked before."""
        vocab, depth = self._setup.vocab_size, hidden.shape[-1]
        launch = _plan(
            self._setup.backend,
            batch * self._rows,
            vocab,
            depth,
            hidden.element_size(),
            lm_head_weight.element_size(),
            self._processors,
        )
        tiles = _descriptor(lm_head_weight, vocab, launch)
        lens = self._ids if verify_lens is None else verify_lens
        logits = lm_head_weight if out_logits is None else out_logits
        head_rows[(launch.row_blocks, launch.programs)](
            hidden,
            *strides,
            first,
            lm_head_weight if tiles is None else tiles,
            lm_head_weight.stride(0),
            lens,
            logits,
            *logits.stride()[:2],
            self._values,
            self._ids,
            _reciprocal(divisor),
            batch * self._rows,
            self._rows,
            vocab,
            H=depth,
            WEIGHT_DTYPE=_TRITON_DTYPES[lm_head_weight.dtype],
            HAS_LENS=verify_lens is not None,
            SCALED=divisor != 1.0,
            WRITE_LOGITS=out_logits is not None,
            WRITE_WINNERS=out_tokens is not None,
            DOT_IN_FP32=self._setup.backend is Backend.INTERPRETER,  # which has no bf16 arithmetic
            BY_DESCRIPTOR=tiles is not None,
            PROGRAMS=launch.programs,
            TILES=launch.tiles,
            BLOCK_M=launch.block_m,
            BLOCK_V=launch.block_v,
            BLOCK_H=launch.block_h,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
        if out_tokens is None:
            return
        head_tokens[(batch * self._rows,)](
            self._values,
            self._ids,
            lens,
            out_tokens,
            out_tokens.stride(0),
            self._rows,
            HAS_LENS=verify_lens is not None,
            PROGRAMS=launch.programs,
            BLOCK_P=launch.block_p,
            num_warps=1,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )


def _descriptor(weight: Tensor, vocab: int, launch: HeadLaunch) -> TensorDescriptor | None:
    """The first V rows for TMA, which asks for multiples of 16 bytes; None for other weights."""
    if not BY_DESCRIPTOR or weight.data_ptr() % 16 or weight.stride(0) * weight.element_size() % 16:
        return None
    shape, strides = [vocab, weight.shape[1]], [weight.stride(0), 1]
    return TensorDescriptor(weight, shape, strides, [launch.block_v, launch.block_h])


def _reciprocal(divisor: float) -> float:
    """1 / divisor of the divisor in fp32; the launch rounds it to fp32, to what a division in fp32 gives."""
    return 1.0 / float(struct.unpack("f", struct.pack("f", divisor))[0])


@lru_cache(maxsize=64)
def _plan(
    backend: Backend,
    rows: int,
    vocab: int,
    depth: int,
    hidden_bytes: int,
    weight_bytes: int,
    processors: Processors,
) -> HeadLaunch:
    return HeadLaunch.plan(
        backend=backend,
        rows=rows,
        vocab=vocab,
        depth=depth,
        hidden_bytes=hidden_bytes,
        weight_bytes=weight_bytes,
        processors=processors,
    )
