"""Launches of `markov`: checks the arguments, holds what programs tell each other, picks tiles and grid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_mega_plugin.contract import Backend, SlotSetup
from sgl_mega_slots.common.checks import require_triton
from sgl_mega_slots.common.keys import signed_words
from sgl_mega_slots.common.options import ENABLE_FP_FUSION
from sgl_mega_slots.common.processors import Processors
from sgl_mega_slots.draft.markov.arguments import Mixer, check_arguments
from sgl_mega_slots.draft.markov.kernel import EMPTY, markov_steps
from sgl_mega_slots.draft.markov.mixer.kernel import mixer_hidden, mixer_step
from sgl_mega_slots.draft.markov.reference import step_dtype_of

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_MOST_STAGES, _MIXER_WARPS = 4, 4
_SCRATCH_BYTES = 1024  # of barriers and alignment, beside tiles and changes of layout
_LOOKS = 1 << 22  # at other programs' words in a launch, 0.7 us and more each: 3 s at the least


@dataclass(frozen=True)
class MarkovLaunch:
    """Tiles of the vocabulary's launch: BLOCK_V ids by BLOCK_B rows, BLOCK_R of the rank at a time."""

    block_b: int
    block_v: int
    block_r: int
    block_p: int  # words of the step before that are read at a time
    programs: int  # along the vocabulary
    tiles: int  # a program, in a step
    num_warps: int
    num_stages: int
    one_launch: bool  # all steps in one: then every program has to be on the GPU at once

    @classmethod
    def plan(
        cls, *, backend: Backend, batch: int, vocab: int, rank: int, weight_bytes: int, processors: Processors
    ) -> MarkovLaunch:
        """Sizes for B requests; raises ValueError for a rank whose rows don't fit shared memory."""
        depth = max(16, triton.next_power_of_2(rank))
        interpreted = backend is Backend.INTERPRETER
        # fp32 products run outside the tensor cores, where the whole depth of a tile sits in registers.
        whole = weight_bytes <= 2
        # 8 columns: the narrowest tensor-core tile
        block_b = min(64 if whole else 16, max(8, triton.next_power_of_2(batch)))
        block_v, num_stages = (64 if interpreted else 32), 1
        if whole and not interpreted:
            block_b, block_v, num_stages = _tile(block_b, depth, rank, processors.shared_bytes)
        row_blocks = triton.cdiv(batch, block_b)
        tiles = triton.cdiv(vocab, block_v)
        resident = processors.count if whole else 2 * processors.count  # 128 threads of 255 registers: two fit
        programs = max(1, min(resident // row_blocks, tiles))
        # 8 elements a thread; at 64 rows 16, for 128 registers a thread would not hold them and its part of the rows.
        num_warps = 4 if block_v * block_b < 1024 else 16 if block_v * block_b >= 4096 and block_b < 64 else 8
        return cls(
            block_b=block_b,
            block_v=block_v,
            block_r=depth if whole else 32,
            block_p=_words_at_a_time(block_b, programs, num_warps),
            programs=programs,
            tiles=triton.cdiv(tiles, programs),
            num_warps=num_warps,
            num_stages=num_stages,
            one_launch=not interpreted and programs * row_blocks <= resident,
        )


def _words_at_a_time(block_b: int, programs: int, num_warps: int) -> int:
    """Words of a row that are read at a time: all, or as many as leave each warp 512.

    At least one a thread. With fewer, warps would read the same words each for itself, and act on what they saw: one
    that looked before the last word was there went on without it, where another one of its program had it.
    """
    words: int = min(triton.next_power_of_2(programs), 512 * num_warps // block_b)
    return max(words, 32 * num_warps // block_b)


def _tile(most_rows: int, depth: int, rank: int, shared_bytes: int) -> tuple[int, int, int]:
    """Rows and ids of a tile of 16-bit weights, and stages of the pipeline.

    Large tiles, for a tile's end costs the same at every size; all rows, for each block of rows reads all weights.
    """
    block_b = most_rows
    while block_b >= 8:
        for block_v, fewest in ((128, 3), (64, 3), (64, 2), (32, 2), (16, 2)):
            left = shared_bytes - _SCRATCH_BYTES - 2 * depth * block_b - max(4096, 4 * block_v * block_b)
            stages = min(_MOST_STAGES, left // (2 * depth * block_v))
            if stages >= fewest:
                return block_b, block_v, stages
        block_b //= 2
    raise ValueError(
        f"markov_w1: R {rank}; two tiles of 16 ids and the rows of 8 requests need more shared memory than the "
        f"{shared_bytes} bytes that a program may have here: leave this slot out for this head"
    )


@dataclass(frozen=True)
class _MixerBuffers:
    """What the mixer's launches leave: hidden part [max_batch * G, OUT] fp32, states [2, max_batch, R], factors."""

    mixed: Tensor
    states: Tensor
    latent: Tensor


class Markov:
    """`draft_block` in one launch; with a mixer in 2G + 1. Built once, then capturable.

    The one launch is cooperative: its programs wait for each other's winners. Of the last of a mixer's launches one
    program waits for the others. A program that has looked in vain for some seconds ends its launch with the assertion
    :data:`~sgl_mega_slots.draft.markov.kernel.WAIT`, a CUDA error that the process doesn't survive.
    """

    def __init__(self, setup: SlotSetup) -> None:
        require_triton(setup, "markov")
        self._setup = setup
        self._interpreted = setup.backend is Backend.INTERPRETER
        self._processors = Processors.of(setup)
        words = setup.gamma * setup.max_batch * 2 * self._processors.count
        self._words = torch.full((words,), EMPTY.value, dtype=torch.int64, device=setup.device)
        self._block_o = 32 if self._interpreted else 16  # outputs of a mixer's program
        self._mixers: dict[tuple[int, int, torch.dtype], _MixerBuffers] = {}

    def __call__(
        self,
        *,
        base_logits: Tensor,
        anchor_tokens: Tensor,
        markov_w1: Tensor,
        markov_w2: Tensor,
        draft_hidden: Tensor | None,
        mixer_weight: Tensor | None,
        mixer_bias: Tensor | None,
        temperatures: Tensor,
        noise_key: int,
        noise_offset: Tensor,
        out_draft_tokens: Tensor,
        out_step_logits: Tensor | None,
        out_features: Tensor | None,
    ) -> None:
        """See :class:`sgl_mega_plugin.contract.DraftBlock`.

        Raises:
            ValueError: an argument's shape, dtype, device or stride is not the seam's.
            RuntimeError: this process has too few multiprocessors for all programs to run at once.
        """
        mixer = check_arguments(
            self._setup,
            base_logits=base_logits,
            anchor_tokens=anchor_tokens,
            markov_w1=markov_w1,
            markov_w2=markov_w2,
            draft_hidden=draft_hidden,
            mixer_weight=mixer_weight,
            mixer_bias=mixer_bias,
            temperatures=temperatures,
            noise_offset=noise_offset,
            out_draft_tokens=out_draft_tokens,
            out_step_logits=out_step_logits,
            out_features=out_features,
        )
        batch, gamma, vocab = base_logits.shape
        launch = _plan(
            self._setup.backend, batch, vocab, markov_w1.shape[1], markov_w1.element_size(), self._processors
        )
        buffers = None if mixer is None else self._buffers(mixer, markov_w1)
        logits = base_logits if out_step_logits is None else out_step_logits
        row_blocks = triton.cdiv(batch, launch.block_b)
        if mixer is not None and buffers is not None:
            self._hidden(mixer, buffers, batch)
        one = launch.one_launch and mixer is None
        for step in range(1 if one else gamma):
            if mixer is not None and buffers is not None:
                self._mix(mixer, buffers, launch, step, anchor_tokens, markov_w1, vocab, out_draft_tokens, out_features)
            features = None if mixer is not None else out_features  # those the mixer writes
            latent = markov_w1 if buffers is None else buffers.latent
            with _all_at_once(launch, row_blocks, self._processors):
                markov_steps[(launch.programs, row_blocks)](
                    base_logits,
                    base_logits.stride(0),
                    base_logits.stride(1),
                    anchor_tokens,
                    anchor_tokens.stride(0),
                    markov_w1,
                    markov_w1.stride(0),
                    markov_w2,
                    markov_w2.stride(0),
                    latent,
                    latent.stride(0),
                    temperatures,
                    noise_offset,
                    out_draft_tokens,
                    out_draft_tokens.stride(0),
                    logits,
                    logits.stride(0),
                    logits.stride(1),
                    *_rows_of(features, markov_w1),
                    self._words,
                    step,
                    *signed_words(noise_key),
                    batch,
                    vocab,
                    R=markov_w1.shape[1],
                    G=gamma,
                    STEPS=gamma if one else 1,
                    PROGRAMS=launch.programs,
                    TILES=launch.tiles,
                    STEP_DTYPE=_TRITON_DTYPES[step_dtype_of(base_logits, markov_w1, out_step_logits)],
                    LATENT=mixer is not None,
                    WRITE_LOGITS=out_step_logits is not None,
                    WRITE_FEATURES=features is not None,
                    INTERPRETED=self._interpreted,
                    BLOCK_B=launch.block_b,
                    BLOCK_V=launch.block_v,
                    BLOCK_R=launch.block_r,
                    BLOCK_P=launch.block_p,
                    LOOKS=_LOOKS,
                    STAGES=launch.num_stages,
                    num_warps=launch.num_warps,
                    num_stages=launch.num_stages,
                    launch_cooperative_grid=one,
                    enable_fp_fusion=ENABLE_FP_FUSION,
                    debug=not self._interpreted,  # keeps the kernel's assertion
                    sanitize_overflow=False,
                )

    def _buffers(self, mixer: Mixer, markov_w1: Tensor) -> _MixerBuffers:
        """Made on the first call with a head; a later call, which may be captured, finds them."""
        rank, outputs = markov_w1.shape[1], mixer.weight.shape[0]
        key = (rank, outputs, markov_w1.dtype)
        if key not in self._mixers:
            most = self._setup.max_batch
            new = markov_w1.new_empty
            self._mixers[key] = _MixerBuffers(
                mixed=new(most * self._setup.gamma * outputs, dtype=torch.float32),
                states=new(2 * most * rank),
                latent=new(most, rank),
            )
        return self._mixers[key]

    def _hidden(self, mixer: Mixer, buffers: _MixerBuffers, batch: int) -> None:
        outputs, rows = mixer.weight.shape[0], batch * self._setup.gamma
        block_n = min(64, max(8, triton.next_power_of_2(rows)))
        mixer_hidden[(triton.cdiv(outputs, self._block_o), triton.cdiv(rows, block_n))](
            *_rows_of(mixer.hidden, mixer.hidden),
            mixer.weight,
            mixer.weight.stride(0),
            mixer.weight if mixer.bias is None else mixer.bias,
            buffers.mixed,
            rows,
            G=self._setup.gamma,
            H=mixer.hidden.shape[2],
            OUT=outputs,
            COLUMN=mixer.hidden_column,
            HAS_BIAS=mixer.bias is not None,
            INTERPRETED=self._interpreted,
            BLOCK_N=block_n,
            BLOCK_O=self._block_o,
            BLOCK_H=256 // mixer.weight.element_size(),
            STAGES=1 if self._interpreted else 4,
            num_warps=4,
            num_stages=4,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )

    def _mix(
        self,
        mixer: Mixer,
        buffers: _MixerBuffers,
        launch: MarkovLaunch,
        step: int,
        anchor_tokens: Tensor,
        markov_w1: Tensor,
        vocab: int,
        out_draft_tokens: Tensor,
        out_features: Tensor | None,
    ) -> None:
        batch, rank = anchor_tokens.shape[0], markov_w1.shape[1]
        mixer_step[(triton.cdiv(rank, self._block_o), triton.cdiv(batch, launch.block_b))](
            anchor_tokens,
            anchor_tokens.stride(0),
            markov_w1,
            markov_w1.stride(0),
            mixer.weight,
            mixer.weight.stride(0),
            buffers.mixed,
            buffers.states,
            buffers.latent,
            out_draft_tokens,
            out_draft_tokens.stride(0),
            *_rows_of(out_features, markov_w1),
            self._words,
            step,
            batch,
            vocab,
            R=rank,
            G=self._setup.gamma,
            RNN=mixer.recurrent,
            OUT=mixer.weight.shape[0],
            COLUMN=mixer.token_column,
            PROGRAMS=launch.programs,
            WRITE_FEATURES=out_features is not None,
            INTERPRETED=self._interpreted,
            BLOCK_B=launch.block_b,
            BLOCK_O=self._block_o,
            BLOCK_R=min(max(16, triton.next_power_of_2(rank)), 256 // mixer.weight.element_size()),
            BLOCK_P=_words_at_a_time(launch.block_b, launch.programs, _MIXER_WARPS),
            num_warps=_MIXER_WARPS,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )


@contextmanager
def _all_at_once(launch: MarkovLaunch, row_blocks: int, processors: Processors) -> Iterator[None]:
    """Turns the driver's refusal of a cooperative launch into an error that says why there is no room."""
    try:
        yield
    except RuntimeError as error:
        if "cooperative" not in str(error):
            raise
        raise RuntimeError(
            f"markov: {launch.programs} x {row_blocks} programs can't all run at once, and they wait for each other "
            f"({error}). They were counted for the {processors.count} multiprocessors of the GPU; a process that has "
            "fewer of them, as with MPS or green contexts, can't use this slot: switch it off there"
        ) from error


def _rows_of(tensor: Tensor | None, otherwise: Tensor) -> tuple[Any, int, int]:
    """A tensor [B, G, ..] with its strides; where there is none, one of its dtype that the kernel does not touch."""
    return (otherwise, 0, 0) if tensor is None else (tensor, tensor.stride(0), tensor.stride(1))


@lru_cache(maxsize=64)
def _plan(
    backend: Backend, batch: int, vocab: int, rank: int, weight_bytes: int, processors: Processors
) -> MarkovLaunch:
    return MarkovLaunch.plan(
        backend=backend, batch=batch, vocab=vocab, rank=rank, weight_bytes=weight_bytes, processors=processors
    )
