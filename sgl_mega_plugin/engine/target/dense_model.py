"""A loaded Llama, Qwen2 or Qwen3 model of SGLang as the weights of the seam ``target_forward``: read, never copied.

Which models can be read, ``model_checks`` says. Used by ``verify_forward``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sgl_mega_plugin.engine.target.linears import matrix_of, scales_of


@dataclass(frozen=True)
class DecoderWeights:
    """The seam's arguments that a model holds, by the seam's names. L layers, A query and H KV heads of size D, E
    hidden, F intermediate, V vocabulary, P positions; bf16 but ``cos_sin`` and, where the model is fp8, matrices with
    their fp32 scales.
    """

    embedding: Tensor  # [V, E]
    input_norms: tuple[Tensor, ...]  # L x [E]
    qkv_weights: tuple[Tensor, ...]  # L x [(A + 2 H) * D, E]
    qkv_scales: tuple[Tensor, ...] | None  # L x [outputs] or [outputs / 128, E / 128]; the four lists or none
    qkv_biases: tuple[Tensor, ...] | None  # L x [(A + 2 H) * D]
    q_norms: tuple[Tensor, ...] | None  # L x [D]
    k_norms: tuple[Tensor, ...] | None  # L x [D]
    output_weights: tuple[Tensor, ...]  # L x [E, A * D]
    output_scales: tuple[Tensor, ...] | None
    mlp_norms: tuple[Tensor, ...]  # L x [E]
    gate_up_weights: tuple[Tensor, ...]  # L x [2 F, E]
    gate_up_scales: tuple[Tensor, ...] | None
    down_weights: tuple[Tensor, ...]  # L x [E, F]
    down_scales: tuple[Tensor, ...] | None
    final_norm: Tensor  # [E]
    lm_head_weight: Tensor  # [V, E]
    cos_sin: Tensor  # [P, D] fp32
    eps: float


def weights_of(model: Any) -> DecoderWeights:
    """The weights of a model that ``model_checks`` has no reasons against: its own memory, or views of it. A scale that
    SGLang keeps for a whole matrix is copied to each of its rows.
    """
    vocab = int(model.model.embed_tokens.org_vocab_size)
    return DecoderWeights(
        embedding=model.model.embed_tokens.weight[:vocab],
        final_norm=model.model.norm.weight,
        lm_head_weight=model.lm_head.weight[:vocab],
        eps=float(model.model.norm.variance_epsilon),
        **each_layer(list(model.model.layers)),
    )


def each_layer(layers: Sequence[Any]) -> dict[str, Any]:
    """What a decoder's layers hold, by the seam's names; a draft's too."""

    def each(of: Callable[[Any], Any]) -> tuple[Tensor, ...]:
        return tuple(of(layer) for layer in layers)

    def scales(of: Callable[[Any], Any]) -> tuple[Tensor, ...] | None:
        found = [scales_of(of(layer)) for layer in layers]
        return tuple(scale for scale in found if scale is not None) or None

    first = layers[0].self_attn
    has_bias, has_norms = first.qkv_proj.bias is not None, hasattr(first, "q_norm")
    return {
        "input_norms": each(lambda layer: layer.input_layernorm.weight),
        "qkv_weights": each(lambda layer: matrix_of(layer.self_attn.qkv_proj)),
        "qkv_scales": scales(lambda layer: layer.self_attn.qkv_proj),
        "qkv_biases": each(lambda layer: layer.self_attn.qkv_proj.bias) if has_bias else None,
        "q_norms": each(lambda layer: layer.self_attn.q_norm.weight) if has_norms else None,
        "k_norms": each(lambda layer: layer.self_attn.k_norm.weight) if has_norms else None,
        "output_weights": each(lambda layer: matrix_of(layer.self_attn.o_proj)),
        "output_scales": scales(lambda layer: layer.self_attn.o_proj),
        "mlp_norms": each(lambda layer: layer.post_attention_layernorm.weight),
        "gate_up_weights": each(lambda layer: matrix_of(layer.mlp.gate_up_proj)),
        "gate_up_scales": scales(lambda layer: layer.mlp.gate_up_proj),
        "down_weights": each(lambda layer: matrix_of(layer.mlp.down_proj)),
        "down_scales": scales(lambda layer: layer.mlp.down_proj),
        "cos_sin": first.rotary_emb.cos_sin_cache,
    }


def taps_of(model: Any) -> tuple[int, ...]:
    """The layers whose input SGLang captures for the draft, in the order in which it packs them.

    Each layer once and from the first to the last, whatever the order of the list; behind the last it captures nothing.
    """
    if not model.capture_aux_hidden_states:
        return ()
    return tuple(index for index in range(len(model.model.layers)) if index in model.model.layers_to_capture)
