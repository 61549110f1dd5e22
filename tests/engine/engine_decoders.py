"""Small decoders and drafts of SGLang's own classes on the CPU, their KV pools, and verify batches for them.

Attention is SGLang's torch backend. It has no verify step, so a subclass tells it the lengths that an extend of the
same rows has. The rotary table stays fp32, as on a GPU (``SGLANG_ROPE_CACHE_FP32``).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.dp_attention import DpPaddingMode
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.dspark import DSparkDraftModel, LingDSparkModel, Qwen3DSparkModel
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 3, 4, 2, 64, 128
TOKENS = 8  # T
SLOTS, REQUESTS, COLUMNS = 256, 5, 96  # of the KV pool and of the request table

_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": 192,
    "max_position_embeddings": 128,
}
#: Tied and untied heads, a vocabulary that SGLang pads, biases, norms of heads, a scaled rotary embedding.
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"vocab_size": 256, "tie_word_embeddings": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"vocab_size": 256, "tie_word_embeddings": False}),
    "llama": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "vocab_size": 200,
            "tie_word_embeddings": False,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}


def one_rank() -> Any:
    """A scope in which SGLang finds itself alone: no tensor, no pipeline parallelism."""
    alone = SimpleNamespace(world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True, barrier=lambda: None)
    return get_parallel().override(tp_group=alone, pp_group=alone, attn_tp_group=alone)


def decoder(family: str, *, taps: tuple[int, ...] = (0, 1), quant_config: Any = None, **changes: Any) -> Any:
    """A model of a family with random bf16 weights whose activations stay near one; the draft reads ``taps``. What a
    ``quant_config`` makes of the weights is :func:`quantised`'s.
    """
    causal, config, settings = FAMILIES[family]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with one_rank():
            model = causal(config(**(_SIZES | settings | changes)), quant_config=quant_config).requires_grad_(False)
    finally:
        torch.set_default_dtype(default)
    _draw_weights(model)
    model.capture_aux_hidden_states = True
    model.model.layers_to_capture = [tap + 1 for tap in taps]
    return model


#: A draft for any of them: block 7, a vanilla Markov head, rows that see each other.
DRAFTS = {model.__name__: model for model in (Qwen3DSparkModel, DSparkDraftModel, LingDSparkModel)}
_DRAFT: dict[str, Any] = {
    "vocab_size": 256,
    "layer_types": ["full_attention"] * LAYERS,
    "num_target_layers": LAYERS,
    "target_layer_ids": [0, 1],
    "block_size": TOKENS - 1,
    "mask_token_id": 255,
    "markov_rank": 16,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
}


def draft_of(target: Any, name: str = "Qwen3DSparkModel", *, quant_config: Any = None, **changes: Any) -> Any:
    """A draft with random bf16 weights that shares a target's embedding and LM head."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with one_rank():
            config = Qwen3Config(**(_SIZES | _DRAFT | changes))
            model = DRAFTS[name](config, quant_config=quant_config).requires_grad_(False)
    finally:
        torch.set_default_dtype(default)
    _draw_weights(model)
    model.attach_shared_modules(embed_tokens=target.model.embed_tokens, lm_head=target.lm_head)
    for layer in model.layers:
        layer.self_attn.use_table_qk_norm_rope = False  # else one kernel of SGLang's, for a GPU
    return model


def _draw_weights(model: torch.nn.Module) -> None:
    draw = torch.Generator().manual_seed(11)
    for name, weight in model.named_parameters():
        if "scale" in name:
            continue
        scale, shift = (
            (0.2, 1.0) if "norm" in name else (0.2, 0.0) if "bias" in name else (weight.shape[-1] ** -0.5, 0.0)
        )
        weight.copy_(torch.randn(weight.shape, generator=draw) * scale + shift)


def quantised(family: str, quant_config: Any) -> tuple[Any, Any]:
    """A model whose matrices SGLang keeps as a config says, and the bf16 model of the same weights.

    fp8 weights and scales are drawn as a checkpoint would have them. Then each layer's own method makes of the layer
    what it makes after loading.
    """
    model, twin = (decoder(family, quant_config=each, intermediate_size=256) for each in (quant_config, None))
    _load_alike(model, twin)
    return model, twin


def quantised_draft(quant_config: Any) -> tuple[Any, Any]:
    """The same of a draft; both share a bf16 target's embedding."""
    target = decoder("qwen3")
    model, twin = (draft_of(target, quant_config=each, intermediate_size=256) for each in (quant_config, None))
    _load_alike(model, twin)
    return model, twin


