"""What a folded accept leaves, at fixed addresses in one piece of memory, and snapshots of it.

The host reads a step's results by an asynchronous copy that may run after the next replay has begun. So what leaves
the graph is a snapshot: one copy into the next of a few rings, whose views are made once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Steps whose results live at a time. SGLang has at most two in flight: the one that runs and the one it reads.
SNAPSHOTS = 4


@dataclass(frozen=True)
class Accepted:
    """The results of an accept for B requests."""

    tokens: Tensor  # [B, T] int64: accepted drafts, bonus, zeros
    bonus_tokens: Tensor  # [B] int64
    new_seq_lens: Tensor  # [B] int64
    correct_lens: Tensor  # [B] int32
    commit_lens: Tensor  # [B] int32
    cap_trim_lens: Tensor  # [B] int32, zeros: static verify trims nothing

    def rows(self, batch: int) -> Accepted:
        """The first ``batch`` requests."""
        return Accepted(**{name: value[:batch] for name, value in vars(self).items()})


class AcceptBuffers:
    """One accept's results in fixed memory, and a ring of snapshots."""

    def __init__(self, *, max_batch: int, rows: int, device: str) -> None:
        self._memory = [_memory(max_batch, rows, device) for _ in range(1 + SNAPSHOTS)]
        self._views = [_views(memory, max_batch, rows) for memory in self._memory]
        self._cut: dict[tuple[int, int], Accepted] = {}
        self._last = 0

    def live(self, batch: int) -> Accepted:
        """Where the graph writes the results of ``batch`` requests."""
        return self._rows(0, batch)

    def snapshot(self, batch: int) -> Accepted:
        """A copy of the results so far, on the current stream; it holds for ``SNAPSHOTS`` steps."""
        self._last = self._last % SNAPSHOTS + 1
        self._memory[self._last].copy_(self._memory[0])
        return self._rows(self._last, batch)

    def _rows(self, index: int, batch: int) -> Accepted:
        key = (index, batch)
        if key not in self._cut:
            self._cut[key] = self._views[index].rows(batch)
        return self._cut[key]


def _memory(max_batch: int, rows: int, device: str) -> Tensor:
    """int64 words for T + 2 int64 and 3 int32 a request."""
    return torch.zeros(max_batch * (rows + 2) + (3 * max_batch + 1) // 2, dtype=torch.int64, device=device)


def _views(memory: Tensor, max_batch: int, rows: int) -> Accepted:
    tokens, bonus, lens, rest = memory.split([max_batch * rows, max_batch, max_batch, (3 * max_batch + 1) // 2], dim=0)
    words = rest.view(torch.int32)
    return Accepted(
        tokens=tokens.view(max_batch, rows),
        bonus_tokens=bonus,
        new_seq_lens=lens,
        correct_lens=words[:max_batch],
        commit_lens=words[max_batch : 2 * max_batch],
        cap_trim_lens=words[2 * max_batch : 3 * max_batch],
    )
