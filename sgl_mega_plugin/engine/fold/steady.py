"""A steady step of the fold: one graph launch, and no forward batch built on the host.

SGLang prepares each of a step's two forwards on the host: a ``ForwardBatch``, its static buffers, the attention
metadata. All of it follows from the request table, request rows, lengths and anchors, which are on the device. So two
small graphs per batch size, captured once behind SGLang's own, fill what the draft's and the verify graph read, and the
four are children of one graph. Used by ``worker`` for steps that ``eligible`` admits; every other step is SGLang's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.contract import StepInputs
from sgl_mega_plugin.engine.fold.epilogue import VerifyEpilogue
from sgl_mega_plugin.engine.fold.one_graph import OneGraph

_WARM_UPS = 2  # eager runs before a capture: kernels compile, workspaces are made


@dataclass(frozen=True)
class _Inputs:
    """Where a step's inputs lie for B requests."""

    req_pool_indices: Tensor  # [B] int64
    seq_lens: Tensor  # [B] int64
    anchors: Tensor  # [B] int64
    positions: Tensor  # [B, T] int64
    cache_locs: Tensor  # [B, T] int64
    draft_ids: Tensor  # [B, G] int64
    verify_lens: Tensor  # [B] int32, T in every row


@dataclass(frozen=True)
class _Shape:
    """The graph of one batch size, and what it leaves."""

    inputs: _Inputs
    graph: Any  # draft glue, draft, verify glue, verify
    tables_read: Any  # event: the tables that the scheduler shares have been read
    logits: Tensor  # [B * T, V], the verify graph's own output


