"""SGLang's commit of the draft's context KV."""

from __future__ import annotations

import torch

from sgl_mega_plugin.engine.peers.peer import Arguments, Call, Outputs, PeerUnavailableError, engine_peer


def _context_kv(arguments: Arguments) -> Call:
    from sglang.kernels.ops.memory.ptr_table import make_ptr_table
    from sglang.kernels.ops.speculative.dspark.fused_kv_write import fused_kv_norm_rope_write

    projected = arguments["projected_kv"]
    if projected.dtype is not torch.bfloat16:
        raise PeerUnavailableError(f"SGLang's fused write takes bfloat16 only, not {projected.dtype}")
    rows, layers, _, heads, size = projected.shape
    buffers = zip(arguments["out_keys"], arguments["out_values"], strict=True)
    table = [[keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0)] for keys, values in buffers]
    meta = make_ptr_table(table, device=projected.device)
    flat = projected.view(rows, -1)
    positions, locations = arguments["positions"].flatten(), arguments["cache_locs"].flatten()

    def call() -> Outputs:
        fused_kv_norm_rope_write(
            flat,
            meta,
            arguments["k_norm_weights"],
            arguments["cos_sin"],
            positions,
            locations,
            layers,
            heads * size,
            size,
            arguments["eps"],
            commit_lens=arguments["commit_lens"],
            locs_row_width=arguments["positions"].shape[1],
        )
        return {}

    return call


PEERS = {
    "context_kv": (engine_peer("engine", "fused_kv_norm_rope_write on projected KV", _context_kv),),
}
