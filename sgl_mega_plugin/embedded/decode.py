"""The forwards of the embedded engine: prefill, a plain step, a speculative step.

Device work only: the batch comes in as tensors, and what a step committed goes out as host
lists. Stages are called through their seams; ``engine`` decides who is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgl_mega_plugin.contract import PADDING_SLOT, AttentionMetadata, SamplingCutoffs, StepParams
from sgl_mega_plugin.embedded import stages
from sgl_mega_plugin.embedded.attention import PagedAttention
from sgl_mega_plugin.embedded.batch import Batch, StepRows
from sgl_mega_plugin.embedded.commit import ContextWriter
from sgl_mega_plugin.embedded.draft import DraftModel
from sgl_mega_plugin.embedded.kv import Cache, PagedKv, Row
from sgl_mega_plugin.embedded.runtime import Stages
from sgl_mega_plugin.embedded.sampling import draw, greedy, mix, probabilities, uniforms
from sgl_mega_plugin.embedded.target import TargetModel

_ACCEPT_KEY = 1  # mixed into the noise key, whose own numbers are the drafts'
PREFILL_CHUNK = 512  # prompt tokens a forward: bounds the scores at 512 x context a head


@dataclass(frozen=True)
class Committed:
    """What a step left: per live row the new tokens (bonus last) and the new length L."""

    tokens: list[list[int]]
    lengths: list[int]


class _Relay(NamedTuple):
    """What each table row's request goes on from: [Q] int64, written by the device."""

    lens: Tensor
    tokens: Tensor