class SteadyStep:
    """Steady steps of one worker; captured batch sizes only."""

    def __init__(self, worker: Any, epilogue: VerifyEpilogue, sampler: Any, step_inputs: StepInputs) -> None:
        self._worker, self._epilogue, self._sampler = worker, epilogue, sampler
        self._step_inputs = step_inputs
        self._target, self._draft = worker.model_runner, worker.draft_model_runner
        self._rows = worker.verify_num_draft_tokens
        self._shapes: dict[int, _Shape] = {}
        self.steps = 0

    def capture(self) -> None:
        """Capture the glue of every batch size that both runners have captured. Replaces what was captured before."""
        self._shapes.clear()
        sizes = set(self._target.decode_cuda_graph_runner.capture_bs)
        for size in sorted(sizes & set(self._draft.decode_cuda_graph_runner.capture_bs)):
            self._shapes[size] = self._capture(size)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self._shapes)

    def serves(self, batch_size: int) -> bool:
        return batch_size in self._shapes

    def run(self, batch: Any, on_publish: Callable[..., None] | None, *, greedy: bool) -> Any:
        """One decode step of a batch that ``eligible`` admits; SGLang's ``GenerationBatchResult``."""
        size = len(batch.seq_lens)
        shape, worker, epilogue = self._shapes[size], self._worker, self._epilogue
        self._stage(shape.inputs, batch)
        worker._proposer._stage_sampling_params(self._sampler, bs=size, sampling_info=batch.sampling_info)
        worker._verify_executor.begin_simulated_step()
        epilogue.proposal_folded = True
        epilogue.begin_static_step(size, greedy)
        shape.graph.launch()
        worker.last_shared_read_runner.shared_read_done_event = shape.tables_read
        epilogue.note_static_verify(size)
        self.steps += 1
        return self._result(epilogue.read_accept(size), shape, on_publish)

    def _stage(self, inputs: _Inputs, batch: Any) -> None:
        """A step's inputs into their places, in one launch."""
        batch.seq_lens.record_stream(torch.cuda.current_stream())
        torch._foreach_copy_(
            [inputs.req_pool_indices, inputs.seq_lens, inputs.anchors],
            [batch.req_pool_indices, batch.seq_lens, batch.spec_info.bonus_tokens.view(-1)],
        )

    def _result(self, accept: Any, shape: _Shape, on_publish: Callable[..., None] | None) -> Any:
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.managers.utils import GenerationBatchResult
        from sglang.srt.speculative.dspark_components.dspark_draft import make_next_draft_input

        relay = self._worker._future_relay_in_graph(run_compact=False, folded_accept=True)
        if relay is not None:
            relay.published_seq_lens = accept.new_seq_lens
        if on_publish is not None:
            on_publish(accept.new_seq_lens)
        following = make_next_draft_input(bonus_tokens=accept.bonus, new_seq_lens=accept.new_seq_lens)
        if relay is not None:
            relay.published_bonus = following.bonus_tokens
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=shape.logits),
            next_token_ids=accept.out_tokens.reshape(-1),
            accept_lens=accept.commit_lens,
            block_accept_lens=accept.commit_lens,
            can_run_cuda_graph=True,
            next_draft_input=following,
            speculative_num_draft_tokens=self._rows,
            new_seq_lens=accept.new_seq_lens,
        )

    # -- capture ---------------------------------------------------------------------------------------------------

    def _capture(self, size: int) -> _Shape:
        inputs, read = self._inputs(size), torch.cuda.Event(external=True)

        def fill_verify() -> None:
            self._fill_verify(inputs, size)
            if torch.cuda.is_current_stream_capturing():
                read.record()  # the forwards behind read copies

        (draft, _), (verify, out) = self._captured(self._draft, size), self._captured(self._target, size)
        return _Shape(
            inputs=inputs,
            graph=OneGraph([_graph(lambda: self._fill_draft(inputs, size)), draft, _graph(fill_verify), verify]),
            tables_read=read,
            logits=out.next_token_logits[: size * self._rows],
        )

    def _inputs(self, size: int) -> _Inputs:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=self._sampler.out.device)

        rows = torch.full((size,), self._rows, dtype=torch.int32, device=self._sampler.out.device)
        return _Inputs(
            req_pool_indices=zeros(size),
            seq_lens=zeros(size) + 1,
            anchors=zeros(size),
            positions=zeros(size, self._rows),
            cache_locs=zeros(size, self._rows),
            draft_ids=zeros(size, self._rows - 1),
            verify_lens=rows,
        )

    def _fill_draft(self, inputs: _Inputs, size: int) -> None:
        """Positions, locations and ids of the step; the draft runner's buffers and metadata."""
        table = self._target.req_to_token_pool.req_to_token
        self._step_inputs(
            req_pool_indices=inputs.req_pool_indices,
            req_to_token=table,
            seq_lens=inputs.seq_lens,
            verify_lens=inputs.verify_lens,
            anchor_tokens=inputs.anchors,
            relay_lens=None,
            relay_tokens=None,
            mask_token=int(self._worker._mask_token_id),
            max_positions=table.shape[1],
            out_positions=inputs.positions,
            out_cache_locs=inputs.cache_locs,
            out_draft_ids=inputs.draft_ids,
            out_seq_lens=None,
            out_anchor_tokens=None,
        )
        spec_info = self._worker._draft_block_spec_info
        self._fill(self._draft, inputs, inputs.draft_ids, spec_info, size)

    def _fill_verify(self, inputs: _Inputs, size: int) -> None:
        """The target runner's buffers and metadata, for the anchors and the block just drafted."""
        drafts = self._sampler.out[: size * (self._rows - 1)].view(size, self._rows - 1)
        candidates = torch.cat([inputs.anchors.unsqueeze(1), drafts], dim=1)
        self._fill(self._target, inputs, candidates, self._verify_info(), size)

    def _fill(self, runner: Any, inputs: _Inputs, ids: Tensor, spec_info: Any, size: int) -> None:
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

        graphs, width = runner.decode_cuda_graph_runner, ids.shape[1]
        buffers, tokens = graphs.buffers, size * width
        for name, value in (
            ("input_ids", ids),
            ("positions", inputs.positions[:, :width]),
            ("out_cache_loc", inputs.cache_locs[:, :width]),
        ):
            getattr(buffers, name)[:tokens].view(size, width).copy_(value)
        buffers.req_pool_indices[:size].copy_(inputs.req_pool_indices)
        buffers.seq_lens[:size].copy_(inputs.seq_lens)
        view = build_replay_fb_view(
            forward_batch=self._forward_batch(buffers, spec_info, tokens),
            buffers=buffers,
            bs=size,
            raw_bs=size,
            num_tokens=tokens,
            global_num_tokens_cpu=None,
            seq_len_fill_value=graphs.seq_len_fill_value,
            capture_forward_mode=graphs.capture_forward_mode,
            is_encoder_decoder=False,
        )
        graphs.attn_backend.init_forward_metadata_out_graph(view)

    def _forward_batch(self, buffers: Any, spec_info: Any, tokens: int) -> Any:
        """What SGLang's view of a replay takes from a forward batch: here nothing that the host would know."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        return SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            max_seq_len_host=None,
            max_seq_len_override=None,
            out_cache_loc=buffers.out_cache_loc[:tokens],
            out_cache_loc_virtual=None,
            kv_loc_plan=None,
            kv_loc_cols=None,
            spec_info=spec_info,
            lora_ids=None,
            can_run_decode_cuda_graph=True,
        )

    def _verify_info(self) -> Any:
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
        from sglang.srt.speculative.dflash_info import DFlashVerifyInput

        return DFlashVerifyInput(
            draft_token=None,
            positions=None,
            draft_token_num=self._rows,
            custom_mask=None,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )

    def _captured(self, runner: Any, size: int) -> tuple[Any, Any]:
        """The graph of a captured forward, and its outputs."""
        graphs = runner.decode_cuda_graph_runner
        key = graphs._make_graph_key(size)
        graph = graphs.backend._graphs[key]
        graph.instantiate()  # a kept graph is else instantiated by SGLang's first replay of it
        return graph, graphs.backend._outputs[key]


def steady_reasons(worker: Any) -> list[str]:
    """Why this worker's steps keep their host part; empty when :class:`SteadyStep` can run them."""
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
    from sglang.srt.model_executor.runner_utils.pool import graph_pool_borrow_enabled
    from sglang.srt.runtime_context import get_exec

    reasons = []
    if get_exec().features.enable_memory_saver:
        reasons.append("the memory saver may take the graphs' memory away")
    if graph_pool_borrow_enabled():
        reasons.append("eager steps borrow the memory of the graphs")
    if not worker.sample_from_anchor:
        reasons.append("the draft does not sample from the anchor's row")
    if not hasattr(worker.draft_model, "forward_embed"):
        reasons.append("the draft has no embedding of its own inside its graph")
    for name, runner in (("target", worker.model_runner), ("draft", worker.draft_model_runner)):
        graphs = runner.decode_cuda_graph_runner
        if graphs is None or not isinstance(graphs.backend, FullCudaGraphBackend):
            reasons.append(f"the {name}'s forward is not one CUDA graph")
            continue
        if type(graphs.attn_backend) is not FlashAttentionBackend:
            reasons.append(f"the {name}'s attention backend is {type(graphs.attn_backend).__name__}")
        elif graphs.attn_backend.use_sliding_window_kv_pool or graphs.attn_backend.topk > 1:
            reasons.append(f"the {name}'s attention has a sliding-window pool or a tree")
        unusual = [
            attribute
            for attribute in (
                "require_gathered_buffer",
                "enable_two_batch_overlap",
                "enable_pdmux",
                "is_encoder_decoder",
                "ragged_verify_mode",
                "attention_graph_variants",
            )
            if getattr(graphs, attribute, None)
        ]
        unusual += [
            what for what in ("lora_manager", "hisparse_coordinator", "canary_manager") if getattr(runner, what)
        ]
        if runner.model_config.is_multimodal:
            unusual.append("multimodal positions")
        if unusual:
            reasons.append(f"the {name}'s runner has {', '.join(unusual)}")
    return reasons


def _graph(fill: Callable[[], None]) -> Any:
    """A captured CUDA graph of ``fill``."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            fill()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), torch.inference_mode():
        fill()
    return graph
