"""SGLang's glue, eager and behind its switches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.engine.peers.peer import Arguments, Call, Outputs, PeerUnavailableError, engine_peer


def _window(arguments: Arguments, *, one_launch: bool) -> Call:
    """Positions and cache locations as ``alloc_verify_window`` computes them, and the anchors' column of the draft."""
    from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_uniform_func

    batch, rows = arguments["out_positions"].shape
    seq_lens, anchors = arguments["seq_lens"], arguments["anchor_tokens"]
    offsets = torch.arange(rows, device=seq_lens.device)
    draft_ids = torch.full_like(arguments["out_draft_ids"], arguments["mask_token"])
    placed = torch.empty_like(arguments["out_positions"])

    def locations(**written: Tensor) -> Tensor:
        found: Tensor = assign_extend_cache_locs_uniform_func(
            req_pool_indices=arguments["req_pool_indices"],
            req_to_token=arguments["req_to_token"],
            start_offset=seq_lens,
            batch_size=batch,
            draft_token_num=rows,
            device=seq_lens.device,
            **written,
        )
        return found.view(batch, rows)

    def call() -> Outputs:
        if one_launch:
            where = locations(positions_out=placed, anchor_src=anchors, anchor_out=draft_ids)
            return {"out_positions": placed, "out_cache_locs": where, "out_draft_ids": draft_ids}
        where = locations()
        positions = seq_lens.unsqueeze(1) + offsets
        draft_ids[:, 0].copy_(anchors)
        return {"out_positions": positions, "out_cache_locs": where, "out_draft_ids": draft_ids}

    return call


def _page_tables(arguments: Arguments) -> Call:
    """The operators of FlashAttention's ``init_forward_metadata`` for a verify; the longest length is known before."""
    table, rows, page_size = arguments["req_to_token"], arguments["req_pool_indices"], arguments["page_size"]
    if arguments["out_page_table"] is None:
        raise PeerUnavailableError("FlashAttention reads page tables")
    seq_lens, read = arguments["seq_lens"], arguments["kv_rows"]
    longest = int(seq_lens.max()) + read
    starts = torch.arange(0, longest, page_size, device=table.device)

    def call() -> Outputs:
        lens = (seq_lens + read).to(torch.int32)
        sums = torch.nn.functional.pad(torch.cumsum(lens, dim=0, dtype=torch.int32), (1, 0))
        pages = table[rows, :longest]
        if page_size > 1:
            pages = pages[:, starts] // page_size
        # Its columns past a request's length hold other tokens, so it is not compared.
        return {"out_kv_lens": lens, "out_kv_indptr": sums} if pages.numel() else {}

    return call


def _fused_page_table(arguments: Arguments) -> Call:
    """FlashAttention's one kernel for a graph's replay."""
    from sglang.kernels.ops.attention.metadata import normal_decode_set_metadata

    table = arguments["out_page_table"]
    if table is None:
        raise PeerUnavailableError("FlashAttention reads page tables")

    def call() -> None:
        normal_decode_set_metadata(
            arguments["out_kv_lens"],
            arguments["out_kv_indptr"],
            table,
            arguments["req_to_token"],
            arguments["req_pool_indices"],
            table.shape[1],
            arguments["seq_lens"],
            arguments["kv_rows"],
            arguments["page_size"],
        )

    return call


def _verify_backend(arguments: Arguments) -> SimpleNamespace:
    """The fields of SGLang's Triton backend that its buffers for a verify are filled from."""
    from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton

    table, size = arguments["req_to_token"], arguments["out_kv_lens"].shape[0]

    def sums(name: str) -> Tensor | None:
        """Running sums of its own, for SGLang's begin with a zero that it never writes again."""
        return None if arguments[name] is None else torch.zeros_like(arguments[name])

    def pack(plan: None, **given: Any) -> bool:
        """``KVIndexTranslator.pack_read_stream`` of a pool that is not unified."""
        create_flashinfer_kv_indices_triton[(size, 1)](
            table,
            given["req_pool_indices"],
            given["seq_lens"],
            given["indptr"],
            given.get("kv_start_idx"),
            given["out"],
            table.stride(0),
            ENTRY_PAGE_SIZE=1,
            TOKEN_BLOCK_PARALLEL=False,
            token_mapping=arguments["location_map"] if given.get("kind") == "window" else None,
        )
        return True

    return SimpleNamespace(
        device=table.device,
        qo_indptr=arguments["out_qo_indptr"],
        kv_indptr=sums("out_kv_indptr"),
        mask_indptr=sums("out_mask_indptr"),
        cuda_graph_kv_indices=arguments["out_kv_indices"],
        kv_index_translator=SimpleNamespace(pack_read_stream=pack, window_kv_kind="window"),
        window_kv_indptr=sums("out_window_kv_indptr"),
        cuda_graph_window_kv_indices=arguments["out_window_kv_indices"],
        cuda_graph_window_num_kv_splits=None,
        cuda_graph_window_kv_offsets=arguments["out_window_kv_offsets"],
        sliding_window_size=arguments["window"],
        token_to_kv_pool=None,
        target_verify_num_tokens_per_req=arguments["query_rows"],
        _verify_mask=None,
    )


