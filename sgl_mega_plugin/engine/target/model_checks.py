"""Why a loaded model of SGLang does not go into the seam ``target_forward``: every reason, in words.

What settings alone rule out is in ``reasons``; how a model without reasons is read, in ``dense_model``. Called after
load, on each rank, by ``specs``. Imports SGLang inside functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from sgl_mega_plugin.engine.target.linears import kind_of, linear_reasons, tensor_reasons


def model_reasons(model: Any) -> list[str]:
    """Why a loaded model does not go into the seam, every reason in words; empty when it does."""
    family = next((each for each in _families() if each.is_of(model)), None)
    if family is None:
        names = ", ".join(each.causal.__name__ for each in _families())
        return [
            f"the target is a {type(model).__name__}, and only models with the parts and forward of {names} are read"
        ]
    layers = list(model.model.layers)
    unlike = [index for index, layer in enumerate(layers) if not family.has_layer(layer)]
    if unlike or not layers:
        seen = type(layers[unlike[0]]).__name__ if unlike else "missing"
        return [f"layer {unlike[0] if unlike else 0} is {seen} or has parts that {family.layer.__name__} does not have"]
    eps = getattr(model.model.norm, "variance_epsilon", None)
    reasons = by_layer([[*layer_reasons(layer, index, layers[0], eps)] for index, layer in enumerate(layers)])
    reasons += norm_reasons("the last norm", model.model.norm, eps)
    return [*reasons, *_vocabulary_reasons(model), *_logits_reasons(model.logits_processor)]


def by_layer(reasons: Sequence[Iterable[str]]) -> list[str]:
    """Each reason once, with the layers that have it; ``reasons`` are a layer's each."""
    found: dict[str, list[int]] = {}
    for index, of_layer in enumerate(reasons):
        for reason in of_layer:
            found.setdefault(reason, []).append(index)
    return [f"{reason} ({_where(at, len(reasons))})" for reason, at in found.items()]


def hook_reasons(model: Any) -> list[str]:
    """Modules with forward hooks, which would not run; SGLang adds its own after it has built the spec."""
    parts = model.named_modules()
    hooked = [name or "the model" for name, part in parts if part._forward_hooks or part._forward_pre_hooks]
    return [f"forward hooks would not run: those of {', '.join(hooked)}"] if hooked else []


@dataclass(frozen=True)
class _Family:
    """The classes that one of SGLang's decoders is made of."""

    causal: type
    decoder: type
    layer: type
    attention: type
    mlp: type

    def is_of(self, model: Any) -> bool:
        own = getattr(type(model), "forward", None) is self.causal.forward  # type: ignore[attr-defined]
        return own and type(model.model) is self.decoder

    def has_layer(self, layer: Any) -> bool:
        seen: type = type(layer)
        return seen is self.layer and type(layer.self_attn) is self.attention and type(layer.mlp) is self.mlp


def _families() -> tuple[_Family, ...]:
    from sglang.srt.models import llama, qwen2, qwen3

    return (
        _Family(
            qwen3.Qwen3ForCausalLM, qwen3.Qwen3Model, qwen3.Qwen3DecoderLayer, qwen3.Qwen3Attention, qwen2.Qwen2MLP
        ),
        _Family(
            qwen2.Qwen2ForCausalLM, qwen2.Qwen2Model, qwen2.Qwen2DecoderLayer, qwen2.Qwen2Attention, qwen2.Qwen2MLP
        ),
        _Family(
            llama.LlamaForCausalLM, llama.LlamaModel, llama.LlamaDecoderLayer, llama.LlamaAttention, llama.LlamaMLP
        ),
    )


def _where(at: list[int], layers: int) -> str:
    if len(at) == layers:
        return "every layer"
    return f"layer {at[0]}" if len(at) == 1 else f"layers {at[0]} to {at[-1]}, {len(at)} of {layers}"