class _Accept(NamedTuple):
    """Outputs of the accept stage."""

    correct: Tensor  # [B] int32
    bonus: Tensor  # [B] int64
    commit: Tensor  # [B] int32
    new_lens: Tensor  # [B] int64
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
        max_rows: int,
        max_context: int,
        device: str,
    ) -> None:
        """``max_rows``: the largest B of a step. ``gamma`` is 0 without a draft."""
        self._target, self._draft, self._kv, self._seams = target, draft, kv, seams
        self._gamma, self._max_context, self._device = gamma, max_context, device
        table_rows, columns = kv.req_to_token.shape
        self._rows = StepRows.allocate(max_rows, gamma, -(-columns // kv.allocator.page_size), device)
        self._relay = _Relay(*torch.zeros(2, table_rows, dtype=torch.int64, device=device))
        self._context = None
        if draft is not None and kv.draft is not None:
            self._context = ContextWriter(draft, kv.draft, seams, rows=max_rows, width=gamma + 1)

    def prefill(self, row: Row, ids: Sequence[int]) -> Tensor:
        """Write the prompt's KV, the draft's context included; logits [V] after its last token."""
        if self._context is not None:
            self._context.before_prefill()
        hidden = torch.empty(0)
        indices = torch.tensor([row.index], device=self._device)
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = torch.tensor(ids[start : start + PREFILL_CHUNK], device=self._device)
            positions = torch.arange(start, start + len(chunk), device=self._device).unsqueeze(0)
            locations = self._kv.req_to_token[row.index, positions].long()
            attend = self._attention(
                stages.attention_metadata,
                self._kv.target,
                indices,
                torch.tensor([start], device=self._device),
                torch.ones(1, dtype=torch.int32, device=self._device),
                positions,
                locations,
                longest=start + len(chunk),
            )
            hidden, taps = self._target.hidden(chunk, positions.flatten(), attend)
            if self._context is not None:
                self._context.prefill(taps, positions, locations)
        return self._target.logits(hidden[-1])

    def begin(self, row: Row, length: int, token: int) -> None:
        """Hand a request of ``length`` tokens and its first new one to the steps; later ones relay both themselves."""
        self._relay.lens[row.index], self._relay.tokens[row.index] = length, token

    def release(self, row: Row) -> None:
        """A request leaves; its row and its slots may be given away after this."""
        if self._context is not None:
            self._context.forget(row.index)

    def pick(self, logits: Tensor, batch: Batch) -> list[int]:
        """A token for each row of ``logits`` [B, V], drawn by the row's own numbers; argmax on greedy rows."""
        if not batch.sampled:
            chosen: list[int] = greedy(logits).tolist()
            return chosen
        temperatures = self._params(stages.step_params, batch, None).step_temperatures
        every = torch.ones_like(batch.verify_lens)
        cutoffs = self._cutoffs(stages.sampling_cutoffs, logits, batch, temperatures, every)
        if cutoffs is not None:
            logits = logits.masked_fill(logits < cutoffs.unsqueeze(1), -torch.inf)
        ids: list[int] = draw(probabilities(logits, temperatures), uniforms(batch.keys, batch.steps)).tolist()
        return ids

    def plain_step(self, batch: Batch) -> Committed:
        """One token a request, without draft or slots."""
        positions = batch.seq_lens.unsqueeze(1)
        locations = self._kv.req_to_token[batch.req_pool_indices].long().gather(1, positions)
        locations = torch.where(batch.verify_lens.unsqueeze(1) > 0, locations, PADDING_SLOT)
        attend = self._attention(
            stages.attention_metadata,
            self._kv.target,
            batch.req_pool_indices,
            batch.seq_lens,
            batch.verify_lens,
            positions,
            locations,
            longest=batch.longest + 1,
        )
        hidden, _ = self._target.hidden(batch.anchors, positions.flatten(), attend)
        tokens = self.pick(self._target.logits(hidden), batch)
        lengths: list[int] = (batch.seq_lens + 1).tolist()
        return Committed([[token] for token in tokens[: batch.live]], lengths[: batch.live])

    def speculative_step(self, batch: Batch, noise_key: int, noise_offset: Tensor) -> Committed:
        """Draft a block, verify it, commit what stands. The caller advances ``noise_offset`` [1].

        Of lengths and anchors the host's are not used: both come out of the relay tables.
        """
        rows = self._params(self._seams.step_params, batch, batch.verify_lens)
        self._seams.step_inputs(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self._kv.req_to_token,
            seq_lens=batch.seq_lens,
            verify_lens=batch.verify_lens,
            anchor_tokens=batch.anchors,
            relay_lens=self._relay.lens,
            relay_tokens=self._relay.tokens,
            mask_token=self._drafter.config.mask_token,
            max_positions=self._max_context,
            out_positions=rows.positions,
            out_cache_locs=rows.cache_locs,
            out_draft_ids=rows.draft_ids,
            out_seq_lens=rows.seq_lens,
            out_anchor_tokens=rows.anchors,
        )
        drafts, step_logits = self._propose(batch, rows, noise_key, noise_offset)
        candidates = torch.cat([rows.anchors.unsqueeze(1), drafts], dim=1)
        attend = self._step_attention(self._kv.target, batch, rows, self._gamma + 1)
        hidden, taps = self._target.hidden(candidates.flatten(), rows.positions.flatten(), attend)
        accept = self._accept(batch, rows, candidates, hidden, step_logits, noise_key, noise_offset)
        self._seams.relay(
            req_pool_indices=batch.req_pool_indices,
            verify_lens=batch.verify_lens,
            new_seq_lens=accept.new_lens,
            bonus_tokens=accept.bonus,
            out_relay_lens=self._relay.lens,
            out_relay_tokens=self._relay.tokens,
            out_next_seq_lens=None,
            out_next_anchors=None,
        )
        self._writer.step(batch, taps, rows.positions, rows.cache_locs, accept.commit)
        blocks: list[list[int]] = accept.tokens.tolist()
        commits: list[int] = accept.commit.tolist()
        lengths: list[int] = accept.new_lens.tolist()
        tokens = [block[:commit] for block, commit in zip(blocks, commits, strict=True)]
        return Committed(tokens[: batch.live], lengths[: batch.live])

    def _propose(
        self, batch: Batch, rows: StepRows, noise_key: int, noise_offset: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Drafted tokens [B, G], and the step logits [B, G, V] if any row is sampled."""
        draft, weight = self._drafter, self._target.lm_head_weight
        self._writer.before_draft(batch.size)
        attend = self._step_attention(self._kv.draft, batch, rows, self._gamma)
        positions = rows.positions[:, : self._gamma].flatten()
        hidden = draft(self._target.embed(rows.draft_ids.flatten()), positions, attend)
        base = hidden.new_empty(batch.size, self._gamma, len(weight), dtype=weight.dtype)
        self._seams.draft_logits(
            hidden=hidden.view(batch.size, self._gamma, -1),
            lm_head_weight=weight,
            divisor=1.0,
            vocab_size=len(weight),
            out_logits=base,
            out_tokens=None,
        )
        step_logits = None
        if batch.sampled:
            step_logits = torch.empty_like(base, dtype=torch.promote_types(base.dtype, draft.markov_w1.dtype))
        drafts = torch.empty_like(rows.draft_ids)
        self._seams.draft_block(
            base_logits=base,
            anchor_tokens=rows.anchors,
            markov_w1=draft.markov_w1,
            markov_w2=draft.markov_w2,
            draft_hidden=None,
            mixer_weight=None,
            mixer_bias=None,
            temperatures=rows.step_temperatures,
            noise_key=noise_key,
            noise_offset=noise_offset,
            out_draft_tokens=drafts,
            out_step_logits=step_logits,
            out_features=None,
        )
        return drafts, step_logits

    def _accept(
        self,
        batch: Batch,
        rows: StepRows,
        candidates: Tensor,
        hidden: Tensor,
        step_logits: Tensor | None,
        noise_key: int,
        noise_offset: Tensor,
    ) -> _Accept:
        """One seam for the whole batch: the greedy one where no row is sampled, else the sampled one."""
        out = _Accept(
            correct=torch.empty_like(batch.verify_lens),
            bonus=torch.empty_like(rows.anchors),
            commit=torch.empty_like(batch.verify_lens),
            new_lens=torch.empty_like(rows.seq_lens),
            tokens=torch.empty_like(candidates),
        )
        block: dict[str, Any] = {
            "candidates": candidates,
            "seq_lens": rows.seq_lens,
            "verify_lens": batch.verify_lens,
            "simulated_correct": None,
            "out_correct_lens": out.correct,
            "out_bonus_tokens": out.bonus,
            "out_commit_lens": out.commit,
            "out_new_seq_lens": out.new_lens,
            "out_tokens": out.tokens,
        }
        if not batch.sampled and self._seams.serves("target_argmax"):
            # Nobody else reads logits in such a step, so where a slot takes their argmax they need not exist.
            chosen = self._target_tokens(batch, candidates, hidden)
            self._seams.greedy_accept(**block, target_logits=None, target_tokens=chosen)
            return out
        logits = self._target.logits(hidden)
        if not batch.sampled:
            self._seams.greedy_accept(**block, target_logits=logits, target_tokens=None)
            return out
        temperatures = rows.step_temperatures
        self._seams.sampled_accept(
            **block,
            target_logits=logits,
            draft_logits=step_logits,
            target_temperatures=temperatures,
            draft_temperatures=temperatures,
            target_cutoffs=self._cutoffs(self._seams.sampling_cutoffs, logits, batch, temperatures, batch.verify_lens),
            noise_key=mix(noise_key, _ACCEPT_KEY),
            noise_offset=noise_offset,
            simulated_seed=None,
        )
        return out

    def _target_tokens(self, batch: Batch, candidates: Tensor, hidden: Tensor) -> Tensor:
        chosen, weight = torch.empty_like(candidates), self._target.lm_head_weight
        self._seams.target_argmax(
            hidden=hidden,
            lm_head_weight=weight,
            divisor=1.0,
            vocab_size=len(weight),
            verify_lens=batch.verify_lens,
            out_tokens=chosen,
        )
        return chosen

    def _params(self, seam: StepParams, batch: Batch, verify_lens: Tensor | None) -> StepRows:
        """The step's rows, with the temperatures that every stage uses. ``verify_lens`` as the seam takes them."""
        rows = self._rows.first(batch.size)
        seam(
            temperatures=batch.temperatures[: batch.live],
            top_ks=batch.top_ks[: batch.live],
            verify_lens=verify_lens,
            out_temperatures=rows.temperatures,
            out_greedy=rows.greedy,
            out_step_temperatures=rows.step_temperatures,
        )
        return rows

    def _cutoffs(
        self, seam: SamplingCutoffs, logits: Tensor, batch: Batch, temperatures: Tensor, verify_lens: Tensor
    ) -> Tensor | None:
        """The smallest logit with mass, for each row of ``logits``; None where no request leaves ids out."""
        if not batch.filtered:
            return None
        cutoffs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        seam(
            target_logits=logits,
            temperatures=temperatures,
            top_ks=batch.top_ks,
            top_ps=batch.top_ps,
            min_ps=batch.min_ps,
            verify_lens=verify_lens,
            out_cutoffs=cutoffs,
        )
        return cutoffs

    def _step_attention(self, cache: Cache | None, batch: Batch, rows: StepRows, width: int) -> PagedAttention:
        """Of the target over T rows a request, of the draft over G."""
        if cache is None:
            raise RuntimeError("this engine was built without speculation: it has no draft cache")
        return self._attention(
            self._seams.attention_metadata,
            cache,
            batch.req_pool_indices,
            rows.seq_lens,
            batch.verify_lens,
            rows.positions[:, :width],
            rows.cache_locs[:, :width],
            longest=min(batch.longest + width, self._max_context),
        )

    def _attention(
        self,
        seam: AttentionMetadata,
        cache: Cache,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        verify_lens: Tensor,
        positions: Tensor,
        cache_locs: Tensor,
        *,
        longest: int,
    ) -> PagedAttention:
        """Find the KV of each request through a seam, then attend there: the draft to the whole block."""
        rows = self._rows.first(len(positions))
        width = positions.shape[1]
        seam(
            req_pool_indices=req_pool_indices,
            req_to_token=self._kv.req_to_token,
            seq_lens=seq_lens,
            verify_lens=verify_lens,
            query_rows=width,
            kv_rows=width,
            page_size=self._kv.allocator.page_size,
            window=0,
            location_map=None,
            out_kv_lens=rows.kv_lens,
            out_kv_indptr=rows.kv_indptr,
            out_qo_indptr=None,
            out_mask_indptr=None,
            out_page_table=rows.page_table,
            out_window_page_table=None,
            out_kv_indices=None,
            out_window_kv_indptr=None,
            out_window_kv_indices=None,
            out_window_kv_offsets=None,
        )
        return PagedAttention(
            cache,
            page_table=rows.page_table,
            page_size=self._kv.allocator.page_size,
            kv_lens=rows.kv_lens,
            positions=positions,
            cache_locs=cache_locs,
            longest=longest,
            causal=cache is not self._kv.draft,
        )

    @property
    def _drafter(self) -> DraftModel:
        if self._draft is None:
            raise RuntimeError("this engine was built without speculation: it has no draft")
        return self._draft

    @property
    def _writer(self) -> ContextWriter:
        if self._context is None:
            raise RuntimeError("this engine was built without speculation: nothing reads the draft's context")
        return self._context
