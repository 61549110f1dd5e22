"""Launches of `markov`: checks the arguments, holds the winners, picks tiles and grid."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_slots.common.checks import FLOAT_DTYPES, require_batch, require_setup, require_tensor, require_triton
from sgl_mega_slots.common.keys import signed_words
from sgl_mega_slots.common.options import ENABLE_FP_FUSION
from sgl_mega_slots.draft.markov.kernel import markov_finish, markov_step

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


# Two programs fit an SM of H200 (132 of them). Small in the interpreter, so that a program there takes several tiles.
_PROGRAMS = {Backend.KERNEL: 256, Backend.INTERPRETER: 2}
_W2_BYTES = {Backend.KERNEL: 32 * 1024, Backend.INTERPRETER: 0}
_STAGES_BYTES = 88 * 1024  # of the 99 KiB a program may have on sm_120, the least of the GPUs served


@dataclass(frozen=True)
class MarkovLaunch:
    """Tiles of a step's launch: BLOCK_B rows by BLOCK_V ids, BLOCK_R of the rank at a time."""

    block_b: int
    block_v: int
    block_r: int
    block_p: int  # winners of the step before that are read at a time
    programs: int  # along the vocabulary
    tiles: int  # a program
    num_warps: int
    num_stages: int

    @classmethod
    def plan(cls, *, backend: Backend, batch: int, vocab: int, rank: int, weight_bytes: int) -> MarkovLaunch:
        """Sizes for B requests; raises ValueError for a rank whose rows don't fit shared memory."""
        depth = max(16, triton.next_power_of_2(rank))
        block_b = min(64, max(16, triton.next_power_of_2(batch)))  # 16 rows: the smallest tensor-core tile
        while True:
            block_v = max(32, min(128, 4096 // block_b, _W2_BYTES[backend] // (depth * weight_bytes)))
            stage = (block_b + block_v) * depth * weight_bytes
            if stage <= _STAGES_BYTES:
                break
            if block_b == 16:
                largest = 1 << (_STAGES_BYTES // (48 * weight_bytes)).bit_length() - 1
                raise ValueError(
                    f"markov_w1: R {rank} of {weight_bytes} bytes each; must be at most {largest}, so that the weights "
                    f"of 16 rows and 32 ids fit {_STAGES_BYTES} bytes of shared memory"
                )
            block_b //= 2
        tiles = triton.cdiv(vocab, block_v)
        programs = min(_PROGRAMS[backend], tiles)
        return cls(
            block_b=block_b,
            block_v=block_v,
            # fp32 products run outside the tensor cores, where the whole depth of a tile sits in registers.
            block_r=min(depth, 32 if weight_bytes == 4 else 256),
            block_p=2048 // block_b,
            programs=programs,
            tiles=triton.cdiv(tiles, programs),
            num_warps=4 if block_b <= 32 else 8,
            num_stages=3 if 2 * stage <= _STAGES_BYTES else 2,
        )


class Markov:
    """`draft_block` as G + 1 launches; built once, then capturable."""

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "markov")
        self._setup = setup
        self._device = torch.device(setup.device).type
        winners = (2, setup.max_batch * _PROGRAMS[setup.backend])
        self._values = torch.empty(winners, dtype=torch.float32, device=setup.device)
        self._ids = torch.empty(winners, dtype=torch.int32, device=setup.device)

    def __call__(
        self,
        *,
        base_logits: Tensor,
        anchor_tokens: Tensor,
        markov_w1: Tensor,
        markov_w2: Tensor,
        temperatures: Tensor,
        noise_key: int,
        noise_offset: Tensor,
        out_draft_tokens: Tensor,
        out_step_logits: Tensor | None,
    ) -> None:
        """See :class:`sgl_mega_plugin.contract.DraftBlock`.

        Raises:
            ValueError: an argument's shape, dtype, device or stride is not the seam's.
        """
        self._check(
            base_logits,
            anchor_tokens,
            markov_w1,
            markov_w2,
            temperatures,
            noise_offset,
            out_draft_tokens,
            out_step_logits,
        )
        batch, gamma, vocab = base_logits.shape
        launch = _plan(self._setup.backend, batch, vocab, markov_w1.shape[1], markov_w1.element_size())
        logits = base_logits if out_step_logits is None else out_step_logits
        row_blocks = triton.cdiv(batch, launch.block_b)
        for step in range(gamma):
            markov_step[(launch.programs, row_blocks)](
                base_logits,
                base_logits.stride(0),
                base_logits.stride(1),
                anchor_tokens,
                markov_w1,
                markov_w1.stride(0),
                markov_w2,
                markov_w2.stride(0),
                temperatures,
                noise_offset,
                out_draft_tokens,
                out_draft_tokens.stride(0),
                logits,
                logits.stride(0),
                logits.stride(1),
                self._values,
                self._ids,
                self._values.stride(0),
                step,
                *signed_words(noise_key),
                batch,
                vocab,
                R=markov_w1.shape[1],
                PROGRAMS=launch.programs,
                TILES=launch.tiles,
                STEP_DTYPE=_TRITON_DTYPES[torch.promote_types(base_logits.dtype, markov_w1.dtype)],
                WRITE_LOGITS=out_step_logits is not None,
                DOT_IN_FP32=self._setup.backend is Backend.INTERPRETER,  # which has no bf16 arithmetic
                BLOCK_B=launch.block_b,
                BLOCK_V=launch.block_v,
                BLOCK_R=launch.block_r,
                BLOCK_P=launch.block_p,
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
                enable_fp_fusion=ENABLE_FP_FUSION,
            )
        markov_finish[(row_blocks,)](
            out_draft_tokens,
            out_draft_tokens.stride(0),
            self._values,
            self._ids,
            self._values.stride(0),
            gamma - 1,
            batch,
            PROGRAMS=launch.programs,
            BLOCK_B=launch.block_b,
            BLOCK_P=launch.block_p,
            num_warps=4,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )

    def _check(
        self,
        base_logits: Tensor,
        anchor_tokens: Tensor,
        markov_w1: Tensor,
        markov_w2: Tensor,
        temperatures: Tensor,
        noise_offset: Tensor,
        out_draft_tokens: Tensor,
        out_step_logits: Tensor | None,
    ) -> None:
        if base_logits.dim() != 3:
            raise ValueError(f"base_logits: shape {tuple(base_logits.shape)}; must be [B, G, V]")
        batch, gamma, vocab = base_logits.shape
        require_batch("base_logits", batch, self._setup.max_batch)
        require_setup("base_logits", gamma, self._setup.gamma, "G")
        require_setup("base_logits", vocab, self._setup.vocab_size, "V")
        rank = markov_w1.shape[-1]
        weights = (markov_w1.dtype,)
        step_dtype = torch.promote_types(base_logits.dtype, markov_w1.dtype)
        rows: list[tuple[str, Tensor, tuple[int, ...], tuple[torch.dtype, ...]]] = [
            ("base_logits", base_logits, (batch, gamma, vocab), FLOAT_DTYPES),
            ("anchor_tokens", anchor_tokens, (batch,), (torch.int64,)),
            ("markov_w1", markov_w1, (vocab, rank), FLOAT_DTYPES),
            ("markov_w2", markov_w2, (vocab, rank), weights),
            ("temperatures", temperatures, (batch,), (torch.float32,)),
            ("noise_offset", noise_offset, (1,), (torch.int64,)),
            ("out_draft_tokens", out_draft_tokens, (batch, gamma), (torch.int64,)),
        ]
        if out_step_logits is not None:
            rows.append(("out_step_logits", out_step_logits, (batch, gamma, vocab), (step_dtype,)))
        for name, value, shape, dtypes in rows:
            require_tensor(name, value, shape=shape, dtypes=dtypes, device=self._device)


@lru_cache(maxsize=64)
def _plan(backend: Backend, batch: int, vocab: int, rank: int, weight_bytes: int) -> MarkovLaunch:
    return MarkovLaunch.plan(backend=backend, batch=batch, vocab=vocab, rank=rank, weight_bytes=weight_bytes)
