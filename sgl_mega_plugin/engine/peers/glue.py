"""SGLang's glue, eager and behind its switches."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_mega_plugin.engine.peers.peer import Arguments, Call, Outputs, engine_peer


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
}
