"""The forwards of the embedded engine: prefill, a plain step, a speculative step.

Device work only: the batch comes in as tensors, and what a step committed goes out as host
lists. Stages are called through their seams; ``engine`` decides who is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import PADDING_SLOT, ContextKv
from sgl_mega_plugin.embedded import stages
from sgl_mega_plugin.embedded.attention import PagedAttention
from sgl_mega_plugin.embedded.draft import DraftModel
from sgl_mega_plugin.embedded.kv import Cache, PagedKv, Row
from sgl_mega_plugin.embedded.runtime import Stages
from sgl_mega_plugin.embedded.sampling import draw, greedy, mix, probabilities, uniforms
from sgl_mega_plugin.embedded.target import TargetModel

_ACCEPT_KEY = 1  # mixed into the noise key, whose own numbers are the drafts'
PREFILL_CHUNK = 512  # prompt tokens a forward: bounds the scores at 512 x context a head


@dataclass(frozen=True)
class BatchRow:
    """One live request of a step, as the host knows it."""

    table_row: int
    length: int  # L, committed tokens
    anchor: int
    temperature: float
    key: int
    step: int  # of this request: what its random numbers count


@dataclass(frozen=True)
class Batch:
    """A step's inputs on the device, [B] each. Rows past the live ones are padding: verify length 0."""

    req_pool_indices: Tensor  # int64
    seq_lens: Tensor  # int32
    verify_lens: Tensor  # int32
    anchors: Tensor  # int64
    temperatures: Tensor  # fp32
    keys: Tensor  # int64
    steps: Tensor  # int64
    live: int
    sampled: tuple[int, ...]  # rows with a temperature
    longest: int  # the largest of seq_lens

    @classmethod
    def build(cls, rows: Sequence[BatchRow], *, size: int, width: int, max_context: int, device: str) -> Batch:
        """``size`` B; ``width`` verify rows a request, fewer where the context ends."""
        pad = [0] * (size - len(rows))

        def column(values: list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values + pad, dtype=dtype, device=device)

        return cls(
            req_pool_indices=column([row.table_row for row in rows], torch.int64),
            seq_lens=column([row.length for row in rows], torch.int32),
            verify_lens=column([min(width, max_context - row.length) for row in rows], torch.int32),
            anchors=column([row.anchor for row in rows], torch.int64),
            temperatures=torch.tensor([row.temperature for row in rows] + pad, dtype=torch.float32, device=device),
            keys=column([row.key for row in rows], torch.int64),
            steps=column([row.step for row in rows], torch.int64),
            live=len(rows),
            sampled=tuple(index for index, row in enumerate(rows) if row.temperature > 0),
            longest=max(row.length for row in rows),
        )


@dataclass(frozen=True)
class Committed:
    """What a step left: per live row the new tokens (bonus last) and the new length L."""

    tokens: list[list[int]]
    lengths: list[int]


@dataclass
class _Accept:
    """Outputs of the accept stage."""

    correct: Tensor  # [B] int32
    bonus: Tensor  # [B] int64
    commit: Tensor  # [B] int32
    new_lens: Tensor  # [B] int32
    tokens: Tensor  # [B, T] int64