def _load_alike(model: Any, twin: Any) -> None:
    draw = torch.Generator().manual_seed(17)
    for name, part in model.named_modules():
        method = getattr(part, "quant_method", None)
        if isinstance(method, BaseKVCacheMethod):
            method.process_weights_after_loading(part)
        if not isinstance(part, LinearBase):
            continue
        serialized = part.weight.dtype == torch.float8_e4m3fn
        if serialized:
            scales = part.weight_scale_inv if hasattr(part, "weight_scale_inv") else part.weight_scale
            part.weight.copy_(torch.randn(part.weight.shape, generator=draw) * 8)
            scales.copy_((0.5 + torch.rand(scales.shape, generator=draw)) * part.weight.shape[1] ** -0.5 / 8)
            plain = part.weight.float() * _of_each_value(scales, part)
        method.process_weights_after_loading(part)
        if not serialized:  # the method has quantised it
            plain = (part.weight.float() * part.weight_scale).t()
        twin.get_submodule(name).weight.copy_(plain)


def _of_each_value(scales: Tensor, part: Any) -> Tensor:
    """A checkpoint's scales of a layer as [outputs, inputs], or what broadcasts to it."""
    rows, columns = part.weight.shape
    if scales.dim() == 1:  # of the matrices that the layer puts together
        return scales.repeat_interleave(torch.tensor(part.logical_widths)).unsqueeze(1)
    if scales.shape == (rows, 1) and rows > 128:
        return scales
    if scales.shape == (-(-rows // 128), columns // 128):
        return scales.repeat_interleave(128, dim=0)[:rows].repeat_interleave(128, dim=1)
    return scales


class VerifyAttention(TorchNativeAttnBackend):
    """SGLang's torch attention with the lengths of a verify step."""

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        lens = forward_batch.seq_lens
        rows = forward_batch.out_cache_loc.numel() // lens.numel()
        extend = SimpleNamespace(
            out_cache_loc=forward_batch.out_cache_loc,
            req_pool_indices=forward_batch.req_pool_indices,
            encoder_lens=None,
            seq_lens=lens + rows,
            extend_prefix_lens=lens,
            extend_seq_lens=torch.full_like(lens, rows),
        )
        return super().forward_extend(q, k, v, layer, extend, save_kv_cache)


@dataclass
class Served:
    """A KV pool with random contents, a request table, and the attention over both."""

    backend: Any

    @property
    def pool(self) -> Any:
        return self.backend.token_to_kv_pool

    @property
    def table(self) -> Tensor:
        return self.backend.req_to_token_pool.req_to_token

    def context(self, batch: ForwardBatch) -> Any:
        """What SGLang has around a forward."""
        return forward_context(ForwardContext(attn_backend=self.backend), forward_batch=batch)

    def written(self) -> tuple[Tensor, Tensor]:
        """Copies of all keys and values, [L, S, H, D]."""
        return torch.stack(self.pool.k_buffer), torch.stack(self.pool.v_buffer)


def served(*, page_size: int = 1, seed: int = 5, dtype: torch.dtype = torch.bfloat16) -> Served:
    """The table's rows name slots that lie scattered by whole pages; slot 0 is nobody's."""
    draw = torch.Generator().manual_seed(seed)
    pool = MHATokenToKVPool(
        size=SLOTS - page_size,
        page_size=page_size,
        dtype=dtype,
        head_num=KV_HEADS,
        head_dim=HEAD_DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=draw).to(dtype).view(buffer.dtype))
    pages = torch.randperm(SLOTS // page_size - 1, generator=draw) + 1
    slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
    columns = COLUMNS // page_size * page_size
    table = torch.zeros(REQUESTS, COLUMNS, dtype=torch.int32)
    for row, request in enumerate((2, 4)):
        table[request, :columns] = slots[row * columns : (row + 1) * columns]
    requests = SimpleNamespace(req_to_token=table)
    return Served(VerifyAttention(SimpleNamespace(device="cpu", token_to_kv_pool=pool, req_to_token_pool=requests)))


def verify_batch(
    on: Served, lens: tuple[int, ...], *, vocab: int, buffered: bool = False, tokens: int = TOKENS
) -> ForwardBatch:
    """A verify batch of requests 2 and 4 with these committed tokens; a length of 0 is a padding row of a graph."""
    draw = torch.Generator().manual_seed(sum(lens))
    rows, locs, positions = [], [], []
    for request, length in zip((2, 4), lens, strict=False):
        rows.append(request if length else 0)
        here = slice(length, length + tokens)
        locs.append(on.table[request, here].long() if length else torch.zeros(tokens, dtype=torch.int64))
        positions.append(torch.arange(tokens) + length)
    count = len(lens) * tokens
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(lens),
        input_ids=torch.randint(0, vocab, (count,), generator=draw),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor([max(length, 1) for length in lens]),
        out_cache_loc=torch.cat(locs),
        seq_lens_sum=sum(lens),
        positions=torch.cat(positions),
        capture_hidden_mode=CaptureHiddenMode.FULL,
        dp_padding_mode=DpPaddingMode.get_default_mode_in_cuda_graph(),
        next_token_logits_buffer=torch.full((count, vocab), float("nan")) if buffered else None,
        spec_info=DFlashVerifyInput(draft_token=None, positions=None, draft_token_num=tokens),
    )
