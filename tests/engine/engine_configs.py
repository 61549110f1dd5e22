"""Configuration-only model folders: SGLang resolves its settings from them without any weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE, LAYERS = 1024, 4

_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    "LlamaForCausalLM": {"model_type": "llama", "mlp_bias": False},
}


def write_target(folder: Path, architecture: str = "Qwen3ForCausalLM", **changes: Any) -> str:
    """A target; families without settings of their own take Qwen3's."""
    return _write(folder, {**_QWEN3, **_FAMILIES.get(architecture, {}), "architectures": [architecture], **changes})


def write_draft(folder: Path, architecture: str = "Qwen3DSparkModel", **changes: Any) -> str:
    """A DSpark draft with block 7 and a vanilla Markov head."""
    draft = {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "num_target_layers": LAYERS,
        "target_layer_ids": [0, 2],
        "block_size": 7,
        "mask_token_id": VOCAB_SIZE - 1,
        "markov_rank": 16,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
    }
    return _write(folder, {**_QWEN3, **draft, "architectures": [architecture], **changes})


def _write(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