class Decoder:
    """Runs forwards of one target and, if speculative, its draft, over one KV memory."""

    def __init__(
        self,
        target: TargetModel,
        draft: DraftModel | None,
        kv: PagedKv,
        seams: Stages,
        *,
        gamma: int,
        max_context: int,
        device: str,
    ) -> None:
        self._target, self._draft, self._kv, self._seams = target, draft, kv, seams
        self._gamma, self._max_context, self._device = gamma, max_context, device
        self._k_norm_weights = draft.k_norm_weights if draft is not None else None

    def prefill(self, row: Row, ids: Sequence[int]) -> Tensor:
        """Write the prompt's KV, the draft's context included; logits [V] after its last token."""
        logits = torch.empty(0)
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = torch.tensor(ids[start : start + PREFILL_CHUNK], device=self._device)
            positions = torch.arange(start, start + len(chunk), device=self._device)
            locations = self._kv.req_to_token[row.index, positions].long()
            indices = torch.tensor([row.index], device=self._device)
            end = start + len(chunk)
            attend = PagedAttention(
                self._kv.target,
                req_to_token=self._kv.req_to_token,
                req_pool_indices=indices,
                positions=positions.unsqueeze(0),
                cache_locs=locations.unsqueeze(0),
                kv_lens=torch.tensor([end], device=self._device),
                longest=end,
                causal=True,
            )
            last = torch.tensor([len(chunk) - 1], device=self._device)
            logits, taps = self._target(chunk, positions, attend, rows=last)
            commit = torch.tensor([len(chunk)], dtype=torch.int32, device=self._device)
            # Slots are built for decode steps, T = G + 1; a prompt is the engine's own business.
            self._commit(stages.context_kv, taps, positions.unsqueeze(0), locations.unsqueeze(0), commit)
        return logits[0]

    def pick(self, logits: Tensor, temperatures: Tensor, keys: Tensor, steps: Tensor, *, sampled: bool) -> list[int]:
        """Tokens drawn from ``logits`` [B, V] by each row's own numbers; argmax at temperature 0."""
        if not sampled:
            chosen: list[int] = greedy(logits).tolist()
            return chosen
        ids: list[int] = draw(probabilities(logits, temperatures), uniforms(keys, steps)).tolist()
        return ids

    def plain_step(self, batch: Batch) -> Committed:
        """One token a request, without draft or seams."""
        positions = batch.seq_lens.long().unsqueeze(1)
        locations = self._kv.req_to_token[batch.req_pool_indices].long().gather(1, positions)
        locations = torch.where(batch.verify_lens.unsqueeze(1) > 0, locations, PADDING_SLOT)
        attend = self._attention(self._kv.target, batch, positions, locations, causal=True)
        logits, _ = self._target(batch.anchors, positions.flatten(), attend)
        tokens = self.pick(logits, batch.temperatures, batch.keys, batch.steps, sampled=bool(batch.sampled))
        lengths: list[int] = (batch.seq_lens + 1).tolist()
        return Committed([[token] for token in tokens[: batch.live]], lengths[: batch.live])

    def speculative_step(self, batch: Batch, noise_key: int, noise_offset: Tensor) -> Committed:
        """Draft a block, verify it, commit what stands. The caller advances ``noise_offset`` [1]."""
        size, width = batch.anchors.shape[0], self._gamma + 1
        positions = torch.empty(size, width, dtype=torch.int64, device=self._device)
        locations, draft_ids = torch.empty_like(positions), torch.empty_like(positions[:, 1:])
        self._seams.step_inputs(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self._kv.req_to_token,
            seq_lens=batch.seq_lens,
            verify_lens=batch.verify_lens,
            anchor_tokens=batch.anchors,
            mask_token=self._drafter.config.mask_token,
            max_positions=self._max_context,
            out_positions=positions,
            out_cache_locs=locations,
            out_draft_ids=draft_ids,
        )
        drafts, step_logits = self._propose(batch, positions, locations, draft_ids, noise_key, noise_offset)
        candidates = torch.cat([batch.anchors.unsqueeze(1), drafts], dim=1)
        attend = self._attention(self._kv.target, batch, positions, locations, causal=True)
        logits, taps = self._target(candidates.flatten(), positions.flatten(), attend)
        accept = self._accept(batch, candidates, logits, step_logits, noise_key, noise_offset)
        self._commit(self._seams.context_kv, taps, positions, locations, accept.commit)
        rows: list[list[int]] = accept.tokens.tolist()
        commits: list[int] = accept.commit.tolist()
        lengths: list[int] = accept.new_lens.tolist()
        tokens = [row[:commit] for row, commit in zip(rows, commits, strict=True)]
        return Committed(tokens[: batch.live], lengths[: batch.live])

    def _propose(
        self,
        batch: Batch,
        positions: Tensor,
        locations: Tensor,
        draft_ids: Tensor,
        noise_key: int,
        noise_offset: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Drafted tokens [B, G], and the step logits [B, G, V] if any row is sampled."""
        draft, width = self._drafter, self._gamma
        positions, locations = positions[:, :width], locations[:, :width]
        attend = self._attention(self._kv.draft, batch, positions, locations, causal=False)
        hidden = draft(self._target.embed(draft_ids.flatten()), positions.flatten(), attend)
        base = (hidden @ self._target.lm_head_weight.T).view(*draft_ids.shape, -1)
        step_logits = None
        if batch.sampled:
            step_logits = torch.empty_like(base, dtype=torch.promote_types(base.dtype, draft.markov_w1.dtype))
        drafts = torch.empty_like(draft_ids)
        self._seams.draft_block(
            base_logits=base,
            anchor_tokens=batch.anchors,
            markov_w1=draft.markov_w1,
            markov_w2=draft.markov_w2,
            temperatures=batch.temperatures,
            noise_key=noise_key,
            noise_offset=noise_offset,
            out_draft_tokens=drafts,
            out_step_logits=step_logits,
        )
        return drafts, step_logits

    def _accept(
        self,
        batch: Batch,
        candidates: Tensor,
        logits: Tensor,
        step_logits: Tensor | None,
        noise_key: int,
        noise_offset: Tensor,
    ) -> _Accept:
        """One seam for the whole batch: the greedy one where no row is sampled, else the sampled one."""
        out = _Accept(
            correct=torch.empty_like(batch.verify_lens),
            bonus=torch.empty_like(batch.anchors),
            commit=torch.empty_like(batch.verify_lens),
            new_lens=torch.empty_like(batch.seq_lens),
            tokens=torch.empty_like(candidates),
        )
        block: dict[str, Any] = {
            "candidates": candidates,
            "target_logits": logits,
            "seq_lens": batch.seq_lens,
            "verify_lens": batch.verify_lens,
            "out_correct_lens": out.correct,
            "out_bonus_tokens": out.bonus,
            "out_commit_lens": out.commit,
            "out_new_seq_lens": out.new_lens,
            "out_tokens": out.tokens,
        }
        if not batch.sampled:
            self._seams.greedy_accept(**block)
            return out
        self._seams.sampled_accept(
            **block,
            draft_logits=step_logits,
            target_temperatures=batch.temperatures,
            draft_temperatures=batch.temperatures,
            noise_key=mix(noise_key, _ACCEPT_KEY),
            noise_offset=noise_offset,
        )
        return out

    def _commit(
        self, context_kv: ContextKv, taps: Tensor, positions: Tensor, locations: Tensor, commit_lens: Tensor
    ) -> None:
        """Write the draft's context KV of rows t < ``commit_lens`` [B]; nothing without a draft."""
        if self._draft is None or self._kv.draft is None or self._k_norm_weights is None:
            return
        context_kv(
            projected_kv=self._draft.context_kv(self._draft.project_context(taps)),
            k_norm_weights=self._k_norm_weights,
            cos_sin=self._draft.cos_sin,
            positions=positions,
            cache_locs=locations,
            commit_lens=commit_lens,
            eps=self._draft.rms_eps,
            out_keys=self._kv.draft.keys,
            out_values=self._kv.draft.values,
        )

    def _attention(
        self, cache: Cache | None, batch: Batch, positions: Tensor, locations: Tensor, *, causal: bool
    ) -> PagedAttention:
        if cache is None:
            raise RuntimeError("this engine was built without speculation: it has no draft cache")
        width = positions.shape[1]
        kv_lens = (batch.seq_lens + width).clamp_max(self._max_context)
        return PagedAttention(
            cache,
            req_to_token=self._kv.req_to_token,
            req_pool_indices=batch.req_pool_indices,
            positions=positions,
            cache_locs=locations,
            kv_lens=torch.where(batch.verify_lens > 0, kv_lens, 0),
            longest=min(batch.longest + width, self._max_context),
            causal=causal,
        )

    @property
    def _drafter(self) -> DraftModel:
        if self._draft is None:
            raise RuntimeError("this engine was built without speculation: it has no draft")
        return self._draft
