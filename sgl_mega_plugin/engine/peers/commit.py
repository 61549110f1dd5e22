"""SGLang's commit: the draft's context KV, its deferral, and the histories of n-gram layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.engine.peers.peer import Arguments, Call, Outputs, PeerUnavailableError, engine_peer


def _refuse_places(arguments: Arguments) -> None:
    if arguments["location_map"] is not None or arguments["ring_rows"] is not None:
        raise PeerUnavailableError("SGLang writes a dense draft's KV by cache locations, not by a map or a ring")


def _write(arguments: Arguments, commit_lens: Tensor) -> Call:
    """The fused kernel on projected KV."""
    from sglang.kernels.ops.memory.ptr_table import make_ptr_table
    from sglang.kernels.ops.speculative.dspark.fused_kv_write import fused_kv_norm_rope_write

    _refuse_places(arguments)
    projected = arguments["projected_kv"]
    if {projected.dtype, arguments["out_keys"][0].dtype} != {torch.bfloat16}:
        found = f"{projected.dtype} into {arguments['out_keys'][0].dtype}"
        raise PeerUnavailableError(f"SGLang's fused write takes bfloat16 only, not {found}")
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
            commit_lens=commit_lens,
            locs_row_width=arguments["positions"].shape[1],
            is_neox_style=arguments["neox"],
            rotary_dim=arguments["cos_sin"].shape[1],
        )
        return {}

    return call


def _rotate(positions: Tensor, keys: Tensor, cos_sin: Tensor, *, neox: bool) -> Tensor:
    """Keys [N, H, D] rotated by what ``RotaryEmbedding`` calls on this device; queries come along, as they do there."""
    size, rotated = keys.shape[-1], cos_sin.shape[1]
    queries = torch.empty_like(keys)
    if keys.is_cuda:
        from sglang.kernels.ops.attention.rope import apply_rope_with_cos_sin_cache_inplace

        apply_rope_with_cos_sin_cache_inplace(
            positions=positions,
            q=queries[..., :rotated],
            k=keys[..., :rotated],
            cos_sin_cache=cos_sin,
            is_neox=neox,
            fused_args=None,
        )
        return keys
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb

    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    turned: Tensor = apply_rotary_emb(keys[..., :rotated].float(), cos, sin, neox)
    return torch.cat([turned.to(keys.dtype), keys[..., rotated:size]], dim=-1)


def _write_eagerly(arguments: Arguments) -> Call:
    """What SGLang does where its fused kernel does not apply: an fp8 cache, say."""
    from sglang.srt.mem_cache import memory_pool

    _refuse_places(arguments)
    projected, weights = arguments["projected_kv"], arguments["k_norm_weights"].float()
    rows, layers, _, heads, size = projected.shape
    positions, locations = arguments["positions"].flatten(), arguments["cache_locs"]
    scales: Sequence[Any] = [None] * layers if arguments["kv_scales"] is None else arguments["kv_scales"].tolist()
    same = arguments["out_keys"][0].dtype == projected.dtype

    def call() -> Outputs:
        exact = projected[:, :, 0].float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(dim=-1, keepdim=True) + arguments["eps"])
        normed = (exact * weights.view(1, layers, 1, size)).to(projected.dtype)
        turned = _rotate(positions, normed.view(rows, -1, size), arguments["cos_sin"], neox=arguments["neox"])
        keys = turned.view(rows, layers, heads, size).permute(1, 0, 2, 3).contiguous()
        values = projected[:, :, 1].permute(1, 0, 2, 3).contiguous()
        for layer in range(layers):
            target = (arguments["out_keys"][layer], arguments["out_values"][layer])
            window = {"loc_2d": locations, "commit_lens": arguments["commit_lens"], "row_dim": heads * size}
            if same:
                memory_pool._set_kv_buffer_prefix_valid_impl(
                    keys[layer], values[layer], *target, store_dtype=projected.dtype, **window
                )
            else:
                memory_pool._set_kv_buffer_prefix_valid_impl_fp8(
                    keys[layer],
                    values[layer],
                    *target,
                    *(scales[layer] or (1.0, 1.0)),
                    k_scale_is_tensor=True,
                    v_scale_is_tensor=True,
                    **window,
                )
        return {}

    return call


def _staged(arguments: Arguments) -> Call:
    write = _write(arguments, arguments["out_commit_lens"])

    def call() -> Outputs:
        write()
        arguments["out_commit_lens"].zero_()
        return {"out_commit_lens": arguments["out_commit_lens"]}

    return call


def _staging_outputs(arguments: Arguments) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in arguments.items() if name.startswith("out_")}


def _stage_eagerly(arguments: Arguments) -> Call:
    outputs, batch = _staging_outputs(arguments), arguments["commit_lens"].shape[0]

    def call() -> Outputs:
        outputs["out_cache_locs"][:batch].copy_(arguments["cache_locs"])
        outputs["out_positions"][:batch].copy_(arguments["positions"])
        outputs["out_commit_lens"][:batch].copy_(arguments["commit_lens"])
        outputs["out_commit_lens"][batch:].zero_()
        return outputs

    return call


def _stage_at_once(arguments: Arguments) -> Call:
    from sglang.kernels.ops.speculative.dspark.stage_commit import stage_commit

    outputs = _staging_outputs(arguments)

    def call() -> Outputs:
        stage_commit(
            cache_loc_dst=outputs["out_cache_locs"],
            positions_dst=outputs["out_positions"],
            commit_lens_dst=outputs["out_commit_lens"],
            state_slot_dst=None,
            cache_loc=arguments["cache_locs"],
            positions=arguments["positions"],
            commit_lens=arguments["commit_lens"],
            state_slot=None,
            rows=arguments["cache_locs"].numel(),
        )
        return outputs

    return call


def _append(arguments: Arguments) -> Call:
    from sglang.kernels.ops.embeddings.engram_hash import engram_commit_history

    def call() -> Outputs:
        engram_commit_history(
            arguments["out_histories"], arguments["tokens"], arguments["req_pool_indices"], arguments["commit_lens"]
        )
        return {"out_histories": arguments["out_histories"]}

    return call


def _append_eagerly(arguments: Arguments) -> Call:
    """The operators of ``EngramHasher.commit_after_verify`` where no kernel applies."""
    history, tokens = arguments["out_histories"], arguments["tokens"]
    columns = torch.arange(history.shape[1], device=history.device)

    def call() -> Outputs:
        rows = arguments["req_pool_indices"].long()
        window = torch.cat([history[rows], tokens.to(history.dtype)], dim=1)
        history[rows] = window.gather(1, arguments["commit_lens"].long().unsqueeze(-1) + columns)
        return {"out_histories": history}

    return call


PEERS = {
    "context_kv": (
        engine_peer("engine-eager", "norm in torch, rotary embedding, a prefix-valid store a layer", _write_eagerly),
        engine_peer("engine", "fused_kv_norm_rope_write on projected KV", lambda a: _write(a, a["commit_lens"])),
    ),
    "kv_staging": (
        engine_peer("engine-eager", "three copies and a fill of DeferredContextCommit.stage", _stage_eagerly),
        engine_peer("engine-switches", "stage_commit, which leaves places past the batch as they were", _stage_at_once),
    ),
    "staged_kv": (engine_peer("engine", "fused_kv_norm_rope_write on staged rows, then a fill", _staged),),
    "history_commit": (
        engine_peer("engine-eager", "gather, join, gather and scatter in torch", _append_eagerly),
        engine_peer("engine", "engram_commit_history", _append),
    ),
}