def layer_reasons(layer: Any, index: int, first: Any, eps: float | None, *, block: bool = False) -> Iterator[str]:
    """Why a layer does not go into the seam: of a target, or of a draft whose block's rows see each other (``block``).

    ``first`` is the first layer, ``eps`` the last norm's.
    """
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

    attention, mlp = layer.self_attn, layer.mlp
    unfit = [
        *_linear_reasons("qkv_proj", attention.qkv_proj, QKVParallelLinear, may_have_bias=True),
        *_linear_reasons("o_proj", attention.o_proj, RowParallelLinear),
        *_linear_reasons("gate_up_proj", mlp.gate_up_proj, MergedColumnParallelLinear),
        *_linear_reasons("down_proj", mlp.down_proj, RowParallelLinear),
    ]
    yield from unfit
    if not unfit:
        yield from _kind_reasons(layer, first)
    if type(mlp.act_fn) is not SiluAndMul:
        yield f"the MLP's activation is {type(mlp.act_fn).__name__}, not SiluAndMul"
    norms = {"input_layernorm": layer.input_layernorm, "post_attention_layernorm": layer.post_attention_layernorm}
    norms |= {name: getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)}
    for name, norm in norms.items():
        yield from norm_reasons(name, norm, eps)
    if (attention.qkv_proj.bias is None) != (first.self_attn.qkv_proj.bias is None):
        yield "some layers have a bias of queries, keys and values and others none"
    yield from _attention_reasons(attention, index, block=block)
    yield from _rotary_reasons(attention.rotary_emb, first.self_attn.rotary_emb, attention.head_dim)


def _linear_reasons(name: str, linear: Any, kind: type, *, may_have_bias: bool = False) -> Iterator[str]:
    seen: type = type(linear)
    if seen is not kind:
        yield f"{name} is a {seen.__name__}, not a {kind.__name__}"
        return
    yield from linear_reasons(name, linear)
    if linear.bias is not None and not may_have_bias:
        yield f"{name} has a bias, and the seam has none there"
    elif linear.bias is not None:
        yield from tensor_reasons(f"{name}'s bias", linear.bias)


def _kind_reasons(layer: Any, first: Any) -> Iterator[str]:
    """Matrices of one layer, or of layers, that are not of one kind."""
    attention, mlp = layer.self_attn, layer.mlp
    seen = {kind_of(linear) for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)}
    with suppress(ValueError):  # the first layer's own reasons say what it is
        seen.add(kind_of(first.self_attn.qkv_proj))
    if len(seen) > 1:
        yield f"matrices are {' and '.join(sorted(seen))}, and the seam has one kind for all layers"


def norm_reasons(name: str, norm: Any, eps: float | None) -> Iterator[str]:
    """Why a norm is not the seam's, ``eps`` being the last norm's."""
    from sglang.srt.layers.layernorm import RMSNorm

    if type(norm) is not RMSNorm:
        yield f"{name} is a {type(norm).__name__}, not an RMSNorm"
        return
    if norm.variance_size_override is not None or norm.cast_x_before_out_mul or norm.fp32_residual:
        yield f"{name} is an RMSNorm with another formula (part of the row, or an early cast)"
    if norm.variance_epsilon != eps:
        yield f"{name} adds {norm.variance_epsilon} to the mean square, the last norm {eps}; the seam has one for all"
    yield from tensor_reasons(f"{name}'s weight", norm.weight)


def _attention_reasons(attention: Any, index: int, *, block: bool) -> Iterator[str]:
    from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
    from sglang.srt.layers.radix_attention import AttentionType

    attn = attention.attn
    if attn.layer_id != index:
        yield f"its keys and values are those of layer {attn.layer_id} of the cache"
    if attn.sliding_window_size is not None and attn.sliding_window_size > -1:
        yield f"attention has a sliding window of {attn.sliding_window_size}"
    if attn.logit_cap:
        yield f"attention scores are capped at {attn.logit_cap}"
    if attn.scaling != attention.head_dim**-0.5:
        yield f"attention scores are scaled by {attn.scaling}, not by head size {attention.head_dim} ** -0.5"
    if attn.v_head_dim != attn.qk_head_dim:
        yield f"values have head size {attn.v_head_dim}, keys {attn.qk_head_dim}"
    if attn.is_cross_attention or attn.attn_type != (AttentionType.ENCODER_ONLY if block else AttentionType.DECODER):
        yield "rows of a block do not see each other" if block else "attention is not a decoder's causal self-attention"
    if attn.use_irope or attn.xai_temperature_len > 0:
        yield "attention depends on positions in another way than by rotation"
    if not isinstance(attn.quant_method, (BaseKVCacheMethod, type(None))):
        yield f"keys and values are quantized: the method is {type(attn.quant_method).__name__}"
    # A quantized model has scales even so; those of a bf16 cache are one unless the checkpoint brings others.
    scales = [torch.as_tensor(scale) for scale in (attn.k_scale, attn.v_scale) if scale is not None]
    if not all(bool((scale == 1).all()) for scale in scales):
        yield "keys and values are scaled for a quantized cache"


