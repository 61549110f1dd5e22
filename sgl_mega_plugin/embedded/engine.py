"""The embedded DSpark engine: requests in, completions out, on a CPU or one GPU.

Requests wait in order, join the batch when a row and KV are free, and take one step together;
there is no other scheduling. The command line and tests call :meth:`Engine.generate`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sgl_mega_plugin.contract import Backend, Plan, SlotSetup
from sgl_mega_plugin.embedded.batch import Batch, BatchRow
from sgl_mega_plugin.embedded.decode import Decoder
from sgl_mega_plugin.embedded.draft import DraftModel
from sgl_mega_plugin.embedded.kv import Cache, PagedKv, Row
from sgl_mega_plugin.embedded.request import (
    Completion,
    Output,
    Request,
    RequestError,
    Tokenizer,
    output_limit,
    prompt_of,
)
from sgl_mega_plugin.embedded.runtime import Stages, plan_stages
from sgl_mega_plugin.embedded.sampling import mix
from sgl_mega_plugin.embedded.target import TargetModel

DEFAULT_CONTEXT = 2048
MAX_GAMMA = 7

#: Called with a request's index and its new tokens, after each step that gave it some.
OnTokens = Callable[[int, list[int]], None]


class Models(Protocol):
    """What the engine runs: ``models.load_demo`` returns one, tests make small ones."""

    @property
    def target(self) -> TargetModel: ...
    @property
    def draft(self) -> DraftModel: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...


class _Job:
    """A request on its way through the engine."""

    def __init__(self, index: int, request: Request, prompt: list[int], output: Output, key: int, slots: int) -> None:
        self.index, self.request, self.prompt, self.output, self.key = index, request, prompt, output, key
        self.slots = slots  # KV slots it may ever need
        self.row: Row | None = None
        self.length = 0
        self.accept_lengths: list[int] = []

    def batch_row(self) -> BatchRow:
        if self.row is None:
            raise RuntimeError(f"request {self.index} has no KV row")
        return BatchRow(
            table_row=self.row.index,
            length=self.length,
            anchor=self.output.tokens[-1] if self.output.tokens else 0,  # after the prompt nothing is fed
            temperature=self.request.temperature,
            top_k=self.request.step_top_k,
            top_p=self.request.top_p,
            min_p=self.request.min_p,
            key=self.key,
            step=len(self.accept_lengths) + bool(self.output.tokens),  # 0 draws the first token
        )

    def completion(self) -> Completion:
        if self.output.finish_reason is None:
            raise RuntimeError(f"request {self.index} has not finished")
        return Completion(
            tokens=tuple(self.output.tokens),
            text=self.output.text,
            finish_reason=self.output.finish_reason,
            steps=len(self.accept_lengths),
            accept_lengths=tuple(self.accept_lengths),
        )


class Engine:
    """One model pair, one KV memory, one plan."""

    def __init__(
        self,
        models: Models,
        *,
        plan: Plan | None = None,
        speculative: bool = True,
        gamma: int | None = None,
        max_batch: int = 8,
        max_context: int | None = None,
        page_size: int = 1,
        pool_tokens: int | None = None,
        pad_to: int | None = None,
        seed: int = 0,
    ) -> None:
        """
        ``plan``: which slots serve the seams; None for the engine's own stages. ``gamma``: draft
        tokens a step, the draft's own number by default. ``pool_tokens``: KV slots, by default
        enough for ``max_batch`` full contexts. ``pad_to``: run every step at this B, as a graph
        of one size would. Device and dtype are the models'. Raises ``ValueError`` on a bad value.
        """
        target, draft = models.target, models.draft
        self._models, self._seed, self._serial = models, seed, 0
        self.device = str(target.lm_head_weight.device)
        self.gamma = _checked_gamma(gamma, draft.config.gamma) if speculative else 0
        self.max_context = _checked_context(max_context, models)
        self.max_batch, self._pad_to = max_batch, pad_to
        if max_batch < 1 or (pad_to is not None and pad_to < max_batch):
            raise ValueError(f"max_batch {max_batch} and pad_to {pad_to}: want 1 <= max_batch <= pad_to")
        if plan is not None and not speculative:
            raise ValueError("a plan's slots serve speculative steps; pass speculative=True or no plan")
        self.stages = self._stages(plan)
        per_request = -(-self.max_context // page_size) * page_size
        slots = max_batch * per_request if pool_tokens is None else pool_tokens
        self.kv = self._memory(slots, page_size, speculative)
        self._decoder = Decoder(
            target,
            draft if speculative else None,
            self.kv,
            self.stages,
            gamma=self.gamma,
            max_rows=self._pad_to or max_batch,
            max_context=self.max_context,
            device=self.device,
        )

    def _stages(self, plan: Plan | None) -> Stages:
        setup = SlotSetup(
            backend=plan.host.backend if plan is not None else Backend.REFERENCE,
            device=self.device,
            max_batch=self._pad_to or self.max_batch,
            gamma=max(self.gamma, 1),
            vocab_size=self._models.target.config.vocab_size,
        )
        return plan_stages(plan, setup)

    def _memory(self, slots: int, page_size: int, speculative: bool) -> PagedKv:
        dtype = self._models.target.lm_head_weight.dtype

        def cache(model: TargetModel | DraftModel) -> Cache:
            shape = model.config
            return Cache(shape.layers, slots + page_size, shape.kv_heads, shape.head_dim, dtype, self.device)

        return PagedKv(
            rows=self.max_batch,
            columns=self.max_context,
            slots=slots,
            page_size=page_size,
            target=cache(self._models.target),
            draft=cache(self._models.draft) if speculative else None,
            device=self.device,
        )

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], *, on_tokens: OnTokens | None = None) -> list[Completion]:
        """Completions in the order of ``requests``; :class:`RequestError` before anything runs.

        The same requests, with seeds, give the same tokens on an engine with the same settings.
        """
        self.check(requests)
        jobs = [self._job(index, request, self._key(request)) for index, request in enumerate(requests)]
        waiting, running = deque(jobs), list[_Job]()
        noise_key = mix(self._seed, *(job.key for job in jobs)) >> 1
        noise_offset = torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            while waiting or running:
                self._admit(waiting, running, on_tokens)
                if running:
                    self._step(running, noise_key, noise_offset, on_tokens)
                running = self._retire(running)
        finally:
            for job in jobs:
                self._close(job)
        return [job.completion() for job in jobs]

    @torch.inference_mode()
    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """The target's logits [V] after ``ids``, by one prefill: what a report of a difference needs."""
        row = self.kv.open(len(ids))
        try:
            return self._decoder.prefill(row, ids)
        finally:
            self.kv.close(row)

    def prompt_ids(self, request: Request) -> list[int]:
        """A request's prompt as ids."""
        return prompt_of(request, self._models.tokenizer, self._models.target.config.vocab_size)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise :class:`RequestError` for the first request that this engine cannot serve."""
        for index, request in enumerate(requests):
            self._job(index, request, key=0)

    def _key(self, request: Request) -> int:
        source = (0, self._serial) if request.seed is None else (1, request.seed)
        self._serial += 1
        return mix(self._seed, *source) >> 1  # 63 bits: a tensor of int64 holds it

    def _job(self, index: int, request: Request, key: int) -> _Job:
        try:
            prompt = self.prompt_ids(request)
            limit, at_limit = output_limit(request, len(prompt), self.max_context)
        except RequestError as error:
            raise RequestError(f"request {index}: {error}") from None
        # The last token is never fed; a step's window reaches gamma past its anchor.
        slots = min(len(prompt) + limit - 1 + self.gamma, self.max_context)
        if not self.kv.allocator.could_fit(slots):
            raise RequestError(
                f"request {index}: needs {slots} KV slots, the pool has "
                f"{self.kv.allocator.slots - self.kv.allocator.page_size}; lower max_new_tokens or raise pool_tokens"
            )
        return _Job(index, request, prompt, Output(request, self._models.tokenizer, limit, at_limit), key, slots)

    def _admit(self, waiting: deque[_Job], running: list[_Job], on_tokens: OnTokens | None) -> None:
        """Move requests from the queue's head into the batch while row and KV are free."""
        while waiting and self.kv.free_rows and self.kv.allocator.fits(waiting[0].slots):
            job = waiting.popleft()
            job.row = self.kv.open(job.slots)
            logits = self._decoder.prefill(job.row, job.prompt)
            job.length = len(job.prompt)
            first = self._decoder.pick(logits.unsqueeze(0), self._batch([job], size=1))
            self._decoder.begin(job.row, job.length, *first)
            _give(job, first, on_tokens)
            if job.output.finish_reason is None:
                running.append(job)
            else:
                self._close(job)

    def _step(self, running: list[_Job], noise_key: int, noise_offset: Tensor, on_tokens: OnTokens | None) -> None:
        batch = self._batch(running, size=self._pad_to or len(running))
        if self.gamma:
            committed = self._decoder.speculative_step(batch, noise_key, noise_offset)
            if batch.sampled:
                noise_offset += 1
        else:
            committed = self._decoder.plain_step(batch)
        for job, tokens, length in zip(running, committed.tokens, committed.lengths, strict=True):
            job.length = length
            job.accept_lengths.append(len(tokens))
            _give(job, tokens, on_tokens)

    def _batch(self, jobs: Sequence[_Job], *, size: int) -> Batch:
        return Batch.build(
            [job.batch_row() for job in jobs],
            size=size,
            width=self.gamma + 1,
            max_context=self.max_context,
            device=self.device,
        )

    def _retire(self, running: list[_Job]) -> list[_Job]:
        for job in running:
            if job.output.finish_reason is not None:
                self._close(job)
        return [job for job in running if job.output.finish_reason is None]

    def _close(self, job: _Job) -> None:
        if job.row is not None:
            self._decoder.release(job.row)
            self.kv.close(job.row)
            job.row = None


def _give(job: _Job, tokens: list[int], on_tokens: OnTokens | None) -> None:
    taken = job.output.extend(tokens)
    if taken and on_tokens is not None:
        on_tokens(job.index, taken)


def _checked_gamma(gamma: int | None, trained: int) -> int:
    largest = min(trained, MAX_GAMMA)
    chosen = largest if gamma is None else gamma
    if not 1 <= chosen <= largest:
        raise ValueError(f"gamma {chosen} is outside [1, {largest}], what this draft was trained for")
    return chosen


def _checked_context(max_context: int | None, models: Models) -> int:
    largest = min(models.target.config.max_positions, models.draft.config.max_positions)
    chosen = min(largest, DEFAULT_CONTEXT) if max_context is None else max_context
    if not 1 <= chosen <= largest:
        raise ValueError(f"max_context {chosen} is outside [1, {largest}], the positions that both models have")
    return chosen