def _slot_lists(arguments: Arguments) -> Call:
    """The Triton backend's own method, which is eager in each step: sums, and a kernel for each list."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    if arguments["out_kv_indices"] is None:
        raise PeerUnavailableError("the Triton backend reads slot lists")
    backend = _verify_backend(arguments)
    for name in ("_fill_kv_indptr_and_indices", "_target_verify_num_tokens_per_req"):
        setattr(backend, name, getattr(TritonAttnBackend, name).__get__(backend))
    seq_lens, rows = arguments["seq_lens"], arguments["req_pool_indices"]

    sums = {
        "out_kv_indptr": backend.kv_indptr,
        "out_mask_indptr": backend.mask_indptr,
        "out_window_kv_indptr": backend.window_kv_indptr,
    }
    lists = ("out_qo_indptr", "out_kv_indices", "out_window_kv_indices", "out_window_kv_offsets")
    written = sums | {name: arguments[name] for name in lists}

    def call() -> Outputs:
        TritonAttnBackend._update_target_verify_buffers(backend, None, len(rows), seq_lens, None, rows)
        return {name: value for name, value in written.items() if value is not None}

    return call


def _publish(arguments: Arguments) -> Call:
    """``FutureMap``'s two scatters, and the gathers with which the next step begins."""
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    lens, tokens = arguments["out_relay_lens"], arguments["out_relay_tokens"]
    # Without an algorithm `publish` records no event, which costs no launch.
    tables = SimpleNamespace(
        _relay=None,
        new_seq_lens_buf=lens,
        output_tokens_buf=tokens,
        needs_confidence_relay=False,
        spec_algo=SpeculativeAlgorithm.NONE,
    )
    rows, new_lens, bonus = (arguments[name] for name in ("req_pool_indices", "new_seq_lens", "bonus_tokens"))

    def call() -> Outputs:
        FutureMap.publish(tables, rows, new_lens)
        FutureMap.stash_bonus_tokens(tables, rows, bonus)
        following = {"out_next_seq_lens": lens[rows], "out_next_anchors": tokens[rows]}
        return {"out_relay_lens": lens, "out_relay_tokens": tokens} | following

    return call


def _params(arguments: Arguments) -> Call:
    """``resolve_draft_params`` into a graph's rows, as after a change of the batch."""
    from sglang.srt.speculative.dspark_components.dspark_draft import DraftParams, resolve_draft_params

    info = SimpleNamespace(temperatures=arguments["temperatures"], top_ks=arguments["top_ks"])
    rows = DraftParams(
        temperatures=arguments["out_temperatures"],
        greedy_mask=arguments["out_greedy"],
        step_temperatures=arguments["out_step_temperatures"],
    )

    def call() -> None:
        resolve_draft_params(sampling_info=info, bs=len(arguments["top_ks"]), out=rows)

    return call


PEERS = {
    "step_inputs": (
        engine_peer(
            "engine-eager",
            "positions added, cache locations gathered, anchors copied",
            lambda arguments: _window(arguments, one_launch=False),
        ),
        engine_peer(
            "engine-switches",
            "the same in the one launch of prepare_inputs_once",
            lambda arguments: _window(arguments, one_launch=True),
        ),
    ),
    "attention_metadata": (
        engine_peer("engine-eager", "FlashAttention's operators: add, cumsum, gather of table rows", _page_tables),
        engine_peer("engine-fused", "FlashAttention's one kernel for a graph's replay", _fused_page_table),
        engine_peer("engine-triton", "the Triton backend's sums, and a kernel for each list", _slot_lists),
    ),
    "relay": (engine_peer("engine", "FutureMap's two scatters, and the next step's two gathers", _publish),),
    "step_params": (engine_peer("engine", "resolve_draft_params into the graph's rows", _params),),
}
