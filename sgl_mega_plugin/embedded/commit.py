"""Where the draft's context KV gets written: at once, or staged at the accept and written by the next draft.

``decode`` says what happens; here is decided what that means for a commit that is still staged, by the rules of
``deferral``. Without slots for the deferred commit nothing is ever staged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import PADDING_SLOT
from sgl_mega_plugin.deferral import Deferral, Todo
from sgl_mega_plugin.embedded import stages
from sgl_mega_plugin.embedded.batch import Batch
from sgl_mega_plugin.embedded.draft import DraftModel
from sgl_mega_plugin.embedded.kv import Cache
from sgl_mega_plugin.embedded.runtime import Stages


class ContextWriter:
    """The draft's context KV of one engine."""

    def __init__(self, draft: DraftModel, cache: Cache, seams: Stages, *, rows: int, width: int) -> None:
        """``rows`` M, the largest B; ``width`` T."""
        self._draft, self._seams, self._width = draft, seams, width
        self._model: dict[str, Any] = {
            "k_norm_weights": draft.k_norm_weights,
            "cos_sin": draft.cos_sin,
            "neox": True,
            "location_map": None,
            "ring_rows": None,
            "ring_size": 0,
            "eps": draft.rms_eps,
            "kv_scales": None,
            "out_keys": cache.keys,
            "out_values": cache.values,
        }
        self._staging = _Staging(draft, rows, width) if seams.deferred else None

    def prefill(self, taps: Tensor, positions: Tensor, cache_locs: Tensor) -> None:
        """Write a prompt's rows, [1, N]. Slots are built for decode steps; a prompt is the engine's own business."""
        commit_lens = torch.tensor([positions.shape[1]], dtype=torch.int32, device=positions.device)
        stages.context_kv(
            projected_kv=self._project(taps),
            positions=positions,
            cache_locs=cache_locs,
            commit_lens=commit_lens,
            **self._model,
        )

    def step(self, batch: Batch, taps: Tensor, positions: Tensor, cache_locs: Tensor, commit_lens: Tensor) -> None:
        """Commit the rows t < ``commit_lens`` of a verify, now or by the next draft."""
        staging = self._staging
        if staging is None:
            self._seams.context_kv(
                projected_kv=self._project(taps),
                positions=positions,
                cache_locs=cache_locs,
                commit_lens=commit_lens,
                **self._model,
            )
            return
        self._carry_out(staging.deferral.before_verify())
        staging.projected_kv[: len(taps)] = self._project(taps)
        self._seams.kv_staging(
            cache_locs=cache_locs,
            positions=positions,
            commit_lens=commit_lens,
            out_cache_locs=staging.cache_locs,
            out_positions=staging.positions,
            out_commit_lens=staging.commit_lens,
        )
        staging.deferral.staged(batch.live)
        staging.owners = {table_row: row for row, table_row in enumerate(batch.table_rows)}

    def before_draft(self, rows: int) -> None:
        """A draft of B rows begins. Its head writes whether or not something is staged, as a captured one would."""
        if self._staging is None:
            return
        todo = self._staging.deferral.before_draft(rows)
        if todo is Todo.WRITE:  # more was staged than this draft has rows
            self._carry_out(todo)
        self._write(rows)

    def before_prefill(self) -> None:
        """A prompt is about to be written into slots that a request gave back."""
        if self._staging is not None:
            self._carry_out(self._staging.deferral.before_prefill())

    def forget(self, table_row: int) -> None:
        """A request leaves, finished or not, and its slots may get another owner: nothing of it is written any more."""
        staging = self._staging
        if staging is not None and table_row in staging.owners:
            for row in staging.deferral.drop([staging.owners.pop(table_row)]):
                staging.commit_lens[row] = 0

    def _carry_out(self, todo: Todo) -> None:
        if todo is Todo.WRITE and self._staging is not None:
            self._write(len(self._staging.commit_lens))

    def _write(self, rows: int) -> None:
        staging = self._staging
        if staging is None:
            raise RuntimeError("nothing can be staged here: no slot serves the deferred commit")
        self._seams.staged_kv(
            projected_kv=staging.projected_kv[: rows * self._width],
            positions=staging.positions[:rows],
            cache_locs=staging.cache_locs[:rows],
            out_commit_lens=staging.commit_lens[:rows],
            **self._model,
        )

    def _project(self, taps: Tensor) -> Tensor:
        return self._draft.context_kv(self._draft.project_context(taps))


class _Staging:
    """Buffers of fixed addresses for the commits of M requests, and what the host knows of them."""

    def __init__(self, draft: DraftModel, rows: int, width: int) -> None:
        config, weight = draft.config, draft.k_norm_weights
        shape = (rows * width, config.layers, 2, config.kv_heads, config.head_dim)
        self.projected_kv = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.positions = torch.zeros(rows, width, dtype=torch.int64, device=weight.device)
        self.cache_locs = torch.full_like(self.positions, PADDING_SLOT)
        self.commit_lens = torch.zeros(rows, dtype=torch.int32, device=weight.device)
        self.owners: dict[int, int] = {}  # table row of a request -> its row of the staging
        self.deferral = Deferral(rows)
        for size in range(1, rows + 1):
            self.deferral.captured(size)  # a draft of any size has the write at its head
