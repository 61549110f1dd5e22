"""A step's batch: what the host knows of its requests, the columns that it hands over, and the device's own rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from sgl_mega_plugin.embedded.request import WHOLE_VOCABULARY


@dataclass(frozen=True)
class BatchRow:
    """One live request of a step, as the host knows it."""

    table_row: int
    length: int  # L, committed tokens
    anchor: int
    temperature: float
    top_k: int  # 1 is greedy, WHOLE_VOCABULARY filters nothing
    top_p: float
    min_p: float
    key: int
    step: int  # of this request: what its random numbers count

    @property
    def sampled(self) -> bool:
        return self.top_k > 1 and self.temperature > 0

    @property
    def filtered(self) -> bool:
        """Whether some ids may have no mass."""
        return self.sampled and (self.top_k < WHOLE_VOCABULARY or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True)
class Batch:
    """A step's columns on the device, [B] each. Rows past the live ones are padding: verify length 0.

    ``seq_lens`` and ``anchors`` are the host's own: a speculative step finds both on the device, in the relay tables.
    """

    req_pool_indices: Tensor  # int64
    seq_lens: Tensor  # int64
    verify_lens: Tensor  # int32
    anchors: Tensor  # int64
    temperatures: Tensor  # fp32, as the requests have them
    top_ks: Tensor  # int32
    top_ps: Tensor  # fp32
    min_ps: Tensor  # fp32
    keys: Tensor  # int64
    steps: Tensor  # int64
    table_rows: tuple[int, ...]  # of the live rows
    sampled: bool  # whether any row is
    filtered: bool  # whether any row is
    longest: int  # the largest of seq_lens

    @property
    def size(self) -> int:
        """B"""
        return len(self.verify_lens)

    @property
    def live(self) -> int:
        return len(self.table_rows)

    @classmethod
    def build(cls, rows: Sequence[BatchRow], *, size: int, width: int, max_context: int, device: str) -> Batch:
        """``size`` B; ``width`` verify rows a request, fewer where the context ends."""

        def column(values: Sequence[float], dtype: torch.dtype, padding: float = 0) -> Tensor:
            pad = [padding] * (size - len(rows))
            return torch.tensor([*values, *pad], dtype=dtype, device=device)

        return cls(
            req_pool_indices=column([row.table_row for row in rows], torch.int64),
            seq_lens=column([row.length for row in rows], torch.int64),
            verify_lens=column([min(width, max_context - row.length) for row in rows], torch.int32),
            anchors=column([row.anchor for row in rows], torch.int64),
            temperatures=column([row.temperature for row in rows], torch.float32),
            top_ks=column([row.top_k for row in rows], torch.int32, padding=1),
            top_ps=column([row.top_p for row in rows], torch.float32, padding=1),
            min_ps=column([row.min_p for row in rows], torch.float32),
            keys=column([row.key for row in rows], torch.int64),
            steps=column([row.step for row in rows], torch.int64),
            table_rows=tuple(row.table_row for row in rows),
            sampled=any(row.sampled for row in rows),
            filtered=any(row.filtered for row in rows),
            longest=max(row.length for row in rows),
        )


class StepRows(NamedTuple):
    """Buffers of fixed addresses, one row a request, that a step's stages hand to each other."""

    temperatures: Tensor  # fp32, above 0
    greedy: Tensor  # bool
    step_temperatures: Tensor  # fp32, 0 on greedy rows
    positions: Tensor  # [B, T] int64
    cache_locs: Tensor  # [B, T] int64
    draft_ids: Tensor  # [B, G] int64
    seq_lens: Tensor  # int64
    anchors: Tensor  # int64
    kv_lens: Tensor  # int32
    page_table: Tensor  # [B, M] int32
    kv_indptr: Tensor  # [B + 1] int32

    @classmethod
    def allocate(cls, rows: int, gamma: int, pages: int, device: str) -> Self:
        def of(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        return cls(
            temperatures=of(torch.float32),
            greedy=of(torch.bool),
            step_temperatures=of(torch.float32),
            positions=of(torch.int64, gamma + 1),
            cache_locs=of(torch.int64, gamma + 1),
            draft_ids=of(torch.int64, gamma),
            seq_lens=of(torch.int64),
            anchors=of(torch.int64),
            kv_lens=of(torch.int32),
            page_table=of(torch.int32, pages),
            kv_indptr=torch.zeros(rows + 1, dtype=torch.int32, device=device),
        )

    def first(self, rows: int) -> StepRows:
        """The rows of a step of B = ``rows``."""
        columns = {name: column[:rows] for name, column in self._asdict().items()}
        return self._replace(**columns | {"kv_indptr": self.kv_indptr[: rows + 1]})