def _rotary_reasons(rotary: Any, first: Any, head_dim: int) -> Iterator[str]:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    methods = ("forward", "forward_native", "forward_cuda")
    plain = isinstance(rotary, RotaryEmbedding)
    if not plain or any(getattr(type(rotary), name) is not getattr(RotaryEmbedding, name) for name in methods):
        yield f"positions are rotated by {type(rotary).__name__}, which does more than look up a table"
        return
    if not rotary.is_neox_style:
        yield "the rotary embedding pairs neighbours (GPT-J style), the seam halves"
    if rotary.position_start:
        yield f"the rotary embedding's table begins with position {rotary.position_start}"
    if rotary.rotary_dim != head_dim:
        yield f"{rotary.rotary_dim} of a head's {head_dim} values are rotated, and the seam rotates all"
    if rotary.cos_sin_cache is not getattr(first, "cos_sin_cache", None):
        yield "layers differ in their rotary embedding"
    yield from tensor_reasons("the rotary embedding's table", rotary.cos_sin_cache, torch.float32)


def _vocabulary_reasons(model: Any) -> Iterator[str]:
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    parts: dict[str, tuple[Any, tuple[type, ...]]] = {
        "the embedding": (model.model.embed_tokens, (VocabParallelEmbedding,))
    }
    if model.lm_head is not model.model.embed_tokens:
        parts["the LM head"] = (model.lm_head, (ParallelLMHead, VocabParallelEmbedding))
    for name, (part, kinds) in parts.items():
        yield from _table_reasons(name, part, kinds)
        if type(part) in kinds and part.org_vocab_size != model.logits_processor.vocab_size:
            yield f"{name} has {part.org_vocab_size} tokens, the logits {model.logits_processor.vocab_size}"


def embedding_reasons(name: str, embedding: Any) -> list[str]:
    """Why an embedding is not the seam's: a matrix [V, E] of which a token takes a row."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return list(_table_reasons(name, embedding, (VocabParallelEmbedding,)))


def _table_reasons(name: str, part: Any, kinds: tuple[type, ...]) -> Iterator[str]:
    from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod

    if type(part) not in kinds:
        yield f"{name} is a {type(part).__name__}, not a {kinds[0].__name__}"
        return
    if part.tp_size != 1:
        yield f"{name} is split over {part.tp_size} ranks"
    if type(part.quant_method) is not UnquantizedEmbeddingMethod:
        yield f"{name} is quantized: its method is {type(part.quant_method).__name__}"
        return
    if part.num_embeddings != part.org_vocab_size:
        yield f"{name} has {part.num_embeddings - part.org_vocab_size} tokens added behind the vocabulary's padding"
    yield from tensor_reasons(f"{name}'s weight", part.weight)


def _logits_reasons(processor: Any) -> Iterable[str]:
    """What SGLang's logits processor does besides one matrix product."""
    extras = {
        "logits are scaled": processor.logit_scale is not None,
        "logits are soft-capped": bool(processor.final_logit_softcapping),
        "logits are computed or kept in fp32": processor.use_fp32_lm_head or processor.use_fp32_lm_head_output,
        "logits are gathered from ranks": processor.do_tensor_parallel_all_gather,
        "logits of every position are asked for": processor.return_full_logits,
        "the last hidden states are returned besides (--enable-return-aux-hidden-states)": (
            processor.keep_last_hidden_states
        ),
        "training on policy asks for the trainer's arithmetic": processor.rl_on_policy_target is not None,
    }
    return [reason for reason, holds in extras.items() if holds]
