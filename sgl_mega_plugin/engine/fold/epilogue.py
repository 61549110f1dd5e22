"""What the verify graph records behind the target's forward: accept, relay, commit, each by a slot.

SGLang's DSpark worker asks an epilogue, through the names used here, whether a step's accept is in the graph and
where its results lie. A step that is not folded has ``verify_lens`` 0 in every row, so the recorded slots leave
lengths, tokens and KV alone and SGLang's own path does the step. Built by ``worker``; holds no graph and no runner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import ContextKv, Relay, SamplingCutoffs
from sgl_mega_plugin.engine.fold.buffers import AcceptBuffers, Accepted
from sgl_mega_plugin.engine.fold.draft_kv import DraftKv
from sgl_mega_plugin.engine.fold.filters import Filters

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Calls:
    """The slots of a folded step: one accept, of which the sampled one serves greedy rows as well."""

    accept: Any  # GreedyAccept or SampledAccept
    samples: bool  # the accept is the sampled one; else only all-greedy steps are folded
    context_kv: ContextKv
    relay: Relay | None
    cutoffs: SamplingCutoffs | None = None  # with a sampled accept: then top-k, top-p and min-p are served


@dataclass(frozen=True)
class DraftSide:
    """What the draft left for the accept, at fixed addresses."""

    step_logits: Tensor | None  # [max_bs, G, V]; None: the draft is greedy
    temperatures: Tensor  # [max_bs] fp32, 0 on greedy rows


@dataclass(frozen=True)
class Noise:
    """Random numbers of the sampled accept."""

    key: int
    offset: Tensor  # [1] int64


class VerifyEpilogue:
    """The epilogue of a static verify graph, and the host's side of it."""

    # What SGLang's worker reads of its own epilogue, where the fold has one answer.
    simulate_fold = False
    folds_commit = True
    folds_engram_commit = False
    deferred_commit = None

    def __init__(
        self,
        *,
        calls: Calls,
        draft: DraftSide,
        draft_kv: DraftKv,
        noise: Noise,
        max_batch: int,
        rows: int,
        device: str,
        accept_outs: Callable[..., Any],
        relay_buffers: Callable[[], Any],
        simulated_correct_len: Tensor | None,
    ) -> None:
        """``accept_outs`` builds SGLang's record of an accept; ``relay_buffers`` the tables that the scheduler adopts.

        ``simulated_correct_len`` [1] int64: SGLang's simulated acceptance, under which it accepts greedily.
        """
        self._calls, self._draft, self._kv, self._noise = calls, draft, draft_kv, noise
        self._rows, self._simulated = rows, simulated_correct_len
        self._accept_outs, self._relay_buffers = accept_outs, relay_buffers
        self._buffers = AcceptBuffers(max_batch=max_batch, rows=rows, device=device)
        self._outs: dict[int, Any] = {}
        self._read: Any = None
        self._verify_lens = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._advance = torch.zeros(1, dtype=torch.int64, device=device)
        self.filters = None if calls.cutoffs is None else Filters(max_batch=max_batch, rows=rows, device=device)
        self._state = (0, False)
        self.future_relay: Any = None
        self.captured: set[int] = set()  # batch sizes whose graph has this epilogue
        self.sampled_step = False  # this step is sampled, and the fold may serve it
        self.proposal_folded = False  # this step's draft came from the draft's graph
        self.sampled_armed = False
        self.folded_steps = 0

    @property
    def serves_sampled(self) -> bool:
        """Whether steps with sampled rows can be folded."""
        return self._calls.samples or self._simulated is not None

    # -- recorded in the graph -------------------------------------------------------------------------------------

    def capture_hook(self, runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        """A capture tail hook of the target's runner: runs at warm-up and is recorded at capture."""
        if runner.model_runner.is_draft_worker or not forward_batch.forward_mode.is_target_verify():
            return
        if out.next_token_logits is None or out.hidden_states is None:
            raise RuntimeError("the verify graph keeps no logits or hidden states, so no step can be folded into it")
        batch = forward_batch.batch_size
        if self.future_relay is None and self._calls.relay is not None:
            self.future_relay = self._relay_buffers()
        with torch.inference_mode():
            self._record(out.next_token_logits, out.hidden_states, forward_batch, batch)
        self.captured.add(batch)

    def _record(self, logits: Tensor, hidden: Tensor, forward_batch: Any, batch: int) -> None:
        verify_lens, results = self._verify_lens[:batch], self._buffers.live(batch)
        self._accept(logits, forward_batch, verify_lens, results, batch)
        if self._calls.relay is not None:
            self._calls.relay(
                req_pool_indices=forward_batch.req_pool_indices,
                verify_lens=verify_lens,
                new_seq_lens=results.new_seq_lens,
                bonus_tokens=results.bonus_tokens,
                out_relay_lens=self.future_relay.new_seq_lens,
                out_relay_tokens=self.future_relay.output_tokens,
                out_next_seq_lens=None,
                out_next_anchors=None,
            )
        self._kv.commit(
            self._calls.context_kv,
            hidden,
            positions=forward_batch.positions.view(batch, self._rows),
            cache_locs=forward_batch.out_cache_loc.view(batch, self._rows),
            commit_lens=results.commit_lens,
        )

    def _accept(self, logits: Tensor, forward_batch: Any, verify_lens: Tensor, results: Accepted, batch: int) -> None:
        common: dict[str, Any] = {
            "candidates": forward_batch.input_ids.view(batch, self._rows),
            "target_logits": logits,
            "seq_lens": forward_batch.seq_lens,
            "verify_lens": verify_lens,
            "simulated_correct": self._simulated,
            "out_correct_lens": results.correct_lens,
            "out_bonus_tokens": results.bonus_tokens,
            "out_commit_lens": results.commit_lens,
            "out_new_seq_lens": results.new_seq_lens,
            "out_tokens": results.tokens,
        }
        draft, temperatures = self._draft, self._draft.temperatures[:batch]
        if not self._calls.samples:
            self._calls.accept(**common, target_tokens=None)
            return
        self._calls.accept(
            **common,
            draft_logits=None if draft.step_logits is None else draft.step_logits[:batch],
            target_temperatures=temperatures,
            draft_temperatures=temperatures,
            target_cutoffs=self._cutoffs(logits, temperatures, verify_lens, batch),
            simulated_seed=None,
            noise_key=self._noise.key,
            noise_offset=self._noise.offset,
        )
        self._noise.offset.add_(self._advance)

    def _cutoffs(self, logits: Tensor, temperatures: Tensor, verify_lens: Tensor, batch: int) -> Tensor | None:
        """The smallest logit with mass of each row [B * T]; None where no slot serves filters."""
        filters = self.filters
        if filters is None or self._calls.cutoffs is None:
            return None
        found = filters.cutoffs[: batch * self._rows]
        self._calls.cutoffs(
            target_logits=logits,
            temperatures=temperatures,
            top_ks=filters.top_ks[:batch],
            top_ps=filters.top_ps[:batch],
            min_ps=filters.min_ps[:batch],
            verify_lens=verify_lens,
            out_cutoffs=found,
        )
        return found

    # -- the host's side, in the names that SGLang's worker uses ---------------------------------------------------

    def begin_static_step(self, bs: int, armed: bool) -> None:
        """Before a verify of ``bs`` requests; ``armed``: SGLang found the step all greedy and foldable."""
        self.sampled_armed = not armed and self.sampled_step and self.proposal_folded
        self._arm(bs if armed or self.sampled_armed else 0, sampled=self.sampled_armed)

    def begin_step(self, verify_lens: Tensor | None, armed: bool) -> None:
        """Before a verify that is not static: an idle one. Nothing is folded."""
        self._arm(0, sampled=False)

    def begin_sim_bonus(self, bs: int, temperatures: Tensor | None) -> None:
        raise RuntimeError("the fold draws no simulated bonus; SGLang asks for it only where simulate_fold is set")

    def _arm(self, live: int, *, sampled: bool) -> None:
        if self._state == (live, sampled):
            return
        self._verify_lens[:live].fill_(self._rows)
        self._verify_lens[live:].zero_()
        self._advance.fill_(int(sampled))
        self._state = (live, sampled)

    def note_static_verify(self, bs: int) -> None:
        """After a folded verify of ``bs`` requests."""
        self.folded_steps += 1
        if self.folded_steps == 1:
            logger.info("sgl-mega-plugin: accept, relay and commit ran in the verify graph (first step)")

    def read_accept(self, bs: int) -> Any:
        """SGLang's record of this step's accept, over a snapshot."""
        found = self._buffers.snapshot(bs)
        key = id(found)  # one of a few that live as long as the buffers
        if key not in self._outs:
            self._outs[key] = self._accept_outs(
                correct_len=found.correct_lens,
                bonus=found.bonus_tokens,
                cap_trim_lens=found.cap_trim_lens,
                commit_lens=found.commit_lens,
                new_seq_lens=found.new_seq_lens,
                out_tokens=found.tokens,
            )
        self._read = self._outs[key]
        return self._read

    def read_block_accept_lens(self, bs: int) -> Tensor:
        """The commit lengths [B] int32 of the last :meth:`read_accept`: a static verify trims nothing off them."""
        lens: Tensor = self._read.commit_lens
        return lens

    # -- in the place of SGLang's sampling-accept graph ------------------------------------------------------------

    committed_engram = False

    def run(self, *, bs: int, target_logits: Tensor) -> Any:
        """The accept of a step with sampled rows; the verify graph has done it."""
        return self.read_accept(bs)
