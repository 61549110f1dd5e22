"""Two ranks of SGLang's DeepSeek-V4.1 epilogue over gloo, their logits a rounding apart; for processes of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

RANKS = 2
NOISE_SEEDS = (3, 4)  # by rank: without a broadcast the sampled accepts differ
ACCEPTED = (2, 5, 0)  # what rank 0's greedy accept takes of each row
#: Verify rows with a near tie, as (request, place): a draft that rank 0 takes, and the bonus after a whole block.
TIES = ((0, 0), (1, 5))


@dataclass
class Group:
    """What SGLang's tensor-parallel sync asks of a group."""

    world_size: int
    rank_in_group: int

    def broadcast(self, values: Tensor, src: int) -> None:
        dist.broadcast(values, src=src)


def outcomes(rank: int, folder: str, cases: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """Each case's greedy and sampled accept on this rank, and whether the one-kernel tail serves it.

    A case is the variables that are set for it. Blocks until the other rank has called it too.
    """
    from sglang.srt.speculative import spec_tp_sync

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    group, single = Group(RANKS, rank), spec_tp_sync.SpecTpSync
    spec_tp_sync.SpecTpSync = lambda _: single(group)
    try:
        return [_outcome(rank, case) for case in cases]
    finally:
        dist.destroy_process_group()


def _outcome(rank: int, case: dict[str, str]) -> dict[str, Any]:
    from engine_epilogue import Built, greedy
    from sglang.kernels.ops.speculative.dspark.blockwise_rejection import make_rejection_noise

    os.environ.update(case)
    try:
        built, io = Built(), _near_ties(rank)
        built.arm()
        greedy(built, io)
        found = {"greedy": built.outputs(), "one_kernel": built.epilogue._fused_accept_tail}
        return found | {"sampled": _sampled(io, make_rejection_noise(NOISE_SEEDS[rank], "cpu"))}
    finally:
        for name in case:
            del os.environ[name]


def _sampled(io: Any, noise: Any) -> dict[str, Any]:
    from engine_epilogue import PADDED, B, Built, region, sampler

    built = Built()
    built.arm()
    region(built, io, sampler(9), noise).run(bs=B - PADDED, target_logits=io.logits)
    outputs: dict[str, Any] = built.outputs()
    return outputs


def _near_ties(rank: int) -> Any:
    """A step in which the best two logits of the rows ``TIES`` lie one rounding apart, in the other order on rank 1."""
    from engine_epilogue import ROWS, VOCAB, step

    io = step(9, ACCEPTED)
    for request, place in TIES:
        row = io.logits[request * ROWS + place]
        best = int(row.argmax())
        row.fill_(0.0)
        row[best], row[(best + 1) % VOCAB] = (1 + 2**-23, 1.0) if rank == 0 else (1.0, 1 + 2**-23)
    return io
